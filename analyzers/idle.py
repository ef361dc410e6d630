"""Why the device was idle: each gap's cause.

A gap splits at the start of the runtime call that launched the event that ends it. After the
launch the device had work and did not start it: *dependency*. Before it, the launching thread had
not asked for any: *data* (it was in the loader), *sync* (in a blocking call), else *host*. A gap
that ends in a pipeline receive is the pipeline's *bubble*, whole. What has no launch record is
*other*. First match wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import HOST_KINDS, Table

from .intervals import EMPTY, Spans, covered, difference, measure, union
from .results import IdleCauses

__all__ = ["device_idle", "host_idle", "is_receive"]

Array = npt.NDArray[Any]

_LOADER = HOST_KINDS.index("loader")
_SYNC = HOST_KINDS.index("sync")


def is_receive(operation: str | None) -> bool:
    """Whether an operation receives from one peer (``recv``, ``irecv``, ``recv_any_source``)."""
    return operation is not None and "recv" in operation.lower() and "send" not in operation.lower()


def device_idle(gaps: Spans, start: Array, launch: Array, receive: Array, host: Table | None) -> IdleCauses:
    """Split each gap by its cause; the causes sum to the gaps exactly.

    ``gaps``: the idle spans of a window. ``start``, ``launch``, ``receive``: of the window's device
    events, shape (events,): start in ns, row of the launching call in ``host`` (-1 none), whether it
    is a pipeline receive. Every gap must end where an event starts.
    """
    if not len(gaps.start):
        return IdleCauses()
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
    dependency = int((gaps.end - split)[before].sum())
    data, sync = _doings(gaps.start[before], split[before], thread[before], host)
    return IdleCauses(
        data=data,
        host=int((split - gaps.start)[before].sum()) - data - sync,
        sync=sync,
        dependency=dependency,
        bubble=int(lengths[bubble].sum()),
        other=int(lengths[~known & ~bubble].sum()),
    )


def host_idle(gaps: Spans, host: Table | None) -> IdleCauses:
    """Causes where the host itself does the work: in the loader, in a blocking call, else between
    operators (Python). No launch splits a gap here, so nothing is *dependency* or *other*."""
    idle = measure(gaps)
    if host is None:
        return IdleCauses(other=idle)
    loader, sync = _loader_and_sync(host, np.ones(len(host), dtype=bool))
    data = int(covered(gaps, loader.start, loader.end).sum())
    blocked = int(covered(gaps, sync.start, sync.end).sum())
    return IdleCauses(data=data, sync=blocked, host=idle - data - blocked)


def _ending_events(gaps: Spans, start: Array, called: Array, thread: Array) -> Array:
    """For each gap, the event that ends it: of those that start there, the one launched first (from the
    lowest thread), so that the order of rows decides nothing."""
    order = np.lexsort((thread, called, start))
    return np.asarray(order[np.searchsorted(start[order], gaps.end, side="left")])


def _any_at(times: Array, start: Array) -> Array:
    return np.isin(times, start)


def _doings(start: Array, end: Array, thread: Array, host: Table | None) -> tuple[int, int]:
    """How much of the spans the launching threads spent in the loader and in blocking calls."""
    if host is None or not len(start):
        return 0, 0
    data = sync = 0
    relevant = (host["kind"] == _LOADER) | (host["kind"] == _SYNC)
    for one in np.unique(host["thread"][relevant]):
        mine = thread == one
        if not mine.any():
            continue
        loader, blocked = _loader_and_sync(host, relevant & (host["thread"] == one))
        data += int(covered(loader, start[mine], end[mine]).sum())
        sync += int(covered(blocked, start[mine], end[mine]).sum())
    return data, sync


def _loader_and_sync(host: Table, rows: Array) -> tuple[Spans, Spans]:
    kind, start, end = host["kind"][rows], host["start_ns"][rows], host["end_ns"][rows]
    loader = union(start[kind == _LOADER], end[kind == _LOADER])
    blocked = union(start[kind == _SYNC], end[kind == _SYNC])
    return loader, difference(blocked, loader) if len(blocked.start) else EMPTY
