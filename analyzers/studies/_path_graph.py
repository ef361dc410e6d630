"""The dependencies of a step: what had to end before each piece of work could start.

*Work* is what runs beside the host: kernels and copies on streams; without a device, the collectives on
their worker threads. A piece of work starts when the host has launched it, what runs before it on its
stream has ended, and what its stream was told to wait for has ended. The host is serial, and a blocking
call returns when the work it waits for has ended. So every start and every return is the latest of a few
ends plus what the machine adds, which is a longest-path (max, +) recurrence:

    start[i]  = max(launch[i] + delay, end[i−1 on its stream], end[what it waits for]) + rest[i]
    end[i]    = start[i] + duration[i]
    return[w] = max(call[w] + cost, end[what it waits for] + rest[w])

Which stream waits for which is given where the trace has synchronisation events. Elsewhere it is inferred,
from the calls (a wait for an event goes to the next launch of that thread), from collectives (they read
what was computed before them), and from the times themselves (work that starts right after another
stream's work ends, with nothing else to explain it). A dependency that the measured times contradict is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.breakdown import has_device_work
from trine.analyzers.selection import Selected
from trine.record.model import DEVICE_KINDS, HOST_KINDS, Rank, Table

from ._path_host import Changes, owners_of, threads_of

__all__ = ["NEVER", "Graph", "Waits", "gaps_of", "graph_of"]

Array = npt.NDArray[Any]

_COMMUNICATION = DEVICE_KINDS.index("communication")
_OPERATOR, _RUNTIME, _ANNOTATION, _PYTHON, _LOADER, _SYNC, _COLLECTOR = range(len(HOST_KINDS))

#: Before any time: what was never launched was ready always. Far from the ends of int64, so that sums stay inside.
NEVER = -(2**60)
#: Old traces round starts and lengths to whole microseconds, each by itself.
ROUNDING_NS = 2_000
#: Work that starts this soon after another stream's work ended was waiting for it, where nothing else explains it.
HANDOVER_NS = 10_000
#: A kernel's usual way from the start of its launching call to its own start, where too few show it.
USUAL_DELAY_NS = 6_000
#: ... and what counts as usual at most.
MOST_DELAY_NS = 50_000
#: A blocking call that had nothing to wait for costs about this.
CALL_NS = 3_000
#: The machine leaves no longer gap between two pieces of work; where the median is longer, something else is.
MOST_GAP_NS = 10_000
#: Blocking calls that are followed one by one; of more, the longest.
MOST_WAITS = 4_000
#: Streams on which work overlaps are split into at most so many lanes; what lies below as many is left out.
MOST_LANES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Calls in which the host waits for work, by return. ``work`` is a row of the graph's work, -1 where it
    waited for nothing; ``row`` the call in the host table, -1 where the wait was inferred from idle time."""

    start: Array
    end: Array
    work: Array
    row: Array

    def __len__(self) -> int:
        return len(self.end)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Work sorted by lane, then start; all times ns. Columns of shape (work,) unless said.

    ``lane`` numbers the streams (``stream`` names them), a stream with overlapping work has several.
    ``launch`` is when the launching call began, :data:`NEVER` where it is not known. ``dependency`` is the
    row of the work on another stream that it waits for, -1 for none. ``source`` is the row in the table
    that the work comes from (``device``, else ``collectives``).
    """

    host: Table | None
    table: Table
    on_device: bool
    start: Array
    end: Array
    kind: Array  # DEVICE_KINDS
    name: Array  # code in table.strings
    source: Array
    lane: Array
    launch: Array
    launch_row: Array
    dependency: Array
    waits: Waits
    begin_ns: int
    host_end_ns: int
    delay: Array  # from the launching call's start to the work's, as far as launching explains it
    delay_ns: int  # the usual one
    threads: list[Changes]
    owner: Array  # of every host row: to whom it counts
    given: int  # dependencies between streams that the trace states
    inferred: int  # and those read off calls and times

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end_ns(self) -> int:
        """When the last work and the host have ended."""
        return max(int(self.end.max()) if len(self) else self.host_end_ns, self.host_end_ns)

    def first_in_lane(self) -> Array:
        """Mask of the work with none before it on its lane."""
        return np.append(True, self.lane[1:] != self.lane[:-1])[: len(self)]

    def before_end(self) -> Array:
        """End of the work before each on its lane; the window's begin for the first."""
        if not len(self):
            return self.end
        previous = np.append(self.begin_ns, self.end[:-1])
        return np.asarray(np.where(self.first_in_lane(), self.begin_ns, previous))


def graph_of(rank: Rank, selected: Selected) -> Graph | None:
    """The graph of a rank's selected steps; None where it holds neither device work nor operators."""
    if has_device_work(rank):
        return _of_device(rank, selected)
    from ._path_workers import of_workers

    return of_workers(rank, selected)


# --- with a device ---------------------------------------------------------------------------------


