"""Why the device was idle: each gap's cause.

A gap splits at the start of the runtime call that launched the event that ends it. After the
launch the device had work and did not start it: *dependency*. Before it, the launching thread had
not asked for any: *data* (it was in the loader), *sync* (in a blocking call), else *host*. A gap
that ends in a pipeline receive is the pipeline's *bubble*, whole. What has no launch record is
*other*. First match wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import HOST_KINDS, Table

from .intervals import EMPTY, Spans, clip, covered, difference, measure, union
from .results import IdleCauses

__all__ = [
    "CAUSES",
    "Gaps",
    "device_gaps",
    "device_idle",
    "host_gaps",
    "host_idle",
    "is_receive",
    "waiting_backward",
]

Array = npt.NDArray[Any]

#: In the order of the contract.
CAUSES = tuple(field.name for field in fields(IdleCauses))

_LOADER = HOST_KINDS.index("loader")
_SYNC = HOST_KINDS.index("sync")


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Idle spans one by one, shape (gaps,). ``ending`` is the position of the event that ends each, among the
    events given; ``launched_ns`` is when that event was launched, cut to the gap; ``causes`` holds ns by
    cause, which sum to each gap."""

    spans: Spans
    ending: Array
    launched_ns: Array
    causes: dict[str, Array]


def is_receive(operation: str | None) -> bool:
    """Whether an operation receives from one peer (``recv``, ``irecv``, ``recv_any_source``)."""
    return operation is not None and "recv" in operation.lower() and "send" not in operation.lower()


def device_idle(gaps: Spans, start: Array, launch: Array, receive: Array, host: Table | None) -> IdleCauses:
    """Split each gap by its cause; the causes sum to the gaps exactly.

    ``gaps``: the idle spans of a window. ``start``, ``launch``, ``receive``: of the window's device
    events, shape (events,): start in ns, row of the launching call in ``host`` (-1 none), whether it
    is a pipeline receive. Every gap must end where an event starts.
    """
    return _totals(device_gaps(gaps, start, launch, receive, host).causes)


def device_gaps(gaps: Spans, start: Array, launch: Array, receive: Array, host: Table | None) -> Gaps:
    """As :func:`device_idle`, gap by gap, with the event that ended each."""
    count = len(gaps.start)
    causes = {name: np.zeros(count, dtype=np.int64) for name in CAUSES}
    if not count:
        return Gaps(gaps, np.empty(0, dtype=np.int64), gaps.start, causes)
    lengths = gaps.end - gaps.start
    called = np.full(len(start), np.iinfo(np.int64).max, dtype=np.int64)
    thread = np.full(len(start), -1, dtype=np.int64)
    known = launch >= 0
    if host is not None and known.any():
        called[known] = host["start_ns"][launch[known]]
        thread[known] = host["thread"][launch[known]]
    ending = _ending_events(gaps, start, called, thread)
    known, called, thread = known[ending], called[ending], thread[ending]
    bubble = _any_at(gaps.end, start[receive])

    split = np.clip(called, gaps.start, gaps.end)
    before = known & ~bubble
    causes["bubble"][bubble] = lengths[bubble]
    causes["other"][~known & ~bubble] = lengths[~known & ~bubble]
    causes["dependency"][before] = (gaps.end - split)[before]
    data, sync = _doings(gaps.start[before], split[before], thread[before], host)
    causes["data"][before], causes["sync"][before] = data, sync
    causes["host"][before] = (split - gaps.start)[before] - data - sync
    return Gaps(gaps, ending, split, causes)


def host_idle(gaps: Spans, host: Table | None) -> IdleCauses:
    """Causes where the host itself does the work: in the loader, in a blocking call, else between
    operators (Python). No launch splits a gap here, so nothing is *dependency*; *other* is a backward pass that another
    thread runs, unseen."""
    return _totals(host_gaps(gaps, host))


