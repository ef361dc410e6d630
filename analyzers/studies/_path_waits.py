"""Who waits for whom: dependencies between streams, and blocking calls of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

from ._path_graph import HANDOVER_NS, MOST_LANES, MOST_WAITS, NEVER, ROUNDING_NS, Graph, Waits

__all__ = ["Launches", "dependencies", "waits_of"]

Array = npt.NDArray[Any]

_COMMUNICATION = DEVICE_KINDS.index("communication")
_SYNC = HOST_KINDS.index("sync")

#: Calls by which a stream is told to wait for an event of another.
_STREAM_WAITS = ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent", "cudaStreamWaitEvent_ptsz")
#: A thread that does nothing new for this long ...
SILENCE_NS = 200_000
#: ... and goes on within this (or a hundredth of the silence) of the end of the last work that it had launched
#: was waiting for it.
RESUMES_NS = 60_000
#: Work that waits on a stream from which on its queue is full (CUDA holds 1,024 launches).
FULL_QUEUE = 1_000
#: Calls that wait for everything on the device.
_ALL = ("DeviceSynchronize", "CtxSynchronize", "ThreadSynchronize")


class Launches:
    """Work of each stream in order of launch: what was the last before a time."""

    def __init__(self, graph: Graph) -> None:
        known = np.flatnonzero(graph.launch > NEVER)
        stream = graph.lane[known] // MOST_LANES
        #: stream → launch times, ascending, and the work
        self.streams: dict[int, tuple[Array, Array]] = {}
        #: stream → (device, stream) as the trace names it
        self.named: dict[int, tuple[int, int]] = {}
        self.communicates: set[int] = set()
        for key in np.unique(stream).tolist():
            rows = known[stream == key]
            rows = rows[np.argsort(graph.launch[rows], kind="stable")]
            self.streams[key] = graph.launch[rows], rows
            source = graph.source[rows[0]]
            self.named[key] = int(graph.table["device"][source]), int(graph.table["stream"][source])
            if (graph.kind[rows] == _COMMUNICATION).mean() > 0.5:
                self.communicates.add(key)
        self.of = np.where(graph.launch > NEVER, graph.lane // MOST_LANES, -1)

    def last_before(self, key: int, times: Array) -> Array:
        """The last work of a stream launched before each time, -1 for none."""
        launch, rows = self.streams[key]
        place = np.searchsorted(launch, times, side="left") - 1
        return np.asarray(np.where(place >= 0, rows[np.maximum(place, 0)], -1))

    def waiting(self, graph: Graph, key: int, times: Array) -> Array:
        """How much of a stream's work was launched before each time and had not started."""
        launch, rows = self.streams[key]
        begun = np.sort(graph.start[rows])
        return np.searchsorted(launch, times, side="right") - np.searchsorted(begun, times, side="right")

    def last_ended(self, graph: Graph, key: int, times: Array) -> Array:
        """The work of a stream that ended last before each time, -1 for none."""
        _, rows = self.streams[key]
        rows = rows[np.argsort(graph.end[rows], kind="stable")]
        place = np.searchsorted(graph.end[rows], times, side="right") - 1
        return np.where(place >= 0, rows[np.maximum(place, 0)], -1)


def dependencies(graph: Graph, rank: Rank, launches: Launches) -> tuple[Array, int, int]:
    """For each work the work on another stream that it waits for (-1 none), and how many are given and inferred."""
    found = np.full(len(graph), -1, dtype=np.int64)
    if len(launches.streams) < 2:
        return found, 0, 0
    given = _given(graph, rank, launches)
    if given is not None:
        for waiter, source in given:
            _offer(graph, found, np.array([waiter]), np.array([source]))
        return found, int((found >= 0).sum()), 0
    _from_calls(graph, launches, found)
    _from_collectives(graph, launches, found)
    _from_times(graph, found)
    return found, 0, int((found >= 0).sum())


