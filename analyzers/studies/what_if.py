"""What changes would make of the recorded step: its dependency graph, replayed, changed, and replayed again.

The graph and its transformations are the planner's (:mod:`trine.optim.plan.whatif`); here they are read with everything
else, and asked what the findings recommend. How far the replay itself is off comes first. ``docs/whatif.md`` has the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from trine.analyzers._tabular import Columns, Tabular
from trine.optim.plan.whatif import Interval, Recorded, WhatIf, replayed
from trine.optim.plan.whatif.build import MOST_RANKS, Part, joined, part_of
from trine.record.errors import UsageError
from trine.record.model import Rank

from ._scope import Scope, Whole

__all__ = ["KEY", "Answer", "ReplayedStep", "WhatIfs", "join", "reduce", "to_json"]

KEY = "what_if"

#: Steps of each rank that are replayed.
MOST_STEPS = 3
#: Rows of a trace's tables beyond which it is left to ``trine.what_if``: an analysis must stay quick.
MOST_ROWS = 60_000
#: Of the job's changes, those that are asked in every analysis; findings ask theirs besides.
ASKED: tuple[Mapping[str, Any], ...] = (
    {"precision.dtype": "bf16"},
    {"compute.compile": "blocks"},
    {"checkpointing.mode": "full"},
    {"communication.compression": "bf16"},
    {"zero.stage": 2},
    {"straggler": False},
    {"loader_wait": False},
)
#: Keys of a recommendation that leave the step's graph as it is, or that its other keys bring about.
_BESIDE = frozenset(
    {"communication.gradient_as_view", "data.prefetch", "data.pin_memory", "precision.loss_scale"}
)
#: A replay that is further off than this says nothing of changes.
MOST_ERROR = 0.1
#: The same of the graph against the usual step: that has ranks wait for each other's slow moments, which phases' medians lack.
MOST_USUAL_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class ReplayedStep(Tabular):
    """One recorded step: as it was measured, and as its graph replays it. ``error``: relative."""

    index: int
    measured_ns: int
    replayed_ns: int
    error: float


@dataclass(frozen=True, slots=True)
class Answer(Tabular):
    """A change, and the step with it: 95 % of bootstrap draws lie from low to high. A negative gain is a cost. ``notes``:
    what is assumed of this change beyond what is of all.
    """

    COLUMNS: ClassVar[Columns] = {"notes": None}

    change: str
    predicted_low_ns: int
    predicted_mid_ns: int
    predicted_high_ns: int
    gain_low_ns: int
    gain_mid_ns: int
    gain_high_ns: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WhatIfs(Tabular):
    """``replay_error`` is the median of how far steps are off; ``basis`` what tasks are: kernels, operators or phases.
    ``notes``: assumed. ``usual_error``: of the graph that changes are made to, against the usual step. ``answers``: none
    where one of them is too large (:attr:`doubt`).

    ``run`` answers other changes: :meth:`ask`.
    """

    COLUMNS: ClassVar[Columns] = {"run": None, "notes": None}

    basis: str
    replay_error: float
    usual_error: float
    step_ns: int
    steps: tuple[ReplayedStep, ...]
    answers: tuple[Answer, ...]
    notes: tuple[str, ...]
    run: Recorded

    @property
    def doubt(self) -> str | None:
        """Why no change is told from this replay; None where it is near enough to what was measured."""
        if abs(self.replay_error) > MOST_ERROR:
            return f"a replay that is more than {MOST_ERROR:.0%} off says nothing of changes"
        if abs(self.usual_error) > MOST_USUAL_ERROR:
            return f"a graph that is more than {MOST_USUAL_ERROR:.0%} from the usual step says nothing of changes to it"
        return None

    def ask(self, change: Mapping[str, Any]) -> WhatIf | None:
        """The answer to a recommendation's change; None where the graph, its replay or the machine's times cannot say."""
        asked = {key: value for key, value in change.items() if key not in _BESIDE}
        if not asked or self.basis == "phases" or self.doubt is not None:
            return None
        try:
            return self.run.what_if(asked)
        except UsageError:
            return None


def reduce(scope: Scope) -> Part | None:
    """This rank's steps as tasks; None for ranks and tables beyond what an analysis replays."""
    rank = scope.rank
    if rank.rank >= MOST_RANKS or sum(_rows(part) for part in (rank, *rank.windows)) > MOST_ROWS:
        return None
    part = part_of(rank, MOST_STEPS)
    return part if part.steps else None


def _rows(rank: Rank) -> int:
    return sum(0 if table is None else len(table) for table in (rank.host, rank.device))


def join(parts: Mapping[int, Part], whole: Whole) -> WhatIfs | str:
    """The graph of all ranks, and what the usual changes make of it."""
    if not parts:
        return (
            "no step of at most 60,000 operators and kernels was recorded to be replayed; record a few steps, or ask "
            "trine.what_if of this trace"
        )
    try:
        run = replayed(*joined([parts[rank] for rank in sorted(parts)], whole.job.world_size, "this job"))
    except UsageError as error:
        return str(error)
    found = WhatIfs(
        run.graph.basis, run.replay_error, run.usual_error, _ns(float(np.median(run.measured))), _steps(run), (),
        run.graph.notes, run,
    )  # fmt: skip
    if found.doubt is not None:
        return replace(found, notes=(*found.notes, found.doubt))
    answers = tuple(answer for change in ASKED if (answer := _answer(run, change)) is not None)
    return (
        replace(found, answers=answers) if answers else "no usual change could be made to this record's steps"
    )


def _steps(run: Recorded) -> tuple[ReplayedStep, ...]:
    errors = run.replay_errors
    return tuple(
        ReplayedStep(
            step.index,
            _ns(step.measured_s),
            _ns(step.measured_s * (1 + errors[step.index])),
            errors[step.index],
        )
        for step in run.graph.recorded
    )


def _answer(run: Recorded, change: Mapping[str, Any]) -> Answer | None:
    """None where the record has no answer."""
    try:
        found = run.what_if(change)
    except UsageError:
        return None
    words = ", ".join(
        f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items()
    )
    own = tuple(note for note in found.notes if note not in run.graph.notes)
    return Answer(words, *_interval_ns(found.predicted), *_interval_ns(found.gain), notes=own)


def _interval_ns(found: Interval) -> tuple[int, int, int]:
    return _ns(found.low), _ns(found.mid), _ns(found.high)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def to_json(result: WhatIfs) -> dict[str, Any]:
    """The result in the contract's terms."""
    return {
        "basis": result.basis,
        "replay_error": result.replay_error,
        "usual_error": result.usual_error,
        "step_ns": result.step_ns,
        "steps": [asdict(step) for step in result.steps],
        "answers": [asdict(answer) for answer in result.answers],
        "notes": list(result.notes),
    }
