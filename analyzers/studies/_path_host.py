"""What the host did at every instant: a merged timeline of its threads, by innermost span.

Threads of one process that launch device work take turns (the interpreter's lock, the backward pass that
the forward thread waits for), so the host is one timeline: at each instant, of the spans that are open on
any thread, the operator that began last, else the Python frame or annotation that began last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trine.analyzers.breakdown import COLLECTIVE_OPERATOR
from trine.record.model import HOST_KINDS, Table

from ._path_terms import CATEGORIES, OF_HOST, PYTHON

__all__ = ["Changes", "Timeline", "collective_names", "owners_of", "step_marks", "threads_of", "timeline_of"]

Array = npt.NDArray[Any]

_OPERATOR, _RUNTIME, _ANNOTATION, _PYTHON, _LOADER, _SYNC, _COLLECTOR = range(len(HOST_KINDS))

#: Threads that are merged, those with most spans first ...
MOST_THREADS = 6
#: ... and at least this share of the busiest one's: a watchdog that polls events says nothing of the work.
LEAST_SHARE = 0.02

_AT_WORK = np.isin(np.arange(len(HOST_KINDS)), (_OPERATOR, _RUNTIME, _SYNC, _LOADER))

_AT_CALL = np.isin(np.arange(len(HOST_KINDS)), (_RUNTIME, _SYNC))
_UNDER = np.isin(np.arange(len(HOST_KINDS)), (_OPERATOR, _RUNTIME, _SYNC))

#: A step's own mark covers the whole step and explains nothing in it.
_STEP_MARK = re.compile(r"ProfilerStep#\d+$")


class Changes(NamedTuple):
    """Instants (ns) at which a thread's innermost span changes, and to which row of the host table (-1 none)."""

    time: Array
    row: Array


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Stretches of the host: ``start_ns`` ascending, each until the next one's start, the last until ``end_ns``.

    ``owner`` is the row of the host table to which a stretch counts, -1 where no span is open: the
    innermost span, or for a runtime call the operator that made it. ``category`` is one of :data:`CATEGORIES`.
    """

    start_ns: Array
    owner: Array
    category: Array
    end_ns: int
    running: dict[int, Array] = field(default_factory=dict)

    def lengths(self) -> Array:
        """Length of each stretch, ns."""
        return np.diff(self.start_ns, append=self.end_ns)

    def at(self, times: Array) -> Array:
        """The stretch in which each time lies."""
        return np.maximum(np.searchsorted(self.start_ns, times, side="right") - 1, 0)

    def until(self, times: Array) -> Array:
        """Host time by category from the timeline's begin to each time, ns, shape (times, categories)."""
        place = self.at(times)
        found = np.zeros((len(times), len(CATEGORIES)), dtype=np.int64)
        found[np.arange(len(times)), self.category[place]] = np.asarray(times) - self.start_ns[place]
        for one, total in self._running().items():
            found[:, one] += total[place]
        return found

    def _running(self) -> dict[int, Array]:
        """Category → its time before each stretch; worked out once."""
        if not self.running:
            length = self.lengths()
            for one in np.flatnonzero(np.bincount(self.category)).tolist():
                amount = np.where(self.category == one, length, 0)
                self.running[one] = np.cumsum(amount) - amount
        return self.running


def threads_of(host: Table | None, start: int, end: int) -> list[Changes]:
    """The innermost span of each thread that works in ``[start, end)``, in ns; most spans first."""
    if host is None or end <= start or not len(host):
        return []
    rows = np.flatnonzero(
        (host["end_ns"] > start) & (host["start_ns"] < end) & (host["end_ns"] > host["start_ns"])
    )
    thread = host["thread"][rows]
    at_work = thread[host["kind"][rows] != _ANNOTATION]
    threads = np.unique(at_work)
    if len(threads) > 1:
        count = (
            np.array([int((at_work == one).sum()) for one in threads])
            if len(threads) < 64
            else np.bincount(np.searchsorted(threads, at_work))
        )
        order = np.argsort(-count, kind="stable")[:MOST_THREADS]
        threads = threads[order[count[order] >= LEAST_SHARE * count.max()]]
    return [_of_thread(host, rows[thread == one]) for one in threads]


