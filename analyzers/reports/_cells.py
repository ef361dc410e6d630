"""What the sections share: limits, columns, shares and the points of a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trine.analyzers.results import RankResult
from trine.analyzers.units import count, duration, percent, size

from .document import Column, Unit

__all__ = ["MOST_LINES", "Limits", "Words", "axis_words", "left", "printer", "right", "share", "thin"]

#: Points of a line in a figure; a screen shows no more.
MOST_POINTS = 600
#: Lines of a figure: beyond a dozen nobody tells them apart.
MOST_LINES = 12

Words = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The ranks that are shown, how many are not, and the rows of a table. ``brief``: what another section says better,
    or what only says that nothing is known, is left out."""

    ranks: tuple[RankResult, ...]
    hidden: int
    rows: int
    brief: bool = False

    def note(self, text: Words) -> str:
        """What is said under a table by rank."""
        return text["more_ranks"].format(left=self.hidden) if self.hidden else ""


def share(ns: float, of: float) -> str:
    """A duration with its share of another."""
    if ns == 0:
        return "0"
    return f"{duration(ns)} ({percent(ns / of)})" if of > 0 else duration(ns)


def left(title: str, flexible: bool = False) -> Column:
    """A column of words."""
    return Column(title, "left", flexible)


def right(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, "right") for title in titles)


def thin(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most :data:`MOST_POINTS`, keeping each stretch's lowest and highest: peaks must stay."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    stretch = -(-len(points) // (MOST_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return tuple(kept)


def printer(unit: Unit) -> Callable[[float], str]:
    """How values of a figure are printed."""
    return {"duration": duration, "size": size, "count": count}[unit]


def axis_words(axis: str, x: float) -> str:
    """A place on an axis in words: ns where the axis is a time (:class:`~.document.Areas`)."""
    return duration(x) if axis.startswith("time") else f"{axis} {x:.6g}"
