"""What a late rank did in a step, from the phases of all ranks: where deep windows do not tell.

An always-on record holds no operators, but each step's phases. The phase in which a rank took longest
beyond the others' median of the same step is where its lateness came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, PHASES, Table

from .results import RankSummary

__all__ = ["Doing", "excess_phases"]

Array = npt.NDArray[Any]

#: (activity, example) of a step; ``None`` where no phase stands out or phases are not known.
Doing = tuple[str, str] | None

_ACTIVITY = {
    "data": "loader",
    "copy": "copy",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "other": "python",
}
#: Ranks whose median stands for all others': more change nothing and cost time.
_MOST_OTHERS = 64


def excess_phases(summaries: Mapping[int, RankSummary]) -> Callable[[int, int], Doing]:
    """A function of rank and step that says what the rank did longer than the others in that step."""
    phases = {rank: _phases(summary.steps) for rank, summary in summaries.items()}
    phases = {rank: steps for rank, steps in phases.items() if steps}
    cache: dict[tuple[int, int], Doing] = {}

    def doing(rank: int, step: int) -> Doing:
        key = (rank, step)
        if key not in cache:
            cache[key] = _doing(phases, rank, step)
        return cache[key]

    return doing


def _phases(steps: Table | None) -> dict[int, Array]:
    """Step → phases in ns, in the order of :data:`_ACTIVITY`, of the steps where they are known."""
    if steps is None:
        return {}
    columns = np.stack([steps[f"phase_{name}_ns"] for name in PHASES if name in _ACTIVITY], axis=1)
    known = (columns != MISSING).all(axis=1)
    return dict(zip(steps["index"][known].tolist(), columns[known], strict=True))


def _doing(phases: Mapping[int, Mapping[int, Array]], rank: int, step: int) -> Doing:
    own = phases.get(rank, {}).get(step)
    if own is None:
        return None
    present = (steps[step] for other, steps in phases.items() if other != rank and step in steps)
    others = list(islice(present, _MOST_OTHERS))
    if not others:
        return None
    excess = own - np.median(np.stack(others), axis=0)
    worst = int(excess.argmax())
    name = [phase for phase in PHASES if phase in _ACTIVITY][worst]
    return (_ACTIVITY[name], f"phase {name}") if excess[worst] > 0 else None