def timeline_of(host: Table | None, parts: list[Changes], owner: Array, start: int, end: int) -> Timeline:
    """One timeline of ``threads_of`` over ``[start, end)``, in ns. ``owner``: of every host row."""
    if host is None or not parts or end <= start:
        return Timeline(np.array([start]), np.array([-1]), np.array([PYTHON]), end)
    times, label = parts[0] if len(parts) == 1 else _latest_begun(host, parts)
    times = np.clip(times, start, end)
    if times[0] > start:
        times, label = np.append(start, times), np.append(-1, label)
    # Of several changes at one instant the last counts.
    keep = np.append(times[1:] > times[:-1], times[-1] < end)
    times, label = times[keep], label[keep]
    owner = np.where(label >= 0, owner[np.maximum(label, 0)], -1)
    category = np.where(owner >= 0, OF_HOST[host["kind"][np.maximum(owner, 0)]], PYTHON)
    return Timeline(times, owner, category, end)


def _of_thread(host: Table, rows: Array) -> Changes:
    start, end = host["start_ns"][rows], host["end_ns"][rows]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        rows, start, end = rows[order], start[order], end[order]
    # Files mostly write the enclosing span first; where one does not, the longer of two that start together does.
    if ((start[1:] == start[:-1]) & (end[1:] > end[:-1])).any():
        order = np.lexsort((-end, start))
        rows, start, end = rows[order], start[order], end[order]
    # Ends before starts at one instant, inner ends before outer ones, outer starts before inner ones: the
    # stable sort keeps this order, and the last at an instant counts.
    times = np.concatenate((end[::-1], start))
    label = np.concatenate((host["parent"][rows[::-1]], rows))
    order = np.argsort(times, kind="stable")
    times, label = times[order], label[order]
    last = np.append(times[1:] > times[:-1], True)
    return Changes(times[last], label[last])


def _latest_begun(host: Table, parts: list[Changes]) -> Changes:
    """Several threads as one: of the open spans the operator that began last, else the span that did."""
    times = np.concatenate([part.time for part in parts])
    source = np.repeat(np.arange(len(parts), dtype=np.int8), [len(part.time) for part in parts])
    order = np.argsort(times, kind="stable")
    times, source = times[order], source[order]
    exchanges = collective_names(host)
    label = weight = None
    for number, (_, rows) in enumerate(parts):
        # Before its first change a thread does nothing.
        place = np.cumsum(source == number, dtype=np.int32)
        mine = np.append(-1, _weights(host, rows, exchanges))[place]
        row = np.append(-1, rows)[place]
        if label is None or weight is None:
            label, weight = row, mine
        else:
            later = mine > weight
            label, weight = np.where(later, row, label), np.where(later, mine, weight)
    assert label is not None and weight is not None
    return Changes(times, np.where(weight >= 0, label, -1))


def _weights(host: Table, rows: Array, exchanges: Array) -> Array:
    """By what open spans are chosen: operators before Python frames, later ones before earlier ones; -1 for none,
    and for a mark that an exchange is in flight, which says nothing of what the host does."""
    known = np.maximum(rows, 0)
    works = _AT_WORK[host["kind"][known]]
    begun = host["start_ns"][known] - int(host["start_ns"].min()) + np.where(works, 1 << 61, 0)
    if len(exchanges):
        exchanging = np.isin(host["name"][known], exchanges)
        begun = np.where(exchanging, np.where(works, begun - (1 << 61), -1), begun)
    return np.where(rows >= 0, begun, -1)


def owners_of(host: Table) -> Array:
    """To whom each row counts: a runtime call's operator, itself for everything else, -1 for a step's mark."""
    kind, owner = host["kind"], np.arange(len(host))
    calls = np.flatnonzero((kind == _RUNTIME) | (kind == _SYNC))
    owner[calls] = _operators_of(host, calls)
    owner[step_marks(host)] = -1
    return owner


def _operators_of(host: Table, calls: Array) -> Array:
    """The operator around each runtime call. A call straight from Python is named itself: the frame around it has
    its own time."""
    owner = calls.copy()
    for _ in range(2):  # a driver call inside a runtime call
        parent = np.where(_AT_CALL[host["kind"][owner]], host["parent"][owner], -1)
        under = (parent >= 0) & _UNDER[host["kind"][np.maximum(parent, 0)]]
        owner = np.where(under, parent, owner)
    return owner


def step_marks(host: Table) -> Array:
    """Rows that mark a whole step."""
    names = [
        code
        for code, text in enumerate(host.strings.values)
        if text.startswith("ProfilerStep") and _STEP_MARK.match(text)
    ]
    return np.flatnonzero(np.isin(host["name"], names)) if names else np.empty(0, dtype=np.int64)


def collective_names(host: Table) -> Array:
    """Codes of the names of operators that issue a collective or wait for one."""
    return np.array(
        [code for code, text in enumerate(host.strings.values) if COLLECTIVE_OPERATOR.match(text)],
        dtype=np.int64,
    )
