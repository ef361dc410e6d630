"""Who launched a piece of device work: its operator, and the operators around that one.

    device row ──launch──► runtime call ──parent──► innermost operator ──parent──► … outermost operator

The chain of operators ends at the first span that is none (a Python frame, an annotation): above it
stands what the program did, not what PyTorch did for it. Where there is no device, operators themselves
are the work, each for its self time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trine.analyzers.breakdown import COLLECTIVE_OPERATOR, device_rows, has_device_work
from trine.analyzers.selection import Selected
from trine.analyzers.tables import self_times
from trine.record.model import DEVICE_KINDS, HOST_KINDS, Rank, Table

__all__ = ["Attributed", "attribute", "dense", "enclosing"]

Array = npt.NDArray[Any]

_OPERATOR = HOST_KINDS.index("operator")
_COMMUNICATION = DEVICE_KINDS.index("communication")
#: Operators lie in operators at most so deep; what lies deeper is a cycle in a broken table.
_DEEPEST = 200


@dataclass(frozen=True, slots=True)
class Attributed:
    """Work of the selection, communication left out, and who launched it. All columns have shape (n,).

    ``rows`` are rows of ``table`` (device, or host where ``basis`` says so), ``ns`` their durations (host:
    self times). ``operator`` and ``outermost`` are rows of ``host``, -1 where there is none; ``launch`` is
    the runtime call's row.
    """

    basis: Literal["device", "host"]
    table: Table
    host: Table | None
    rows: Array
    ns: Array
    launch: Array
    operator: Array
    outermost: Array


def attribute(rank: Rank, selected: Selected) -> Attributed | None:
    """The selection's work with its operators; None where there is none. Device work in order of stream and start."""
    if has_device_work(rank):
        return _device_work(rank, selected)
    if rank.host is None:
        return None
    return _host_work(rank.host, selected)


def _device_work(rank: Rank, selected: Selected) -> Attributed | None:
    device = rank.device
    assert device is not None
    rows = np.flatnonzero(device_rows(rank, selected) & (device["kind"] != _COMMUNICATION))
    if not len(rows):
        return None
    order = np.lexsort((device["start_ns"][rows], device["stream"][rows], device["device"][rows]))
    rows = rows[order]
    launch = device["launch"][rows]
    operator, outermost = _operators_of(rank.host, launch)
    ns = device["end_ns"][rows] - device["start_ns"][rows]
    return Attributed("device", device, rank.host, rows, ns, launch, operator, outermost)


def _host_work(host: Table, selected: Selected) -> Attributed | None:
    inside = selected.holds(host["step"])
    if not selected.everything and selected.start_ns is not None and selected.end_ns is not None:
        inside = (host["start_ns"] >= selected.start_ns) & (host["start_ns"] < selected.end_ns)
    rows = np.flatnonzero(inside & (host["kind"] == _OPERATOR) & (host["end_ns"] > host["start_ns"]))
    waits = [code for code, text in enumerate(host.strings.values) if COLLECTIVE_OPERATOR.match(text)]
    ns = self_times(host, rows)
    kept = ~np.isin(host["name"][rows], waits)
    rows, ns = rows[kept], ns[kept]
    if not len(rows):
        return None
    outermost = _outermost(host, rows)
    return Attributed("host", host, host, rows, ns, np.full(len(rows), -1), rows, outermost)


def _operators_of(host: Table | None, launch: Array) -> tuple[Array, Array]:
    """Innermost and outermost operator of each launch, worked out once a call: a graph launches thousands."""
    nothing = np.full(len(launch), -1, dtype=np.int64)
    if host is None or not len(launch):
        return nothing, nothing
    calls, inverse = dense(launch)
    known = calls >= 0
    innermost = np.full(len(calls), -1, dtype=np.int64)
    innermost[known] = enclosing(host, calls[known], host["kind"] == _OPERATOR)
    found = innermost >= 0
    outermost = innermost.copy()
    outermost[found] = _outermost(host, innermost[found])
    return innermost[inverse], outermost[inverse]


def _outermost(host: Table, rows: Array) -> Array:
    """The last operator of the unbroken chain of operators above each of ``rows``, themselves included."""
    parent, kind = host["parent"], host["kind"]
    top = rows.copy()
    active = np.arange(len(rows))
    for _ in range(_DEEPEST):
        above = parent[top[active]]
        climbs = (above >= 0) & (kind[np.maximum(above, 0)] == _OPERATOR)
        active, above = active[climbs], above[climbs]
        if not len(active):
            break
        top[active] = above
    return top


def enclosing(host: Table, rows: Array, wanted: Array) -> Array:
    """The innermost span around each of ``rows`` (or the row itself) for which the mask ``wanted`` holds, -1 of none."""
    parent = host["parent"]
    found = rows.copy()
    active = np.flatnonzero(~wanted[rows])
    for _ in range(len(host)):
        if not len(active):
            break
        above = parent[found[active]]
        found[active] = above
        inside = above >= 0
        active = active[inside & ~wanted[np.maximum(above, 0)]]
    return np.asarray(found)


def dense(codes: Array) -> tuple[Array, Array]:
    """``np.unique`` with its inverse, for numbers from -1 up that are no larger than a table or a pool: no sort."""
    counts = np.bincount(codes + 1)
    found = np.flatnonzero(counts)
    place = np.zeros(len(counts), dtype=np.int64)
    place[found] = np.arange(len(found))
    return found - 1, place[codes + 1]
