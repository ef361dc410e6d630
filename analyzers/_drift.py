"""How two ranks' clocks run against each other: a constant offset, or one that drifts.

Quartz clocks drift by some ten parts in a million: in a minute that is half a millisecond, longer than
many collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._integers import integer_median

__all__ = ["Trend", "trend_of"]

Array = npt.NDArray[Any]

#: More than any clock drifts, as a share of time.
_MOST_DRIFT = 5e-4
#: A drift that moves the clocks apart by less than this (ns) over the calls is left alone.
_LEAST_NS = 50_000
#: Fewer calls than this tell no line from a point.
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Trend:
    """What to add to a time ``t`` (ns) of one clock to get the other's: offset + drift × (t − origin)."""

    offset_ns: int
    drift: float = 0.0
    origin_ns: int = 0

    def at(self, times: Array) -> Array:
        """The difference at each time, int64; shape as ``times``."""
        if not self.drift:
            return np.full(np.shape(times), self.offset_ns, dtype=np.int64)
        moved = np.rint((times - self.origin_ns) * self.drift).astype(np.int64)
        return np.asarray(moved + self.offset_ns)


def trend_of(times: Array, apart: Array) -> tuple[Trend, int]:
    """The trend of ``apart`` (ns) over ``times`` (ns), shape (n,), and the median distance from it.

    The offset is a median, so a few odd calls do not move it; a drift is believed where it halves the
    distances at least. Raises ``IndexError`` on none.
    """
    offset = integer_median(apart)
    scatter = integer_median(np.abs(apart - offset))
    constant = Trend(offset), scatter
    if len(times) < _FEWEST or scatter < _LEAST_NS // 8:
        return constant
    order = np.argsort(times, kind="stable")
    origin = int(times[order[len(order) // 2]])
    time, rest = (times[order] - origin).astype(np.float64), (apart[order] - offset).astype(np.float64)
    third = len(order) // 3
    between = float(np.median(time[-third:]) - np.median(time[:third]))
    if between <= 0:
        return constant
    drift = float(np.median(rest[-third:]) - np.median(rest[:third])) / between
    if not abs(drift) <= _MOST_DRIFT or abs(drift) * (time[-1] - time[0]) < _LEAST_NS:
        return constant
    line = Trend(offset, drift, origin)
    beside = apart - line.at(times)
    centre = integer_median(beside)
    left = integer_median(np.abs(beside - centre))
    return (Trend(offset + centre, drift, origin), left) if 2 * left <= scatter else constant