def _of_device(rank: Rank, selected: Selected) -> Graph | None:
    device, host = rank.device, rank.host
    assert device is not None
    if host is not None and not len(host):
        host = None
    long = device["end_ns"] > device["start_ns"]
    chosen = np.flatnonzero(long & selected.holds(device["step"]))
    if not len(chosen):
        return None
    begin, host_end = _bounds(host, selected, device, chosen)
    if not selected.everything:
        # Work without a launch record belongs to no step, yet it fills the time in which it ran.
        last = int(device["end_ns"][chosen].max())
        lost = long & (device["launch"] < 0) & (device["start_ns"] >= begin) & (device["end_ns"] <= last)
        chosen = np.flatnonzero((long & selected.holds(device["step"])) | lost)
    lane = _lanes(device, chosen)
    if (lane < 0).any():
        chosen, lane = chosen[lane >= 0], lane[lane >= 0]
    order = np.lexsort((device["end_ns"][chosen], device["start_ns"][chosen], lane))
    rows, lane = chosen[order], lane[order]
    launch_row = device["launch"][rows]
    launch = np.full(len(rows), NEVER, dtype=np.int64)
    if host is not None:
        known = launch_row >= 0
        # Host and device clocks differ by a microsecond or two: nothing starts before its launch.
        launch[known] = np.minimum(host["start_ns"][launch_row[known]], device["start_ns"][rows[known]])
    count = len(rows)
    none = np.full(count, -1, dtype=np.int64)
    empty = np.empty(0, dtype=np.int64)
    graph = Graph(
        host, device, True,
        device["start_ns"][rows], device["end_ns"][rows], device["kind"][rows], device["name"][rows],
        rows, lane, launch, launch_row, none, Waits(empty, empty, empty, empty),
        begin, host_end, none, USUAL_DELAY_NS, threads_of(host, begin, host_end),
        empty if host is None else owners_of(host), 0, 0,
    )  # fmt: skip
    graph = _with_delays(graph)
    from ._path_waits import Launches, dependencies, waits_of

    launches = Launches(graph)
    dependency, given, inferred = dependencies(graph, rank, launches)
    graph = replace(graph, dependency=dependency, given=given, inferred=inferred)
    return replace(graph, waits=waits_of(graph, rank, launches))


def _bounds(host: Table | None, selected: Selected, device: Table, chosen: Array) -> tuple[int, int]:
    """From the start of the first step's host work (or first launch) on, and when the host was done."""
    begin = int(device["start_ns"][chosen].min())
    end = begin
    launch = device["launch"][chosen]
    launch = launch[launch >= 0]
    if host is not None and len(launch):
        begin = min(begin, int(host["start_ns"][launch].min()))
        end = int(host["end_ns"][launch].max())
    if selected.start_ns is not None and selected.end_ns is not None:
        return min(begin, selected.start_ns), max(end, selected.end_ns)
    if host is not None:
        work = np.isin(host["kind"], (_OPERATOR, _RUNTIME, _SYNC))
        if work.any():
            begin = min(begin, int(host["start_ns"][work].min()))
            end = max(end, int(host["end_ns"][work].max()))
    return begin, end


def _lanes(device: Table, rows: Array) -> Array:
    """A number a stream; where work of one stream overlaps, a number for each layer of it, -1 below the last."""
    lane = _numbered(device["device"][rows]) * (len(rows) + 1) + _numbered(device["stream"][rows])
    lane = _numbered(lane) * MOST_LANES
    left = np.arange(len(rows))
    for layer in range(MOST_LANES):
        left = left[np.lexsort((device["start_ns"][rows[left]], lane[left]))]
        start, end = device["start_ns"][rows[left]], device["end_ns"][rows[left]]
        # Lanes one after the other on one axis, so that one running maximum serves all.
        shift = (lane[left] // MOST_LANES) * (
            int(end.max(initial=0)) - int(start.min(initial=0)) + ROUNDING_NS + 1
        )
        reach = np.maximum.accumulate(end + shift)
        # Rounding lets a piece begin before the one before it has ended, and never lets it end before that.
        over = ((start + shift)[1:] < reach[:-1] - ROUNDING_NS) | ((end + shift)[1:] < reach[:-1])
        over = np.append(False, over)[: len(left)]
        if not over.any():
            break
        left = left[over]
        lane[left] = lane[left] + 1 if layer < MOST_LANES - 1 else -1
    return np.asarray(lane)


def _numbered(values: Array) -> Array:
    """Values as small integers in their order."""
    known = np.unique(values)
    if len(known) == 1:
        return np.zeros(len(values), dtype=np.int64)
    return np.asarray(np.searchsorted(known, values))


def _with_delays(graph: Graph) -> Graph:
    """Launching explains the usual delay. Where the call itself lasts until the work starts, the call was at
    it: a copy of pageable memory fills a buffer first, a first launch loads its module."""
    usual = _usual_delay(graph)
    whole = np.where(graph.launch > NEVER, graph.start - graph.launch, 0)
    delay = np.minimum(whole, usual)
    if graph.host is not None:
        known = graph.launch_row >= 0
        own = np.zeros(len(graph), dtype=bool)
        own[known] = graph.host["end_ns"][graph.launch_row[known]] >= graph.start[known] - ROUNDING_NS
        # While it waits for the stream it fills nothing.
        own &= graph.before_end() <= graph.launch
        delay = np.where(own, whole, delay)
    return replace(graph, delay=delay, delay_ns=usual)


def _usual_delay(graph: Graph) -> int:
    """From a launching call's start to the work's, where the stream was free: the median."""
    free = (graph.launch > NEVER) & (graph.before_end() < graph.launch)
    delays = (graph.start - graph.launch)[free]
    if len(delays) < 5:
        return USUAL_DELAY_NS
    return min(int(np.median(delays)), MOST_DELAY_NS)


def gaps_of(graph: Graph) -> tuple[Array, int]:
    """The machine's gap before each work: the median where work was queued, and no more than was measured; and
    that median."""
    behind = graph.start - graph.before_end()
    follows = ~graph.first_in_lane()
    queued = follows & (graph.launch > NEVER) & (graph.launch + graph.delay_ns < graph.before_end())
    queued &= graph.dependency < 0
    usual = min(int(np.median(behind[queued])), MOST_GAP_NS) if queued.any() else 0
    return np.where(follows, np.minimum(behind, usual), 0), usual
