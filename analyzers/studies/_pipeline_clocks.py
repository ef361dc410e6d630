"""Whether the stages' clocks can be right: no stage begins a micro-batch before the stage before it has ended it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._pipeline_layout import Layout
from ._pipeline_work import Work

__all__ = ["ClockCheck", "check_clocks"]

#: A contradiction of less than this share of an iteration is left: correcting it would change no figure.
NEGLIGIBLE = 0.005


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """``contradiction_ns``: by how much a rank began too early at most (0 where never); ``applied_ns``: what was
    added to its times for it."""

    rank: int
    contradiction_ns: int
    applied_ns: int


def check_clocks(
    rows: Sequence[Work], offsets: Sequence[int], layout: Layout, iteration_ns: int
) -> list[ClockCheck]:
    """One check a rank, against the rank before it: as in NTP, what comes forward bounds the offset from below, what
    goes back from above, and the middle is taken."""
    checks = [ClockCheck(rows[0].rank, 0, 0)]
    shift = 0
    for place in range(1, len(rows)):
        low, high = _bounds(rows[place - 1], rows[place], offsets[place - 1] + shift, offsets[place])
        contradiction = max(low if low is not None else 0, -high if high is not None else 0, 0)
        shift = 0
        if contradiction > NEGLIGIBLE * iteration_ns:
            if low is not None and high is not None and low <= high:
                shift = (low + high) // 2
            else:
                shift = low if low is not None and low > 0 else high or 0
        checks.append(ClockCheck(rows[place].rank, contradiction, shift))
    return checks


def _bounds(one: Work, other: Work, offset_one: int, offset_other: int) -> tuple[int | None, int | None]:
    """Least and most that must be added to the other's times, ns; None where nothing bounds it."""
    forward_one, backward_one = _times(one, ends=(0,), starts=(1, 2))
    forward_other, backward_other = _times(other, ends=(1, 2), starts=(0,), swap=True)
    low = [
        end + offset_one - (forward_other[key] + offset_other)
        for key, end in forward_one.items()
        if key in forward_other
    ]
    high = [
        start + offset_one - (backward_other[key] + offset_other)
        for key, start in backward_one.items()
        if key in backward_other
    ]
    return max(low, default=None), min(high, default=None)


Key = tuple[int, int, int]


def _times(
    work: Work, ends: tuple[int, ...], starts: tuple[int, ...], *, swap: bool = False
) -> tuple[dict[Key, int], dict[Key, int]]:
    """(iteration, stage that sends forward, micro-batch) → an end, and → a start. For the receiving stage
    (``swap``) forwards give starts and backwards ends."""
    marks = work.marks
    found: list[dict[Key, int]] = []
    for codes, column in ((ends, marks.end), (starts, marks.start)):
        rows = np.flatnonzero(np.isin(marks.direction, codes))
        stage = marks.stage[rows]
        stage = np.where(stage < 0, 0, stage - 1 if swap else stage)
        keys = zip(
            marks.iteration[rows].tolist(), stage.tolist(), marks.microbatch[rows].tolist(), strict=True
        )
        found.append(dict(zip(keys, column[rows].tolist(), strict=True)))
    return (found[1], found[0]) if swap else (found[0], found[1])
