"""Goodput: of the whole run, all its attempts and what lies between them, the part in steps that made progress.

    wall == productive + start-up + warm-up + loader + evaluation + checkpoint + profiling + setup + other
            + between steps + repeated + restart + shut-down

The wall reaches from the first start (of the process, or where the profile began) to the last end. An attempt that
*failed* or was *killed* belongs to the run with the gap after it; one that was stopped by hand belongs to it without
the gap, since nobody knows whether that was wanted; one that finished ended a run of its own. Each nanosecond counts
once: regions (checkpoint before evaluation before the rest) come before steps, and of a step repeated before the
loader's phase, before what a warm-up step takes longer than the median. Terms as in Google's ML Goodput
Measurement. One rank, the lowest, speaks for all: they stop for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Tabular
from trine.analyzers.intervals import EMPTY, Spans, clip, complement, measure, union
from trine.analyzers.planned import is_simulated
from trine.analyzers.statistics import find_warm_up
from trine.record.model import MISSING, Rank, Table

from ._scope import Scope, Whole

__all__ = ["CAUSES", "KEY", "Attempt", "Goodput", "join", "reduce", "to_json"]

KEY = "goodput"

Array = npt.NDArray[Any]

#: What is not productive, in order of display.
CAUSES = (
    "start_up",
    "warm_up",
    "loader",
    "evaluation",
    "checkpoint",
    "profiling",
    "setup",
    "other",
    "between_steps",
    "repeated",
    "restart",
    "shut_down",
)
#: Kinds of regions, each taking what those before it have left.
_REGIONS = ("work", "checkpoint", "evaluation", "profiling", "setup", "other")
#: An attempt that did fewer steps was a trial of the command line, not a run that was lost.
LEAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the run. ``losses_ns`` is cause → ns of this attempt (``restart``: the gap after it)."""

    attempt: int
    state: str
    started_ns: int
    ended_ns: int
    steps: int
    first_step: int | None
    last_step: int | None
    productive_ns: int
    losses_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Goodput(Tabular):
    """``goodput`` is productive over wall. ``checkpoints`` and ``evaluations`` count those that a step followed, and
    ``…_ns`` what they held training up for; ``steady_ns`` is from the first step to the last, over attempts.
    ``repeated_steps`` is None where steps are numbered anew in each attempt, so that nobody can tell."""

    rank: int
    goodput: float
    wall_ns: int
    productive_ns: int
    losses_ns: Mapping[str, int]
    attempts: tuple[Attempt, ...]
    restarts: int
    steps: int
    repeated_steps: int | None
    steady_ns: int
    checkpoints: int
    checkpoint_ns: int
    checkpoint_names: tuple[str, ...]
    evaluations: int
    evaluation_ns: int


@dataclass(slots=True)
class _Times:
    """One attempt, reduced to spans."""

    rank: Rank
    start: int
    end: int
    steps: Table | None
    rolled: tuple[Mapping[str, Any], ...]
    losses: dict[str, int] = field(default_factory=dict)
    productive: int = 0
    repeated_steps: int = 0

    @property
    def count(self) -> int:
        return (0 if self.steps is None else len(self.steps)) + sum(int(h["steps"]) for h in self.rolled)

    @property
    def indexes(self) -> tuple[int, int] | None:
        """First and last step number."""
        known = [] if self.steps is None else [int(self.steps["index"].min()), int(self.steps["index"].max())]
        known += [number for h in self.rolled for number in (h["first"], h["last"])]
        return (min(known), max(known)) if known else None

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Start of the first step and end of the last, ns."""
        known = (
            [] if self.steps is None else [int(self.steps["start_ns"].min()), int(self.steps["end_ns"].max())]
        )
        known += [time for h in self.rolled for time in (h["start_ns"], h["end_ns"])]
        return (min(known), max(known)) if known else None


def reduce(scope: Scope) -> Goodput | str | None:
    """One rank's run; in words why it cannot be said."""
    rank = scope.rank
    if rank.format != "trine" or rank.metadata.get("started_ns") is None or is_simulated(rank.metadata):
        return None
    if scope.selection.is_range:
        return "goodput is of the whole run; without --steps it is shown"
    attempts = [_times(one) for one in (*rank.attempts, rank)]
    attempts = _of_one_run(attempts)
    if not attempts or not any(one.count for one in attempts):
        return "no step was completed, so nothing was productive"
    for number, one in enumerate(attempts):
        _divide(one, _redone_from(one, attempts[number + 1]) if number + 1 < len(attempts) else None)
    return _summed(rank.rank, attempts)


