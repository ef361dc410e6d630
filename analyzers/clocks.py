"""How far ranks' clocks lie apart, from the fact that ranks leave a collective together.

Only collectives that every rank must enter tell it: a broadcast's root may leave before its last
receiver enters. The offset is the median difference of ends, so a few odd calls do not move it; over long
windows it may drift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING

from ._drift import Trend, trend_of
from .matching import Calls

__all__ = ["AGREEING_NS", "Clock", "clock_offsets"]

Array = npt.NDArray[Any]

#: Ends of one collective scatter by tens of microseconds on one clock. Offsets below this (or below
#: their own uncertainty) are the collective's skew, not the clocks', and correct nothing.
AGREEING_NS = 100_000


@dataclass(frozen=True, slots=True)
class Clock:
    """``offset_ns`` is what to add to a rank's times to get the reference's, known to ±
    ``uncertainty_ns``. ``agrees`` when it is too small to tell from the collectives' own skew; then
    nothing is corrected. With a ``drift`` (a share of time) the offset is that at ``origin_ns``, in the
    middle of the calls that told it."""

    offset_ns: int
    uncertainty_ns: int
    drift: float = 0.0
    origin_ns: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the clocks cannot be told apart."""
        return not self.drift and abs(self.offset_ns) <= max(AGREEING_NS, self.uncertainty_ns)

    @property
    def stated_ns(self) -> int:
        """What to report: the measured offset, or 0 where it is too unsure to be told from 0."""
        return 0 if self.agrees and self.uncertainty_ns > AGREEING_NS else self.offset_ns

    @property
    def correction_ns(self) -> int:
        """What to add before times of different ranks are compared, drift left out."""
        return 0 if self.agrees else self.offset_ns

    def corrected(self, times: Array) -> Array:
        """Times (ns, int64) of the rank on the reference's clock; shape as given."""
        if self.agrees:
            return times
        return np.asarray(times + Trend(self.offset_ns, self.drift, self.origin_ns).at(times))

    def behind(self, base: Clock) -> Clock:
        """This clock against the reference of ``base``, where it is known against the rank of ``base``."""
        there = self.origin_ns + self.offset_ns - base.origin_ns if base.drift else 0
        return Clock(
            self.offset_ns + base.offset_ns + round(base.drift * there),
            self.uncertainty_ns + base.uncertainty_ns,
            self.drift + base.drift,
            self.origin_ns if self.drift else base.origin_ns - self.offset_ns if base.drift else 0,
        )


def clock_offsets(
    ranks: Sequence[int], calls: Iterable[Calls], hosts: Mapping[int, str | None] | None = None
) -> dict[int, Clock]:
    """Clock of each rank against the lowest one; ranks that no chain of groups links to it are absent.

    Ranks of one of ``hosts`` (rank → name) have one clock, unless some call contradicts it.
    """
    if not ranks:
        return {}
    links = _links(calls, hosts or {})
    lowest = min(ranks)
    clocks = {lowest: Clock(0, 0)}
    frontier = [lowest]
    while frontier:  # breadth first: the fewest links, hence the least error
        reached: list[int] = []
        for rank in frontier:
            for other, link in sorted(links[rank].items(), key=lambda item: item[1].uncertainty_ns):
                if other not in clocks:
                    clocks[other] = link.behind(clocks[rank])
                    reached.append(other)
        frontier = reached
    return clocks


def _links(calls: Iterable[Calls], hosts: Mapping[int, str | None]) -> dict[int, dict[int, Clock]]:
    """Clocks between each group's lowest rank and its others, both ways."""
    spans: dict[tuple[int, int], list[tuple[Array, Array, Array, Array]]] = defaultdict(list)
    for call in calls:
        if call.pattern != "all":
            continue
        known = ((call.start_ns != MISSING) & (call.end_ns != MISSING)).all(axis=1)
        start, end = call.start_ns[known], call.end_ns[known]
        for column, rank in enumerate(call.ranks[1:], start=1):
            if known.any():
                spans[call.ranks[0], rank].append((start[:, 0], end[:, 0], start[:, column], end[:, column]))
    links: dict[int, dict[int, Clock]] = defaultdict(dict)
    for (one, other), parts in spans.items():
        host = hosts.get(one)
        link = _link(
            *(np.concatenate(columns) for columns in zip(*parts, strict=True)),
            together=host is not None and host == hosts.get(other),
        )
        links[one][other] = link
        links[other][one] = Clock(
            -link.offset_ns, link.uncertainty_ns, -link.drift, link.origin_ns + link.offset_ns
        )
    return links


def _link(start_1: Array, end_1: Array, start_2: Array, end_2: Array, *, together: bool) -> Clock:
    """What to add to the second rank's times, from the calls that both made.

    Two ways, and the surer one wins. Ranks leave together, so the ends' differences scatter around
    the offset: sure on devices, where the scatter is microseconds. And nobody leaves before the
    other has entered, so every call bounds the offset from both sides, and the middle of the
    tightest bounds is off by at most half their width, as in NTP: sure on busy hosts, where threads
    wake up late and ends scatter by milliseconds. Ranks that are ``together`` on a host have one clock where no call says
    otherwise.
    """
    low, high = int((start_1 - end_2).max()), int((end_1 - start_2).min())
    if together and low <= 0 <= high:
        return Clock(0, 0)
    trend, scatter = trend_of(end_2, end_1 - end_2)
    by_ends = Clock(trend.offset_ns, 3 * scatter, trend.drift, trend.origin_ns)
    if trend.drift:
        return by_ends
    if low > high:  # the clocks drift, or a call is not what it seems
        return by_ends
    by_bounds = Clock((low + high) // 2, (high - low + 1) // 2)
    return min(by_ends, by_bounds, key=lambda clock: clock.uncertainty_ns)
