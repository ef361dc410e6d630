"""The graph where no device is: operators on the host's threads, collectives on worker threads.

The work beside the host is then the collectives. The host waits for one where no operator runs on any
thread while it is in flight: the last that ends in such a gap is what the host resumed for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.breakdown import top_level_operators
from trine.analyzers.intervals import clip, complement, covered, union
from trine.analyzers.selection import Selected
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

from ._path_graph import NEVER, USUAL_DELAY_NS, Graph, Waits
from ._path_host import owners_of, threads_of

__all__ = ["of_workers"]

Array = npt.NDArray[Any]

_COMMUNICATION = DEVICE_KINDS.index("communication")
_OPERATOR = HOST_KINDS.index("operator")

#: A gap between operators counts as waiting where collectives fill this share of it until the last one ends ...
_FILLED = 0.8
#: ... and it is at least this long: shorter ones are Python's.
_LEAST_GAP_NS = 20_000


def of_workers(rank: Rank, selected: Selected) -> Graph | None:
    """The graph of a rank without a device; None where it recorded no operators."""
    host = rank.host
    if host is None or not (host["kind"] == _OPERATOR).any():
        return None
    begin, end = _bounds(host, selected)
    if end <= begin:
        return None
    table = rank.collectives if rank.collectives is not None else Table("collectives", {}, rank.strings)
    start, stop = table["start_ns"], table["end_ns"]
    rows = np.flatnonzero((start != MISSING) & (stop > start) & (start >= begin) & (stop <= end))
    lane = _worker_lanes(host, table, rows)
    order = np.lexsort((start[rows], lane))
    rows, lane = rows[order], lane[order]
    issued = table["issued_ns"][rows]
    launch = np.where((issued != MISSING) & (issued <= start[rows]), issued, start[rows])
    count = len(rows)
    none = np.full(count, -1, dtype=np.int64)
    return Graph(
        host, table, False,
        start[rows], stop[rows], np.full(count, _COMMUNICATION), table["operation"][rows],
        rows, lane, np.maximum(launch, begin) if count else np.full(0, NEVER), none, none,
        _waits(host, start[rows], stop[rows], begin, end), begin, end,
        start[rows] - np.maximum(launch, begin), USUAL_DELAY_NS, threads_of(host, begin, end), owners_of(host), 0, 0,
    )  # fmt: skip


def _bounds(host: Table, selected: Selected) -> tuple[int, int]:
    if selected.start_ns is not None and selected.end_ns is not None:
        return selected.start_ns, selected.end_ns
    rows = host["kind"] == _OPERATOR
    return int(host["start_ns"][rows].min()), int(host["end_ns"][rows].max())


def _worker_lanes(host: Table, table: Table, rows: Array) -> Array:
    """A lane each thread that ran collectives; calls that overlap on one are set apart."""
    row = table["host_row"][rows]
    thread = np.where(row >= 0, host["thread"][np.maximum(row, 0)], -1)
    _, lane = np.unique(thread, return_inverse=True)
    lane = lane.reshape(-1) * 4
    left = np.arange(len(rows))
    for _ in range(3):
        left = left[np.lexsort((table["start_ns"][rows[left]], lane[left]))]
        reach: dict[int, int] = {}
        over = []
        for position in left.tolist():
            key = int(lane[position])
            if int(table["start_ns"][rows[position]]) < reach.get(key, NEVER):
                over.append(position)
            else:
                reach[key] = int(table["end_ns"][rows[position]])
        if not over:
            break
        left = np.array(over)
        lane[left] += 1
    return np.asarray(lane)


def _waits(host: Table, start: Array, end: Array, begin: int, stop: int) -> Waits:
    """Gaps between operators that collectives fill, each with the last that ended in it."""
    operators = top_level_operators(host)
    gaps = complement(clip(union(operators.start, operators.end), begin, stop), begin, stop)
    empty = np.empty(0, dtype=np.int64)
    if not len(end) or not len(gaps.start):
        return Waits(empty, empty, empty, empty)
    order = np.argsort(end, kind="stable")
    place = np.searchsorted(end[order], gaps.end, side="right") - 1
    work = order[np.maximum(place, 0)]
    inside = (place >= 0) & (end[work] > gaps.start)
    in_flight = covered(union(start, end), gaps.start, end[work])
    until = end[work] - gaps.start
    kept = inside & (until >= _LEAST_GAP_NS) & (in_flight >= _FILLED * until)
    return Waits(gaps.start[kept], end[work[kept]], work[kept], np.full(int(kept.sum()), -1))