def _offer(graph: Graph, found: Array, waiter: Array, source: Array) -> None:
    """Keep, of those that the times allow, the dependency that ended last."""
    ok = (source >= 0) & (waiter >= 0)
    waiter, source = waiter[ok], source[ok]
    ok = (graph.end[source] <= graph.start[waiter] + ROUNDING_NS) & (
        graph.start[source] < graph.start[waiter]
    )
    waiter, source = waiter[ok], source[ok]
    held = found[waiter]
    better = (held < 0) | (graph.end[source] > graph.end[np.maximum(held, 0)])
    waiter, source = waiter[better], source[better]
    order = np.argsort(graph.end[source], kind="stable")  # the last written wins
    found[waiter[order]] = source[order]


def _given(graph: Graph, rank: Rank, launches: Launches) -> list[tuple[int, int]] | None:
    """(waiting work, work waited for) from the trace's own synchronisation events; None where it has none."""
    table, host = rank.synchronizations, rank.host
    if table is None or host is None:
        return None
    # Some sources name neither stream: then their waits are calls like any other.
    told = (table["stream"] != MISSING) & (table["source_stream"] != MISSING)
    rows = np.flatnonzero((table["kind"] == table.strings.find("stream_wait")) & told)
    if not len(rows):
        return None
    at = _call_times(host)
    by_name = {name: key for key, name in launches.named.items()}
    pairs = []
    for row in rows.tolist():
        stream, source = int(table["stream"][row]), int(table["source_stream"][row])
        called = at.get(int(table["correlation"][row]), int(table["start_ns"][row]))
        recorded = at.get(int(table["source_correlation"][row]), called)
        for key, (launch, work) in launches.streams.items():
            device, number = launches.named[key]
            other = by_name.get((device, source))
            place = int(np.searchsorted(launch, called, side="left"))
            if number == stream and other is not None and place < len(work):
                last = int(launches.last_before(other, np.array([recorded]))[0])
                if last >= 0:
                    pairs.append((int(work[place]), last))
    return pairs


def _call_times(host: Table) -> dict[int, int]:
    rows = np.flatnonzero(host["correlation"] != MISSING)
    return dict(zip(host["correlation"][rows].tolist(), host["start_ns"][rows].tolist(), strict=True))


def _from_calls(graph: Graph, launches: Launches, found: Array) -> None:
    """A wait for an event applies to the next launch of its thread; what it waits for is the latest-ending
    of what other streams had been given before."""
    host = graph.host
    if host is None:
        return
    codes = [code for name in _STREAM_WAITS if (code := host.strings.find(name)) >= 0]
    if not codes:
        return
    calls = np.flatnonzero(np.isin(host["name"], codes) & (host["start_ns"] >= graph.begin_ns))
    if not len(calls):
        return
    known = np.flatnonzero(graph.launch_row >= 0)
    thread = host["thread"][graph.launch_row[known]]
    for one in np.unique(host["thread"][calls]):
        mine = known[thread == one]
        mine = mine[np.lexsort((graph.start[mine], graph.launch[mine]))]
        times = host["start_ns"][calls[host["thread"][calls] == one]]
        place = np.searchsorted(graph.launch[mine], times, side="left")
        times, waiter = times[place < len(mine)], mine[place[place < len(mine)]]
        _wait_for_others(graph, launches, found, waiter, times, list(launches.streams))


def _from_collectives(graph: Graph, launches: Launches, found: Array) -> None:
    """A collective reads what was computed before it."""
    waiter = np.flatnonzero((graph.kind == _COMMUNICATION) & (graph.launch > NEVER))
    others = [key for key in launches.streams if key not in launches.communicates]
    _wait_for_others(graph, launches, found, waiter, graph.launch[waiter], others)


def _wait_for_others(
    graph: Graph,
    launches: Launches,
    found: Array,
    waiter: Array,
    times: Array,
    keys: list[int],
) -> None:
    for key in keys:
        other = launches.of[waiter] != key
        _offer(graph, found, waiter[other], launches.last_before(key, times[other]))