def _times(rank: Rank) -> _Times:
    steps = rank.steps
    rolled: tuple[Mapping[str, Any], ...] = ()
    found = rank.metadata.get("rolled_up")
    if isinstance(found, Mapping):
        rolled = tuple(found["histograms"])
        if steps is not None:  # those that a roll-up kept are in its histograms too
            steps = steps.select((steps["index"] < found["first"]) | (steps["index"] > found["last"]))
    steps = steps if steps is not None and len(steps) else None
    started = rank.metadata.get("run_started_ns") or rank.metadata["started_ns"]
    ends = [started]
    if rank.metadata.get("ended_ns"):
        ends.append(rank.metadata["ended_ns"])
    for table, column in ((rank.steps, "end_ns"), (rank.regions, "end_ns"), (rank.samples, "time_ns")):
        if table is not None and len(table):
            ends.append(int(table[column].max()))
    made = _Times(rank, int(started), int(max(ends)), steps, rolled)
    bounds = made.bounds
    if bounds is not None:
        made.start, made.end = min(made.start, bounds[0]), max(made.end, bounds[1])
    return made


def _of_one_run(attempts: Sequence[_Times]) -> list[_Times]:
    """The last attempt, and those before it that it went on from; trials of a few steps are left out."""
    kept: list[_Times] = []
    for one in reversed(attempts):
        if kept and one.rank.metadata.get("state") == "finished":
            break
        if kept and one.count < LEAST_STEPS:
            continue
        kept.insert(0, one)
    return kept


def _redone_from(one: _Times, following: _Times) -> int | None:
    """The first step number of ``one`` that ``following`` did again; None where that cannot be known."""
    resumed = following.rank.metadata.get("resumed_from_step")
    if isinstance(resumed, int):
        return resumed
    indexes = following.indexes
    # Numbered from 0 again: a start from scratch, or steps that are counted by attempt.
    return indexes[0] if indexes is not None and indexes[0] > 0 else None


def _divide(one: _Times, redone_from: int | None) -> None:
    """Fill ``productive`` and ``losses``: a partition of the attempt."""
    taken, losses = EMPTY, dict.fromkeys(CAUSES, 0)
    work = 0
    for kind in _REGIONS:
        spans = clip(_regions(one.rank, kind), one.start, one.end) - taken
        taken = taken | spans
        if kind == "work":
            work = measure(spans)
        else:
            losses[kind] = measure(spans)
    in_steps, useful, loader, warm_up, repeated = _steps(one, taken, redone_from)
    loose, loose_loader = _rolled(one, taken, losses)
    losses |= {"loader": loader + loose_loader, "warm_up": warm_up, "repeated": repeated}
    one.productive = work + useful + loose
    everything = taken | in_steps | _rolled_spans(one)
    bounds = one.bounds
    first, last = bounds if bounds is not None else (one.end, one.end)
    gaps = complement(everything, one.start, one.end)
    losses["start_up"] = measure(clip(gaps, one.start, first))
    losses["shut_down"] = measure(clip(gaps, last, one.end))
    losses["between_steps"] += measure(clip(gaps, first, last))
    one.losses = losses


def _regions(rank: Rank, kind: str) -> Spans:
    table = rank.regions
    if table is None:
        return EMPTY
    rows = table["kind"] == table.strings.find(kind)
    return union(table["start_ns"][rows], table["end_ns"][rows])


def _steps(one: _Times, taken: Spans, redone_from: int | None) -> tuple[Spans, int, int, int, int]:
    """(steps without regions, productive, loader, warm-up, repeated) of the steps that are known one by one."""
    steps = one.steps
    if steps is None:
        return EMPTY, 0, 0, 0, 0
    spans = union(steps["start_ns"], steps["end_ns"]) - taken
    again = np.zeros(len(steps), dtype=bool) if redone_from is None else steps["index"] >= redone_from
    one.repeated_steps = int(again.sum())
    repeated = measure(union(steps["start_ns"][again], steps["end_ns"][again]) - taken)
    useful = measure(spans) - repeated
    data = steps["phase_data_ns"][~again]
    loader = min(int(data[data != MISSING].sum()), useful)
    warm_up = min(_warm_up(steps.select(~again), taken), useful - loader)
    return spans, useful - loader - warm_up, loader, warm_up, repeated


