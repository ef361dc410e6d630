"""Events into columns: what an event is, and what of it is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels import is_communication
from ..model import MISSING, Strings
from ._kineto_categories import (
    ANNOTATION,
    COMMUNICATION,
    COPY,
    DEVICE,
    MEMORY,
    OPERATOR,
    PYTHON,
    RUNTIME,
    SYNC_MARK,
    action_of,
)
from ._kineto_codes import NameCodes, Processes, Products, RawCodes, Sparse, Threads
from ._kineto_events import (
    CallArguments,
    CollectiveArguments,
    DeviceArguments,
    Event,
    ExactEvent,
    HostArguments,
    LabelArguments,
    MemoryArguments,
    SyncArguments,
    active_blocks,
    arguments,
)
from ._kineto_sorting import SortedEvents
from ._kineto_stream import Chunk
from ._kineto_terms import sync_kind
from ._kineto_times import as_doubles_say, nanoseconds, nanoseconds_of_numbers, numbers, whole

__all__ = ["PROCESS", "SECTION", "Columns"]

#: Columns beside the model's own: the process as numbered by ``Columns.processes``, and in which section
#: of the file the row stands. Of host rows the thread tells the process.
PROCESS, SECTION = "_process", "_section"

Array = npt.NDArray[Any]

#: Operators whose arguments tell of collectives; those of the last two, to and from whom on gloo.
_CALLS = ("record_param_comms", "c10d::send", "c10d::recv_")


class Columns:
    """Takes chunks of events, keeps columns. Call :meth:`add` per chunk, then read the fields.

    Rows are in the order of the file, but for kinds, which stand together within a chunk. Times are
    nanoseconds on the trace's own clock (its base time is not added yet).
    """

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self.device: list[dict[str, Array]] = []
        self.host: list[dict[str, Array]] = []
        self.memory: list[dict[str, Array]] = []
        self.syncs: list[dict[str, Array]] = []
        #: ("device" | "host", row, arguments) of communication kernels, ``record_param_comms``, sends and receives.
        self.collectives: list[tuple[str, int, CollectiveArguments]] = []
        self.call_shapes = Sparse()  # host row of a call → (grid's blocks, block's threads), as ROCm has them
        self.residents = Sparse()  # device row → threads of it that fit a multiprocessor at once
        self.unknown: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.categories: set[str] = set()  # as written
        self.labels: dict[str, set[str]] = {}  # process → what "process_name" and "process_labels" call it
        self.named: Counter[str] = (
            Counter()
        )  # process → how often "process_name" names it; once in a recording
        self.closed = 0  # recordings that came to their end
        self.sections = 0
        self.processes = Processes()
        self.threads = Threads()
        self.events = 0
        self.elements = 0  # with those that have no phase, and so are no events
        self.negative_durations = 0
        self.untimed = 0
        self.unclosed = 0
        self.beyond_64_bit: list[int] = []
        self._section: Array = np.empty(0, np.int32)  # of the events in hand
        self._device_rows = 0
        self._host_rows = 0
        self._names = NameCodes(strings)
        self._texts = RawCodes(strings)
        self._products = Products()
        self._open: dict[tuple[str, str], list[Event]] = {}

    def add(self, chunk: Chunk) -> bool:
        """Sort a chunk's events into columns; the chunk may then be dropped.

        Returns whether doubles were exact enough for its times.
        """
        found = SortedEvents(chunk.events)
        times = {action: _quick_times(events) for action, events in found.groups.items()}
        exact = not found.marks and None not in times.values()
        if not exact:
            found = SortedEvents(chunk.exact())
            self._pair(found)
            times = {action: _exact_times(events) for action, events in found.groups.items()}
        self.events += found.count
        self.elements += len(chunk.events)
        self.unknown.update({label: len(events) for label, events in found.unknown.items()})
        self.ignored.update({label: len(events) for label, events in found.ignored.items()})
        self.categories.update(found.categories)
        self._read_labels(found.labels)
        for action, events in sorted(found.groups.items()):
            spans = self._spans(*(times[action] or _exact_times(events)))
            self._section = self.sections + found.sections(action)
            if action < DEVICE:
                self._add_host(events, action, *spans)
            elif action == DEVICE + COMMUNICATION:
                self._add_communication(events, *spans)
            elif action < MEMORY:
                self._add_device(events, action - DEVICE, *spans)
            elif action == SYNC_MARK:
                self._add_syncs(events, *spans)
            else:
                self._add_memory(events, *spans)
        self.sections += found.breaks
        self.closed += found.closed
        return exact

    def _read_labels(self, events: Sequence[Event]) -> None:
        for event, args in zip(events, arguments(events, LabelArguments), strict=True):
            self.named[str(event.pid)] += event.name == "process_name"
            text = args.name if args.labels is None else args.labels
            if isinstance(text, str) and text:
                self.labels.setdefault(str(event.pid), set()).add(text)

    def _pair(self, found: SortedEvents) -> None:
        """Begins and their ends as complete events."""
        begun: list[Event] = []
        ended: list[Event] = []
        for event in found.marks:
            stack = self._open.setdefault((str(event.pid), str(event.tid)), [])
            if event.ph == "B":
                stack.append(event)
            elif not stack:
                self.unclosed += 1
            else:
                begun.append(stack.pop())
                ended.append(event)
        # All times of the chunk at once: one by one they cost a hundred times as much.
        starts, ends = (nanoseconds([bytes(event.ts) for event in events]) for events in (begun, ended))
        for begin, start, end in zip(begun, starts.tolist(), ends.tolist(), strict=True):
            if MISSING not in (start, end):  # else its missing time is counted with the others
                begin.dur = msgspec.Raw(f"{(end - start) // 1000}.{(end - start) % 1000:03}".encode())
            action = action_of(begin.cat)
            kind = action if action is not None and action < DEVICE else ANNOTATION
            found.groups.setdefault(kind, []).append(begin)

    # --- one kind of event each ----------------------------------------------------------------

    def _whole(self, values: Sequence[Any]) -> Array:
        return whole(values, self.beyond_64_bit)

    def _spans(self, start: Array, duration: Array) -> tuple[Array, Array, Array]:
        """Starts, ends, and a mask of the rows that have a time at all."""
        known = start != MISSING
        self.untimed += int(np.count_nonzero(~known))
        duration[duration == MISSING] = 0
        negative = duration < 0
        self.negative_durations += int(np.count_nonzero(negative & known))
        duration[negative] = 0
        return start, start + np.where(known, duration, 0), known

    def _codes(self, events: Sequence[Event]) -> Array:
        names = self._names
        try:
            return np.array([names[event.name] for event in events], dtype=np.int32)
        except TypeError:  # a list or an object for a name
            return np.array([names[str(event.name)] for event in events], dtype=np.int32)

    def _thread_numbers(self, events: Sequence[Event]) -> Array:
        threads = self.threads
        try:
            return np.array([threads[event.pid, event.tid] for event in events], dtype=np.int64)
        except TypeError:
            return np.array([threads[str(event.pid), str(event.tid)] for event in events], dtype=np.int64)

    def _origin(self, events: Sequence[Event]) -> dict[str, Array]:
        """Where events come from, for telling apart what was merged into one file."""
        number = self.processes
        try:
            processes = [number[event.pid] for event in events]
        except TypeError:  # a list or an object for a process
            processes = [number[str(event.pid)] for event in events]
        return {PROCESS: np.array(processes, dtype=np.int32), SECTION: self._section}

    def _add_communication(self, events: list[Event], start: Array, end: Array, known: Array) -> None:
        """``collective_comm`` is device work of some devices, and of others (oneCCL) a call on a thread of the host."""
        args = arguments(events, DeviceArguments)
        on_device = np.array([a.device is not None or a.stream is not None for a in args], dtype=bool)
        section = self._section
        for rows, add, kind in (
            (np.flatnonzero(on_device), self._add_device, COMMUNICATION),
            (np.flatnonzero(~on_device), self._add_host, ANNOTATION),
        ):
            if len(rows):
                self._section = section[rows]
                add([events[row] for row in rows.tolist()], kind, start[rows], end[rows], known[rows])

    def _add_device(self, events: list[Event], kind: int, start: Array, end: Array, known: Array) -> None:
        args = arguments(events, DeviceArguments)
        names = self._codes(events)
        kinds = np.full(len(events), kind, dtype=np.uint8)
        if kind != COPY:
            codes, inverse = np.unique(names, return_inverse=True)
            by_name = [code >= 0 and is_communication(self.strings.values[code]) for code in codes]
            marked = np.array(by_name, dtype=bool)[inverse] | (kind == COMMUNICATION)
            marked |= np.array([a.collective is not None for a in args])
            kinds[marked] = COMMUNICATION
            self._keep_collectives("device", events, marked & known, self._device_rows, known)
        # Durations stay exact, and so do all host times, which nest. Device starts are what a double holds,
        # so that breakdowns agree to the last digit with every tool that reads the same file through doubles.
        seen = as_doubles_say(start)
        columns = {
            "start_ns": seen,
            "end_ns": seen + (end - start),
            "kind": kinds,
            "device": self._whole(
                [e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)]
            ),
            "stream": self._whole(
                [_stream(e) if a.stream is None else a.stream for e, a in zip(events, args, strict=True)]
            ),
            "name": names,
            "bytes": self._whole([a.bytes for a in args]),
            "correlation": self._whole([a.correlation for a in args]),
            **self._launch_shapes(args, known),
            **self._origin(events),
        }
        self.device.append(_kept(columns, known))
        self._device_rows += int(np.count_nonzero(known))

    def _add_host(self, events: list[Event], kind: int, start: Array, end: Array, known: Array) -> None:
        names = self._codes(events)
        columns = {
            "start_ns": start,
            "end_ns": end,
            "kind": np.full(len(events), kind, dtype=np.uint8),
            "thread": self._thread_numbers(events),
            "name": names,
            **self._host_arguments(events, kind, known),
            SECTION: self._section,
        }
        if kind == OPERATOR:
            metadata = np.isin(names, [self.strings.find(name) for name in _CALLS])
            self._keep_collectives("host", events, metadata & known, self._host_rows, known)
        self.host.append(_kept(columns, known))
        self._host_rows += int(np.count_nonzero(known))

    def _launch_shapes(self, args: list[DeviceArguments], known: Array) -> dict[str, Array]:
        """Grids, blocks, graph nodes and occupancies of device work."""
        product = self._products
        graph, node = self._whole([a.graph for a in args]), self._whole([a.graph_node for a in args])
        # Kineto writes node 0 of graph 0 for work that is in no graph.
        in_graph = (node != MISSING) & ((graph > 0) | ((graph == MISSING) & (node != 0)))
        threads = np.array([product[bytes(a.block)] for a in args], dtype=np.int64)
        for position, a in enumerate(args):
            if a.achieved is None and a.occupancy:
                active = active_blocks(a.occupancy)
                if active and threads[position] != MISSING and known[position]:
                    row = self._device_rows + int(np.count_nonzero(known[:position]))
                    self.residents.add(row, (active * int(threads[position]),))
        return {
            "grid_blocks": np.array([product[bytes(a.grid)] for a in args], dtype=np.int64),
            "block_threads": threads,
            "graph_node": np.where(in_graph, node, MISSING),
            "occupancy": numbers([a.achieved for a in args]) / 100.0,
        }

    def _host_arguments(self, events: list[Event], kind: int, known: Array) -> dict[str, Array]:
        """Of a host kind the arguments that it has: runtime calls correlations, operators texts, Python nothing."""
        columns: dict[str, Array] = {
            name: np.full(len(events), MISSING, dtype=np.int64)
            for name in ("correlation", "sequence", "forward_thread")
        }
        columns |= {
            name: np.full(len(events), -1, dtype=np.int32) for name in ("module", "shapes", "stack", "types")
        }
        columns["flops"] = np.full(len(events), np.nan)
        if kind == PYTHON:
            return columns
        if kind == RUNTIME:
            calls = arguments(events, CallArguments)
            columns["correlation"] = self._whole([a.correlation for a in calls])
            self._keep_call_shapes(calls, known)
            return columns
        args = arguments(events, HostArguments)
        text = self._texts
        texts = {
            "module": [text[bytes(a.hierarchy)] if a.hierarchy else -1 for a in args],
            "shapes": [text[bytes(a.dimensions or a.old_dimensions)] for a in args],
            "stack": [text[bytes(a.call_stack)] if a.call_stack else -1 for a in args],
            "types": [text[bytes(a.types)] if a.types else -1 for a in args],
        }
        columns |= {name: np.array(codes, dtype=np.int32) for name, codes in texts.items()}
        columns["sequence"] = self._whole([a.sequence for a in args])
        # A forward operator has 0 here: no other thread ran its forward.
        forward = self._whole([a.forward_thread for a in args])
        columns["forward_thread"] = np.where(forward == 0, MISSING, forward)
        columns["flops"] = numbers([a.flops for a in args])
        return columns

    def _keep_call_shapes(self, calls: list[CallArguments], known: Array) -> None:
        product = self._products
        before = self._host_rows
        for call, kept in zip(calls, known.tolist(), strict=True):
            if kept:
                if call.grid:
                    self.call_shapes.add(before, (product[bytes(call.grid)], product[bytes(call.block)]))
                before += 1

    def _add_syncs(self, events: list[Event], start: Array, end: Array, known: Array) -> None:
        """Waits as the profiler saw them on the device; ``cuda_event`` says where an event was recorded."""
        args = arguments(events, SyncArguments)
        kinds = [sync_kind(a.kind or a.xpu_kind or e.name, e.cat) for e, a in zip(events, args, strict=True)]
        columns = {
            "kind": np.array([self.strings.code(kind) for kind in kinds], dtype=np.int32),
            "start_ns": start,
            "end_ns": end,
            "device": self._whole(
                [e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)]
            ),
            "stream": self._whole([a.stream for a in args]),
            "event": self._whole([a.recorded_event if a.event is None else a.event for a in args]),
            "source_stream": self._whole([a.source_stream for a in args]),
            "source_correlation": self._whole([a.source_correlation for a in args]),
            "correlation": self._whole([a.correlation for a in args]),
            **self._origin(events),
        }
        self.syncs.append(_kept(columns, known))

    def _keep_collectives(
        self, side: str, events: list[Event], marked: Array, before: int, known: Array
    ) -> None:
        """Keep what collectives are made of; ``before`` is the table's length so far."""
        positions = np.flatnonzero(marked).tolist()
        rows = (before + np.cumsum(known) - known)[marked].tolist()
        args = arguments([events[position] for position in positions], CollectiveArguments)
        self.beyond_64_bit += [
            a.communicator for a in args if type(a.communicator) is int and a.communicator >= 2**63
        ]
        self.collectives += zip([side] * len(rows), rows, args, strict=True)

    def _add_memory(self, events: list[Event], start: Array, end: Array, known: Array) -> None:
        args = arguments(events, MemoryArguments)
        on_host = np.array([a.device_type in (0, "0") for a in args])
        columns = {
            "time_ns": start,
            "address": self._whole([a.address for a in args]),
            "bytes": self._whole([a.bytes for a in args]),
            "device": np.where(on_host, -1, self._whole([a.device for a in args])),
            "allocated_bytes": self._whole([a.allocated for a in args]),
            "reserved_bytes": self._whole([a.reserved for a in args]),
            **self._origin(events),
        }
        self.memory.append(_kept(columns, known))


def _quick_times(events: list[Event]) -> tuple[Array, Array] | None:
    """Starts and durations from decoded numbers, ``None`` where they must be read as text."""
    if isinstance(events[0], ExactEvent):
        return None
    start = nanoseconds_of_numbers([event.ts for event in events])
    if start is None:
        return None
    duration = (
        np.zeros_like(start)
        if events[0].ph in ("i", "I")
        else nanoseconds_of_numbers([e.dur for e in events])
    )
    return None if duration is None else (start, duration)


def _exact_times(events: list[Event]) -> tuple[Array, Array]:
    """Starts and durations from the text of numbers."""
    return nanoseconds([bytes(e.ts) for e in events]), nanoseconds([bytes(e.dur) for e in events])


def _stream(event: Event) -> Any:
    thread = event.tid
    return thread.rsplit(" ", 1)[-1] if isinstance(thread, str) else thread


def _kept(columns: dict[str, Array], known: Array) -> dict[str, Array]:
    return columns if known.all() else {name: column[known] for name, column in columns.items()}