def _from_times(graph: Graph, found: Array) -> None:
    """Work that nothing explains and that starts right after another stream's work has ended."""
    ready = np.where(graph.launch > NEVER, graph.launch + graph.delay_ns, NEVER)
    known = np.maximum(graph.before_end(), ready)
    known = np.maximum(known, np.where(found >= 0, graph.end[np.maximum(found, 0)], NEVER))
    waiter = np.flatnonzero(graph.start - known > HANDOVER_NS)
    if not len(waiter):
        return
    order = np.argsort(graph.end, kind="stable")
    place = np.searchsorted(graph.end[order], graph.start[waiter] + ROUNDING_NS, side="right") - 1
    source = order[np.maximum(place, 0)]
    fits = (
        (place >= 0)
        & (graph.lane[source] != graph.lane[waiter])
        & (graph.start[waiter] - graph.end[source] <= HANDOVER_NS)
        & ((graph.launch[source] < graph.launch[waiter]) | (graph.launch[waiter] == NEVER))
    )
    _offer(graph, found, waiter[fits], source[fits])


# --- the host's own waits ----------------------------------------------------------------------------


def waits_of(graph: Graph, rank: Rank, launches: Launches) -> Waits:
    """Blocking calls of the window and what each waited for."""
    host = graph.host
    empty = np.empty(0, dtype=np.int64)
    if host is None:
        return Waits(empty, empty, empty, empty)
    rows = np.flatnonzero(
        (host["kind"] == _SYNC) & (host["start_ns"] >= graph.begin_ns) & (host["end_ns"] <= graph.host_end_ns)
    )
    if len(rows) > MOST_WAITS:
        length = host["end_ns"][rows] - host["start_ns"][rows]
        rows = np.sort(rows[np.argsort(-length, kind="stable")[:MOST_WAITS]])
    start, end = host["start_ns"][rows], host["end_ns"][rows]
    work = _waited_for(graph, rank, launches, rows, start, end)
    silent = _silent(graph, launches, rows)
    columns = [np.concatenate(pair) for pair in zip((start, end, work, rows), silent, strict=True)]
    order = np.lexsort((columns[0], columns[1]))
    return Waits(*(column[order] for column in columns))