def _warm_up(steps: Table, taken: Spans) -> int:
    """What the first steps took longer than the median of the rest, their loading and regions left out."""
    if not len(steps):
        return 0
    steps = steps.select(np.argsort(steps["start_ns"], kind="stable"))
    length = steps["end_ns"] - steps["start_ns"]
    count = find_warm_up(length)
    if not count:
        return 0
    own = length - np.where(steps["phase_data_ns"] == MISSING, 0, steps["phase_data_ns"])
    inside = np.array(
        [
            measure(clip(taken, int(s), int(e)))
            for s, e in zip(steps["start_ns"][:count], steps["end_ns"][:count], strict=True)
        ]
    )
    usual = int(np.median(own[count:]))
    return int(np.maximum(own[:count] - inside - usual, 0).sum())


def _rolled_spans(one: _Times) -> Spans:
    if not one.rolled:
        return EMPTY
    start, end = (np.array([h[name] for h in one.rolled], dtype=np.int64) for name in ("start_ns", "end_ns"))
    return union(start, end)


def _rolled(one: _Times, taken: Spans, losses: dict[str, int]) -> tuple[int, int]:
    """(productive, loader) of stretches of which only sums are left; what lies between their steps goes to ``losses``.

    A region in such a stretch is taken from the time between its steps first, then from the steps."""
    productive = loader = 0
    for h in one.rolled:
        spanned = h["end_ns"] - h["start_ns"]
        inside = measure(clip(taken, h["start_ns"], h["end_ns"]))
        between = max(spanned - h["duration_ns"], 0)
        worked = max(min(h["duration_ns"], spanned) - max(inside - between, 0), 0)
        losses["between_steps"] += spanned - inside - worked
        data = min(h["sums"].get("phase_data_ns") or 0, worked)
        loader += data
        productive += worked - data
    return productive, loader


def _summed(rank: int, attempts: Sequence[_Times]) -> Goodput:
    losses = dict.fromkeys(CAUSES, 0)
    for number, one in enumerate(attempts[:-1]):
        if one.rank.metadata.get("state") != "stopped":
            one.losses["restart"] = max(attempts[number + 1].start - one.end, 0)
    for one in attempts:
        for cause, ns in one.losses.items():
            losses[cause] += ns
    productive = sum(one.productive for one in attempts)
    wall = productive + sum(losses.values())
    numbered = all(_redone_from(one, following) is not None for one, following in pairwise(attempts))
    checkpoints, evaluations = _followed(attempts, "checkpoint"), _followed(attempts, "evaluation")
    return Goodput(
        rank=rank,
        goodput=productive / wall if wall else 0.0,
        wall_ns=wall,
        productive_ns=productive,
        losses_ns=losses,
        attempts=tuple(_attempt(one) for one in attempts),
        restarts=sum(one.rank.metadata.get("state") != "stopped" for one in attempts[:-1]),
        steps=sum(one.count - one.repeated_steps for one in attempts),
        repeated_steps=sum(one.repeated_steps for one in attempts) if numbered else None,
        steady_ns=sum(b[1] - b[0] for one in attempts if (b := one.bounds) is not None),
        checkpoints=checkpoints[0],
        checkpoint_ns=checkpoints[1],
        checkpoint_names=checkpoints[2],
        evaluations=evaluations[0],
        evaluation_ns=evaluations[1],
    )


def _followed(attempts: Sequence[_Times], kind: str) -> tuple[int, int, tuple[str, ...]]:
    """Regions of a kind between the first step and the end of the last: (number, ns, names)."""
    count, length, names = 0, 0, set()
    for one in attempts:
        bounds, table = one.bounds, one.rank.regions
        if bounds is None or table is None:
            continue
        rows = table["kind"] == table.strings.find(kind)
        rows &= (table["start_ns"] >= bounds[0]) & (table["end_ns"] <= bounds[1])
        count += int(rows.sum())
        length += measure(union(table["start_ns"][rows], table["end_ns"][rows]))
        names |= {str(name) for name in table.text("name")[rows]}
    return count, length, tuple(sorted(names))


def _attempt(one: _Times) -> Attempt:
    indexes = one.indexes
    return Attempt(
        attempt=int(one.rank.metadata.get("attempt") or 1),
        state=str(one.rank.metadata.get("state") or "unknown"),
        started_ns=one.start,
        ended_ns=one.end,
        steps=one.count,
        first_step=None if indexes is None else indexes[0],
        last_step=None if indexes is None else indexes[1],
        productive_ns=one.productive,
        losses_ns=one.losses,
    )


def join(parts: Mapping[int, Goodput | str], whole: Whole) -> Goodput | str:
    """The lowest rank's run."""
    if not parts:
        return (
            "it needs a record of the whole run, which says when it began and ended (trine.profile, trine run); a trace "
            "holds a few steps"
        )
    return parts[min(parts)]


def to_json(result: Goodput) -> dict[str, Any]:
    """The result as plain values."""
    return asdict(result)
