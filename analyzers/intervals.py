"""Exact interval arithmetic on integer nanoseconds.

A :class:`Spans` is a set of times: half-open intervals ``[start, end)``, sorted, disjoint, not
touching, none of them empty. Because half-open intervals partition, measures add up without a
correction: ``measure(a) == measure(a & b) + measure(a - b)`` to the last nanosecond.

Everything is a sort or a running maximum, so a million intervals take a fraction of a second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "EMPTY",
    "Spans",
    "clip",
    "complement",
    "covered",
    "difference",
    "intersection",
    "measure",
    "union",
]

Times = npt.NDArray[Any]


class Spans(NamedTuple):
    """Disjoint sorted intervals ``[start, end)``; both columns int64 ns, shape (spans,)."""

    start: Times
    end: Times

    def __and__(self, other: Spans) -> Spans:
        return intersection(self, other)

    def __or__(self, other: Spans) -> Spans:
        return union(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))

    def __sub__(self, other: Spans) -> Spans:
        return difference(self, other)


EMPTY = Spans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def union(start: Times, end: Times) -> Spans:
    """The times that lie in any interval. Empty and reversed intervals hold no time.

    ``start``, ``end``: int64 ns, shape (n,), in any order, overlapping as they like.
    """
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    # A new span begins where an interval starts after everything before it has ended.
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start[first], reach[last])


def measure(spans: Spans) -> int:
    """Total length in ns."""
    return int((spans.end - spans.start).sum())


def intersection(first: Spans, second: Spans) -> Spans:
    """The times that lie in both."""
    if not len(first.start) or not len(second.start):
        return EMPTY
    times = np.concatenate((first.end, second.end, first.start, second.start))
    ends = len(first.end) + len(second.end)
    # Ends come first among equal times (stable sort), so that touching spans do not overlap.
    order = np.argsort(times, kind="stable")
    depth = np.cumsum(np.where(order < ends, -1, 1))
    opens = np.flatnonzero(depth == 2)
    times = times[order]
    # Depth 2 is the most there is; whatever follows it is the end of one of the two.
    return Spans(times[opens], times[opens + 1])


def complement(spans: Spans, start: int, end: int) -> Spans:
    """The times of ``[start, end)`` that lie in no span."""
    if end <= start:
        return EMPTY
    inside = clip(spans, start, end)
    gap_start = np.concatenate((np.array([start], dtype=np.int64), inside.end))
    gap_end = np.concatenate((inside.start, np.array([end], dtype=np.int64)))
    keep = gap_end > gap_start
    return Spans(gap_start[keep], gap_end[keep])


def difference(first: Spans, second: Spans) -> Spans:
    """The times that lie in ``first`` and not in ``second``."""
    if not len(first.start) or not len(second.start):
        return first
    return intersection(first, complement(second, int(first.start[0]), int(first.end[-1])))


def clip(spans: Spans, start: int, end: int) -> Spans:
    """The part inside ``[start, end)``."""
    clipped_start, clipped_end = np.maximum(spans.start, start), np.minimum(spans.end, end)
    keep = clipped_end > clipped_start
    return Spans(clipped_start[keep], clipped_end[keep])


def covered(spans: Spans, start: Times, end: Times) -> Times:
    """For each query interval, how much of it lies in ``spans``, int64 ns, shape (queries,).

    Queries may overlap and come in any order; a reversed query counts as empty.
    """
    if not len(spans.start):
        return np.zeros(len(start), dtype=np.int64)
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(spans.end - spans.start)))

    def until(time: Times) -> Times:
        # Whole spans that start at or before the time, less what of the last lies after it.
        index = np.searchsorted(spans.start, time, side="right")
        last_end = spans.end[np.maximum(index - 1, 0)]
        overshoot = np.where(index > 0, np.maximum(last_end - time, 0), 0)
        return np.asarray(before[index] - overshoot)

    return np.asarray(np.maximum(until(np.maximum(start, end)) - until(start), 0))
