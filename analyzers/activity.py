"""What a rank was doing before each of its collectives: the reason it came late, if it came late.

The stretch from the end of the rank's previous collective (from its start, where this one follows
without a gap) to the start of this one is divided, first match first: computing, copying, loading data, collecting
garbage, launching (operators and runtime calls while the device had nothing), Python. The largest share names the
activity, and the longest span of that kind inside the stretch is its example. The shares themselves are kept too:
beside the other ranks' of the same call they tell what made this rank *later* than those, which may be a short sleep
before much work that all ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

from .breakdown import COLLECTIVE_OPERATOR
from .intervals import EMPTY, Spans, covered, difference, union

__all__ = ["Before", "before_collectives", "joined_befores"]

Array = npt.NDArray[Any]

_COMPUTE = DEVICE_KINDS.index("compute")
_COPY = DEVICE_KINDS.index("copy")
_KIND = {name: index for index, name in enumerate(HOST_KINDS)}

#: Examples are looked up for this many longest stretches; the rest are short and alike.
_MOST_EXAMPLES = 400
#: A Python frame names a stretch's Python where it did this share of it itself.
_MOST_OF_SHARE = 0.5
#: An activity that takes less than this share of its stretch needs no example.
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Before:
    """What came before each of a rank's collectives, in their order.

    ``activity`` is the largest share of the stretch before it and ``example`` a span of that kind; ``shares_ns`` has
    the time in each activity, ``examples`` row → span, for the longest stretches.
    """

    activity: tuple[str, ...] = ()
    example: tuple[str | None, ...] = ()
    shares_ns: Mapping[str, Array] = field(default_factory=dict)
    examples: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Doing:
    """One activity: where it happens, and the named spans that it is made of."""

    activity: str
    times: Spans
    start: Array
    own: Array
    name: Array
    table: Table | None
    itself: bool = False

    def examples(self, start: Array, end: Array, share: Array) -> list[str | None]:
        """For each stretch the longest of the spans that begin inside, by the part that lies inside. A frame is named
        only where it holds most of the ``share`` of its stretch: Python runs outside every span too."""
        if self.table is None:
            return [None] * len(start)
        first, last = np.searchsorted(self.start, start), np.searchsorted(self.start, end)
        least = share * _MOST_OF_SHARE if self.itself else np.zeros(len(start))
        places = zip(first.tolist(), last.tolist(), end.tolist(), least.tolist(), strict=True)
        return [self._longest(*place) for place in places]

    def _longest(self, first: int, last: int, end: int, least: float) -> str | None:
        if self.table is None or first >= last:
            return None
        inside = np.minimum(self.own[first:last], end - self.start[first:last])
        longest = int(inside.argmax())
        return self.table.strings.text(int(self.name[first + longest])) if inside[longest] >= least else None


def before_collectives(rank: Rank, rows: Array) -> Before:
    """What the rank did before each of ``rows`` (row numbers of ``rank.collectives``).

    The activity is ``unknown`` where the collective's start is not known or nothing was recorded that could tell.
    """
    table = rank.collectives
    if table is None or not len(rows):
        return Before()
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
    merged = {
        name: shares[:, [column for column, one in enumerate(names) if one == name]].sum(axis=1)
        for name in dict.fromkeys(names)
    }
    largest = np.stack(list(merged.values()), axis=1).argmax(axis=1)
    activity = np.array(list(merged), dtype=object)[largest]
    activity[length <= 0] = "unknown"
    examples = _examples(doings, merged, start, end)
    named = tuple(examples.get(one, {}).get(row) for row, one in enumerate(activity.tolist()))
    return Before(tuple(activity.tolist()), named, merged, examples)


def joined_befores(parts: Sequence[Before]) -> Before:
    """What came before the collectives of several windows of one rank, one after the other."""
    names = dict.fromkeys(name for part in parts for name in part.shares_ns)
    spans: dict[str, dict[int, str]] = {}
    first = 0
    for part in parts:
        for name, found in part.examples.items():
            spans.setdefault(name, {}).update({first + row: text for row, text in found.items()})
        first += len(part.activity)
    shares = {
        name: np.concatenate(
            [part.shares_ns.get(name, np.zeros(len(part.activity), dtype=np.int64)) for part in parts]
        )
        for name in names
    }
    activity = tuple(one for part in parts for one in part.activity)
    return Before(activity, tuple(one for part in parts for one in part.example), shares, spans)


def _examples(
    doings: list[_Doing], shares: Mapping[str, Array], start: Array, end: Array
) -> dict[str, dict[int, str]]:
    """Activity → row → its example, for the longest stretches and what takes a good part of them."""
    length = end - start
    longest = np.argsort(-length, kind="stable")[:_MOST_EXAMPLES]
    longest = longest[length[longest] > 0]
    examples = {}
    for doing in doings:
        chosen = longest[shares[doing.activity][longest] >= _LEAST_SHARE * length[longest]]
        found = doing.examples(start[chosen], end[chosen], shares[doing.activity][chosen])
        examples[doing.activity] = {
            row: name for row, name in zip(chosen.tolist(), found, strict=True) if name is not None
        }
    return examples


def _stretches(rank: Rank, table: Table, rows: Array) -> tuple[Array, Array]:
    """From the end of the previous collective (its start where there is no gap between them; the first
    thing recorded where there is none) to the start of each."""
    start, end = table["start_ns"], table["end_ns"]
    known = np.flatnonzero((start != MISSING) & (end != MISSING))
    if not len(known):
        return np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    order = known[np.argsort(start[known], kind="stable")]
    begun = start[order]
    reach = np.maximum.accumulate(end[order])
    stretch_start, stretch_end = start.copy(), start.copy()
    # Messages of one batch begin together: what went before the batch went before each of them.
    before = np.searchsorted(begun, begun, side="left") - 1
    # A call that follows without a gap was being prepared while the one before it ran.
    free = reach[before] < begun
    stretch_start[order] = np.where(free, reach[before], begun[before])
    stretch_start[order[before < 0]] = min(_first_ns(rank), int(begun[0]))
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
            # Frames enclose each other and the operators: what a frame did itself tells, not what it called.
            _doing("python", rank.host, np.isin(kind, (_KIND["python"], _KIND["annotation"])), itself=True),
        ]
    return doings


def _doing(activity: str, table: Table, mask: Array, itself: bool = False) -> _Doing:
    rows = np.flatnonzero(mask & (table["end_ns"] > table["start_ns"]))
    rows = rows[np.argsort(table["start_ns"][rows], kind="stable")]
    start, end = table["start_ns"][rows], table["end_ns"][rows]
    own = end - start
    if itself:
        named = ~np.isin(table["name"][rows], _step_marks(table))  # the whole step names nothing
        rows, start, end, own = rows[named], start[named], end[named], own[named]
        parent, duration = table["parent"], table["end_ns"] - table["start_ns"]
        inside = np.flatnonzero(parent >= 0)
        within = np.bincount(parent[inside], weights=duration[inside], minlength=len(table))
        own = np.maximum(own - within[rows].astype(np.int64), 0)
    return _Doing(activity, union(start, end), start, own, table["name"][rows], table, itself)


def _step_marks(host: Table) -> list[int]:
    return [code for code, text in enumerate(host.strings.values) if text.startswith("ProfilerStep")]


def _communicates(host: Table) -> Array:
    """Rows that issue a collective or wait for one: they are the exchange, not what delayed it."""
    codes = [code for code, text in enumerate(host.strings.values) if COLLECTIVE_OPERATOR.match(text)]
    return np.isin(host["name"], codes)