def _silent(graph: Graph, launches: Launches, blocking: Array) -> tuple[Array, Array, Array, Array]:
    """Waits that no call admits to: (start, end, work, row).

    A thread that does nothing new for long, and goes on just when the last work it had launched ends, was
    waiting for it: allocators that wait for events before they free, lazily loaded modules, mapped memory.
    And a launch into a full queue returns when the device has made room.
    """
    host = graph.host
    assert host is not None
    parts: list[tuple[Array, Array, Array, Array]] = []
    for times, label in graph.threads:
        if len(times) < 2:
            continue
        long = np.flatnonzero(np.diff(times) >= SILENCE_NS)
        long = long[(times[long + 1] <= graph.host_end_ns) & ~np.isin(label[long], blocking)]
        start, end, row = times[long], times[long + 1], label[long]
        work = np.full(len(long), -1, dtype=np.int64)
        for key in launches.streams:
            last = launches.last_before(key, start)
            ended = graph.end[np.maximum(last, 0)]
            fits = (
                (last >= 0)
                & (ended > start)
                & (ended <= end + ROUNDING_NS)
                & (end - ended <= np.maximum(RESUMES_NS, (end - start) // 100))
            )
            work[fits] = last[fits]
            full = (work < 0) & (launches.waiting(graph, key, start) >= FULL_QUEUE)
            work[full] = launches.last_ended(graph, key, end[full])
        held = (work >= 0) & (graph.end[np.maximum(work, 0)] > start) if len(graph) else work >= 0
        parts.append((start[held], end[held], work[held], row[held]))
    empty = np.empty(0, dtype=np.int64)
    if not parts:
        return empty, empty, empty, empty
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1], columns[2], columns[3]


def _waited_for(graph: Graph, rank: Rank, launches: Launches, rows: Array, start: Array, end: Array) -> Array:
    """The work whose end each call waited for, -1 for none."""
    work = np.full(len(rows), -1, dtype=np.int64)
    host = graph.host
    assert host is not None
    names = {int(code): host.strings.text(int(code)) or "" for code in np.unique(host["name"][rows])}
    all_streams = [code for code, name in names.items() if any(part in name for part in _ALL)]
    whole = np.isin(host["name"][rows], all_streams)
    stream, until = _stated(graph, rank, rows, start)
    usual = _main_stream(launches)
    for key in launches.streams:
        last = launches.last_before(key, until)
        ended = (last >= 0) & (graph.end[np.maximum(last, 0)] <= end + ROUNDING_NS)
        ended &= graph.start[np.maximum(last, 0)] < end
        # A call that names no stream waited for whatever ended while it blocked; one that found nothing to
        # wait for looked at the stream on which most work runs.
        blocked = graph.end[np.maximum(last, 0)] > start
        right = np.where(
            stream != MISSING, stream == launches.named[key][1], whole | blocked | (key == usual)
        )
        later = (
            ended & right & ((work < 0) | (graph.end[np.maximum(last, 0)] > graph.end[np.maximum(work, 0)]))
        )
        work[later] = last[later]
    _for_the_unlaunched(graph, start, end, stream == MISSING, work)
    return _own_copies(graph, rows, end, work)


def _for_the_unlaunched(graph: Graph, start: Array, end: Array, unstated: Array, work: Array) -> None:
    """Work launched before the trace began is waited for as well: the call returns just after it has ended."""
    lost = np.flatnonzero(graph.launch == NEVER)
    if not len(lost) or not len(end):
        return
    lost = lost[np.argsort(graph.end[lost], kind="stable")]
    place = np.searchsorted(graph.end[lost], end + ROUNDING_NS, side="right") - 1
    last = lost[np.maximum(place, 0)]
    ended = graph.end[last]
    fits = unstated & (place >= 0) & (ended > start) & (graph.start[last] < end) & (end - ended <= RESUMES_NS)
    fits &= (work < 0) | (ended > graph.end[np.maximum(work, 0)])
    work[fits] = last[fits]


def _own_copies(graph: Graph, rows: Array, end: Array, work: Array) -> Array:
    """A blocking copy waits for itself."""
    if not len(graph):
        return work
    order = np.argsort(graph.launch_row, kind="stable")
    place = np.minimum(np.searchsorted(graph.launch_row[order], rows), len(order) - 1)
    own = order[place]
    return np.asarray(np.where((graph.launch_row[own] == rows) & (graph.start[own] < end), own, work))


def _main_stream(launches: Launches) -> int | None:
    return max(launches.streams, key=lambda key: len(launches.streams[key][1]), default=None)


def _stated(graph: Graph, rank: Rank, rows: Array, start: Array) -> tuple[Array, Array]:
    """The stream that each call waits for where the trace says it, else MISSING, and up to when work given to it
    counts: of an event until it was recorded, else until the call."""
    stream, until = np.full(len(rows), MISSING, dtype=np.int64), start.copy()
    table, host = rank.synchronizations, graph.host
    if table is None or host is None or not len(table) or not len(rows):
        return stream, until
    called = _call_times(host)
    by_call: dict[int, tuple[int, int]] = {}
    kinds = table.text("kind")
    for row, correlation in enumerate(table["correlation"].tolist()):
        if kinds[row] == "event_sync":
            recorded = called.get(int(table["source_correlation"][row]), MISSING)
            by_call[correlation] = int(table["source_stream"][row]), recorded
        elif kinds[row] == "stream_sync":
            by_call[correlation] = int(table["stream"][row]), MISSING
    for position, correlation in enumerate(host["correlation"][rows].tolist()):
        said, recorded = by_call.get(correlation, (MISSING, MISSING))
        if said >= 0:
            stream[position] = said
        if recorded != MISSING:
            until[position] = min(recorded, until[position])
    return stream, until
