"""How far ranks' clocks lie apart, from the fact that ranks leave a collective together.

Only collectives that every rank must enter tell it: a broadcast's root may leave before its last
receiver enters. The offset is the median difference of ends, so a few odd calls do not move it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING

from ._integers import integer_median
from .matching import Calls

__all__ = ["AGREEING_NS", "Clock", "clock_offsets"]

Array = npt.NDArray[Any]

#: Ends of one collective scatter by tens of microseconds on one clock. Offsets below this (or below
#: three times their own scatter) are the collective's skew, not the clocks', and correct nothing.
AGREEING_NS = 100_000


@dataclass(frozen=True, slots=True)
class Clock:
    """``offset_ns`` is what to add to a rank's times to get the reference's. ``agrees`` when it is
    too small to tell from the collectives' own skew; then nothing is corrected."""

    offset_ns: int
    scatter_ns: int

    @property
    def agrees(self) -> bool:
        """Whether the clocks cannot be told apart."""
        return abs(self.offset_ns) <= max(AGREEING_NS, 3 * self.scatter_ns)

    @property
    def correction_ns(self) -> int:
        """What to add before times of different ranks are compared."""
        return 0 if self.agrees else self.offset_ns


def clock_offsets(ranks: Sequence[int], calls: Iterable[Calls]) -> dict[int, Clock]:
    """Clock of each rank against the lowest one; ranks that no chain of groups links to it are absent."""
    differences: dict[tuple[int, int], list[Array]] = defaultdict(list)
    for call in calls:
        if call.pattern == "all":
            known = (call.end_ns != MISSING).all(axis=1)
            for column, rank in enumerate(call.ranks[1:], start=1):
                apart = (call.end_ns[:, 0] - call.end_ns[:, column])[known]
                if len(apart):
                    differences[call.ranks[0], rank].append(apart)
    links: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for (one, other), arrays in differences.items():
        apart = np.concatenate(arrays)
        centre = integer_median(apart)
        scatter = integer_median(np.abs(apart - centre))
        links[one].append((len(apart), other, centre, scatter))
        links[other].append((len(apart), one, -centre, scatter))
    if not ranks:
        return {}
    lowest = min(ranks)
    clocks = {lowest: Clock(0, 0)}
    frontier = [lowest]
    while frontier:  # breadth first: the fewest links, hence the least error
        reached: list[int] = []
        for rank in frontier:
            for _, other, offset, scatter in sorted(links[rank], reverse=True):
                if other not in clocks:
                    base = clocks[rank]
                    clocks[other] = Clock(base.offset_ns + offset, max(base.scatter_ns, scatter))
                    reached.append(other)
        frontier = reached
    return clocks
