"""What a rank was doing before each of its collectives: the reason it came late, if it came late.

The stretch from the end of the rank's previous collective (from its start, where this one follows
without a gap) to the start of this one is divided, first match first: computing, copying, loading data, collecting garbage, launching (operators and runtime
calls while the device had nothing), Python. The largest share names the activity, and the longest
span of that kind inside the stretch is its example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

from .breakdown import COLLECTIVE_OPERATOR
from .intervals import EMPTY, Spans, covered, difference, union

__all__ = ["before_collectives"]

Array = npt.NDArray[Any]

_COMPUTE = DEVICE_KINDS.index("compute")
_COPY = DEVICE_KINDS.index("copy")
_KIND = {name: index for index, name in enumerate(HOST_KINDS)}

#: Examples are looked up for this many longest stretches; the rest are short and alike.
_MOST_EXAMPLES = 1000


@dataclass(frozen=True, slots=True)
class _Doing:
    """One activity: where it happens, and the named spans that it is made of."""

    activity: str
    times: Spans
    start: Array
    end: Array
    name: Array
    table: Table | None

    def example(self, start: int, end: int) -> str | None:
        """The longest of the spans that begin inside, by the part that lies inside."""
        first, last = np.searchsorted(self.start, (start, end))
        if self.table is None or first == last:
            return None
        inside = np.minimum(self.end[first:last], end) - self.start[first:last]
        return self.table.strings.text(int(self.name[first + int(inside.argmax())]))


def before_collectives(rank: Rank, rows: Array) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Activity and example before each of ``rows`` (row numbers of ``rank.collectives``).

    ``unknown`` where the collective's start is not known or nothing was recorded that could tell.
    """
    table = rank.collectives
    if table is None or not len(rows):
        return (), ()
    start, end = _stretches(rank, table, rows)
    length = end - start
    doings = _doings(rank)
    # Time in which no span ran is Python's where operators were recorded, and unknown elsewhere.
    names = [*(doing.activity for doing in doings), "python" if _records_operators(rank) else "unknown"]
    shares = np.zeros((len(rows), len(names)), dtype=np.int64)
    seen = EMPTY
    for column, doing in enumerate(doings):
        shares[:, column] = covered(difference(doing.times, seen), start, end)
        seen = seen | doing.times
    shares[:, -1] = length - shares.sum(axis=1)
    activity = np.array(names, dtype=object)[_largest(names, shares)]
    activity[length <= 0] = "unknown"
    examples: list[str | None] = [None] * len(rows)
    by_name = {doing.activity: doing for doing in doings}
    for index in np.argsort(-length, kind="stable")[:_MOST_EXAMPLES].tolist():
        found = by_name.get(activity[index])
        if found is not None and length[index] > 0:
            examples[index] = found.example(int(start[index]), int(end[index]))
    return tuple(activity.tolist()), tuple(examples)


def _largest(names: list[str], shares: Array) -> Array:
    """Column of the largest share; both columns of one name (Python with and without a span) count together."""
    merged = shares.copy()
    for column, name in enumerate(names):
        first = names.index(name)
        if first != column:
            merged[:, first] += merged[:, column]
            merged[:, column] = -1
    return np.asarray(merged.argmax(axis=1))


def _stretches(rank: Rank, table: Table, rows: Array) -> tuple[Array, Array]:
    """From the end of the previous collective (its start where there is no gap between them; the first
    thing recorded where there is none) to the start of each."""
    start, end = table["start_ns"], table["end_ns"]
    known = np.flatnonzero((start != MISSING) & (end != MISSING))
    if not len(known):
        return np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    order = known[np.argsort(start[known], kind="stable")]
    reach = np.maximum.accumulate(end[order])
    stretch_start, stretch_end = start.copy(), start.copy()
    # A call that follows without a gap was being prepared while the one before it ran.
    free = reach[:-1] < start[order[1:]]
    stretch_start[order[1:]] = np.where(free, reach[:-1], start[order[:-1]])
    stretch_start[order[0]] = min(_first_ns(rank), int(start[order[0]]))
    unknown = np.setdiff1d(np.arange(len(start)), known)
    stretch_start[unknown] = stretch_end[unknown] = 0
    return stretch_start[rows], stretch_end[rows]


def _first_ns(rank: Rank) -> int:
    """When the recording began, as far as its tables tell."""
    starts = [
        table["start_ns"][table["start_ns"] != MISSING]
        for table in (rank.steps, rank.host, rank.device, rank.collectives)
        if table is not None
    ]
    return min(int(column.min()) for column in starts if len(column))


def _records_operators(rank: Rank) -> bool:
    return rank.host is not None and bool((rank.host["kind"] == _KIND["operator"]).any())


def _doings(rank: Rank) -> list[_Doing]:
    """What was recorded, in the order in which it explains a stretch."""
    doings: list[_Doing] = []
    if rank.device is not None and len(rank.device):
        kind = rank.device["kind"]
        doings += [
            _doing("compute", rank.device, kind == _COMPUTE),
            _doing("copy", rank.device, kind == _COPY),
        ]
    if rank.host is not None and len(rank.host):
        kind = rank.host["kind"]
        operators = np.isin(kind, (_KIND["operator"], _KIND["runtime"]))
        doings += [
            _doing("loader", rank.host, kind == _KIND["loader"]),
            _doing("garbage_collection", rank.host, kind == _KIND["collector"]),
            # Without a device the operators are the work itself.
            _doing("launching" if doings else "compute", rank.host, operators & ~_communicates(rank.host)),
            _doing("python", rank.host, np.isin(kind, (_KIND["python"], _KIND["annotation"]))),
        ]
    return doings


def _doing(activity: str, table: Table, mask: Array) -> _Doing:
    rows = np.flatnonzero(mask & (table["end_ns"] > table["start_ns"]))
    rows = rows[np.argsort(table["start_ns"][rows], kind="stable")]
    start, end = table["start_ns"][rows], table["end_ns"][rows]
    return _Doing(activity, union(start, end), start, end, table["name"][rows], table)


def _communicates(host: Table) -> Array:
    """Rows that issue a collective or wait for one: they are the exchange, not what delayed it."""
    codes = [code for code, text in enumerate(host.strings.values) if COLLECTIVE_OPERATOR.match(text)]
    return np.isin(host["name"], codes)
