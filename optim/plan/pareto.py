"""The front of two costs: what no other choice beats in both, as step time and memory of layouts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trine.optim.plan.columns import Column

__all__ = ["Staircase", "front"]


def front(first: Column, second: Column) -> npt.NDArray[np.int64]:
    """Positions of the points that no other beats, in ascending ``first``; of equal points the earliest."""
    order = np.lexsort((np.arange(len(first)), second, first))
    least = np.minimum.accumulate(second[order])
    before = np.concatenate([[np.inf], least[:-1]])
    return np.asarray(order[second[order] < before], dtype=np.int64)


class Staircase:
    """The front of all points that were added, and whether something could still beat it."""

    def __init__(self) -> None:
        self._first = np.empty(0)
        self._second = np.empty(0)

    def add(self, first: Column, second: Column) -> None:
        """Further points."""
        both = np.concatenate([self._first, first]), np.concatenate([self._second, second])
        kept = front(*both)
        self._first, self._second = both[0][kept], both[1][kept]

    def beats(self, first: Column, second: Column) -> npt.NDArray[np.bool_]:
        """Where a point of the front is no worse in both: nothing from there on can lie on the front."""
        if not len(self._first):
            return np.zeros(len(first), dtype=bool)
        place = np.searchsorted(self._first, first, side="right") - 1
        return np.asarray((place >= 0) & (self._second[np.maximum(place, 0)] <= second))