def host_gaps(gaps: Spans, host: Table | None) -> dict[str, Array]:
    """As :func:`host_idle`, gap by gap: cause → ns, shape (gaps,)."""
    lengths = gaps.end - gaps.start
    causes = {name: np.zeros(len(lengths), dtype=np.int64) for name in CAUSES}
    if host is None:
        causes["other"] = lengths
        return causes
    loader, sync = _loader_and_sync(host, np.ones(len(host), dtype=bool))
    elsewhere = difference(difference(waiting_backward(host), loader), sync)
    causes["data"] = covered(loader, gaps.start, gaps.end)
    causes["sync"] = covered(sync, gaps.start, gaps.end)
    causes["other"] = covered(elsewhere, gaps.start, gaps.end)
    causes["host"] = lengths - causes["data"] - causes["sync"] - causes["other"]
    return causes


#: Spans in which a thread runs the backward pass, or waits for autograd's own thread to: Kineto's annotation of old,
#: and the Python frames of ``loss.backward()``.
_BACKWARD = re.compile(r"## ?backward ?##|torch/(?:_tensor|autograd/__init__)\.py\(\d+\): backward", re.ASCII)
#: Operators on the span's own thread, as a share of it, below which another thread does the work.
_OWN_SHARE = 0.1
_OPERATOR = HOST_KINDS.index("operator")


def waiting_backward(host: Table) -> Spans:
    """Backward passes whose thread does next to nothing: it waits for autograd's thread, which was not recorded
    (where it was, its operators are no gap)."""
    codes = [code for code, name in enumerate(host.strings.values) if _BACKWARD.fullmatch(name)]
    kind = host["kind"]
    rows = np.flatnonzero(np.isin(host["name"], codes) & (kind != _OPERATOR)) if codes else np.zeros(0, int)
    held = []
    for row in rows.tolist():
        start, end, thread = int(host["start_ns"][row]), int(host["end_ns"][row]), host["thread"][row]
        own = (kind == _OPERATOR) & (host["thread"] == thread)
        own &= (host["end_ns"] > start) & (host["start_ns"] < end)
        work = measure(clip(union(host["start_ns"][own], host["end_ns"][own]), start, end))
        if end > start and work < _OWN_SHARE * (end - start):
            held.append(row)
    return union(host["start_ns"][held], host["end_ns"][held]) if held else EMPTY


def _totals(causes: dict[str, Array]) -> IdleCauses:
    return IdleCauses(**{name: int(amount.sum()) for name, amount in causes.items()})


def _ending_events(gaps: Spans, start: Array, called: Array, thread: Array) -> Array:
    """For each gap, the event that ends it: of those that start there, the one launched first (from the
    lowest thread), so that the order of rows decides nothing."""
    order = np.lexsort((thread, called, start))
    return np.asarray(order[np.searchsorted(start[order], gaps.end, side="left")])


def _any_at(times: Array, start: Array) -> Array:
    return np.isin(times, start)


def _doings(start: Array, end: Array, thread: Array, host: Table | None) -> tuple[Array, Array]:
    """How much of each span the launching thread spent in the loader and in blocking calls."""
    data, sync = np.zeros(len(start), dtype=np.int64), np.zeros(len(start), dtype=np.int64)
    if host is None or not len(start):
        return data, sync
    relevant = (host["kind"] == _LOADER) | (host["kind"] == _SYNC)
    for one in np.unique(host["thread"][relevant]):
        mine = thread == one
        if not mine.any():
            continue
        loader, blocked = _loader_and_sync(host, relevant & (host["thread"] == one))
        data[mine] = covered(loader, start[mine], end[mine])
        sync[mine] = covered(blocked, start[mine], end[mine])
    return data, sync


def _loader_and_sync(host: Table, rows: Array) -> tuple[Spans, Spans]:
    kind, start, end = host["kind"][rows], host["start_ns"][rows], host["end_ns"][rows]
    loader = union(start[kind == _LOADER], end[kind == _LOADER])
    blocked = union(start[kind == _SYNC], end[kind == _SYNC])
    return loader, difference(blocked, loader) if len(blocked.start) else EMPTY
