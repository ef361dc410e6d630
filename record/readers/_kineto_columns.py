"""Events into columns: what an event is, and what of it is kept."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels import is_communication
from ..model import DEVICE_KINDS, HOST_KINDS, MISSING, Strings
from ._kineto_events import DECODE_ERRORS, NO_ARGUMENTS, Arguments, Event
from ._kineto_times import nanoseconds, whole

__all__ = ["Columns", "host_kind_of_name"]

Array = npt.NDArray[Any]

_COMPUTE, _COMMUNICATION, _COPY = range(len(DEVICE_KINDS))
_OPERATOR, _RUNTIME, _ANNOTATION, _PYTHON, _LOADER, _SYNC, _COLLECTOR = range(len(HOST_KINDS))

_DEVICE = 100
_MEMORY = 200
_IGNORED = 300

#: Categories in lower case, old names (torch 1.8, 1.9) and new.
_CATEGORIES = {
    "kernel": _DEVICE + _COMPUTE,
    "gpu_memcpy": _DEVICE + _COPY,
    "gpu_memset": _DEVICE + _COPY,
    "memcpy": _DEVICE + _COPY,
    "memset": _DEVICE + _COPY,
    "concurrent_kernel": _DEVICE + _COMPUTE,
    "collective_comm": _DEVICE + _COMMUNICATION,
    "mtia_ccp_events": _DEVICE + _COMPUTE,
    "cpu_op": _OPERATOR,
    "operator": _OPERATOR,
    "hpu_op": _OPERATOR,
    "cuda_runtime": _RUNTIME,
    "cuda_driver": _RUNTIME,
    "runtime": _RUNTIME,
    "driver": _RUNTIME,
    "xpu_runtime": _RUNTIME,
    "xpu_driver": _RUNTIME,
    "mtia_runtime": _RUNTIME,
    "glow_runtime": _RUNTIME,
    "privateuse1_runtime": _RUNTIME,
    "privateuse1_driver": _RUNTIME,
    "user_annotation": _ANNOTATION,
    "python_function": _PYTHON,
    # Copies of host spans on device rows, markers and counters: no work of their own.
    **dict.fromkeys(
        (
            "gpu_user_annotation",
            "cuda_sync",
            "xpu_sync",
            "cuda_event",
            "cuda_profiler_range",
            "external_correlation",
            "overhead",
            "trace",
            "mtia_insight",
            "mtia_counters",
            "xpu_scope_profiler",
            "hardware_counters",
            "cpu_instant_event",
            "ac2g",
            "async",
            "async_cpu_to_gpu",
            "async_gpu",
            "fwdbwd",
        ),
        _IGNORED,
    ),
}

#: Runtime calls that block the host until the device is done.
_BLOCKING = frozenset(
    {
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize",
        "cudaStreamSynchronize_ptsz", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
        "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpy3D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol",
        "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2", "cuMemcpy",
        "hipDeviceSynchronize", "hipStreamSynchronize", "hipEventSynchronize", "hipCtxSynchronize",
        "hipMemcpy", "hipMemcpyWithStream", "hipMemcpyDtoH", "hipMemcpyHtoD", "hipMemcpyDtoD",
        "zeCommandQueueSynchronize", "zeEventHostSynchronize", "zeFenceHostSynchronize",
        "zeCommandListHostSynchronize", "urQueueFinish", "urEventWait", "piQueueFinish", "piEventsWait",
    }
)  # fmt: skip


#: Waiting for the next batch: torch's own mark, Lightning's, what people call it, and the call itself in stacks.
_LOADING = re.compile(
    r"^enumerate\(DataLoader\)|(?:^|[^a-z])(?:train_)?data_?load(?:er|ing)?(?:_next)?$", re.IGNORECASE
)
_LOADING_CALL = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__$")


def host_kind_of_name(name: str, kind: int) -> int:
    """The host kind of a span whose category says ``kind``; its name may say more."""
    if kind == _RUNTIME:
        return _SYNC if name in _BLOCKING else kind
    if (_LOADING_CALL if kind == _PYTHON else _LOADING).search(name):
        return _LOADER
    if name.startswith("Python GC") or name in ("gc.collect", "<built-in function collect>"):
        return _COLLECTOR
    if kind == _OPERATOR and name.startswith(("ProfilerStep#", "Optimizer.")):
        return _ANNOTATION  # torch 1.8 and 1.9 have one category for both
    return kind


class _NameCodes(dict[Any, int]):
    """Name → code in the pool; a name seen for the first time is added."""

    def __init__(self, strings: Strings) -> None:
        super().__init__({None: -1})
        self._strings = strings

    def __missing__(self, name: Any) -> int:
        text = name if isinstance(name, str) else str(name)[:200]
        code = self[name] = self._strings.code(text)
        return code


class _RawCodes(dict[bytes, int]):
    """Raw JSON → code of a string's content, or of anything else as it was written."""

    def __init__(self, strings: Strings) -> None:
        super().__init__({b"": -1, b'""': -1, b"[]": -1, b"null": -1})
        self._strings = strings

    def __missing__(self, data: bytes) -> int:
        text = data.decode("utf-8", "replace")
        if data[:1] == b'"':
            with contextlib.suppress(*DECODE_ERRORS):  # else kept as it was written
                text = msgspec.json.decode(data, type=str)
        code = self[data] = self._strings.code(text)
        return code


class _Threads(dict[tuple[Any, Any], int]):
    """(process, thread) as written → the thread's number; unlike threads never share one."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, tuple[str, str]] = {}

    def __missing__(self, key: tuple[Any, Any]) -> int:
        owner = (str(key[0]), str(key[1]))
        try:
            thread = int(owner[1].rsplit(" ", 1)[-1])
        except ValueError:
            thread = -1
        if abs(thread) >= 2**62:
            thread = -1
        while self._owners.setdefault(thread, owner) != owner:
            thread = -len(self._owners) - 1000  # the same number in another process
        self[key] = thread
        return thread


class Columns:
    """Takes lists of events, keeps columns. Call :meth:`add` per chunk, then read the fields.

    Times are nanoseconds on the trace's own clock (its base time is not added yet).
    """

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self.device: list[dict[str, Array]] = []
        self.host: list[dict[str, Array]] = []
        self.memory: list[dict[str, Array]] = []
        self.collectives: list[tuple[str, int, Arguments]] = []  # ("device" | "host", row, arguments)
        self.unknown: Counter[str] = Counter()
        self.events = 0
        self.negative_durations = 0
        self.untimed = 0
        self.unclosed = 0
        self._device_rows = 0
        self._host_rows = 0
        self.types: dict[int, str] = {}  # host row of an annotation → its "Input type"
        self._names = _NameCodes(strings)
        self._texts = _RawCodes(strings)
        self._threads = _Threads()
        self._open: dict[tuple[Any, Any], list[Event]] = {}

    def add(self, events: list[Event]) -> None:
        """Sort a chunk's events into columns; the chunk may then be dropped."""
        device: list[Event] = []
        device_kinds: list[int] = []
        host: list[Event] = []
        host_kinds: list[int] = []
        memory: list[Event] = []
        actions: dict[Any, int | None] = {}
        strange = 0
        for event in events:
            phase = event.ph
            if phase == "X":
                category = event.cat
                try:
                    action = actions[category]
                except KeyError:
                    action = actions[category] = _CATEGORIES.get(str(category).lower())
                except TypeError:  # a list or an object
                    action = None
                if action is None:
                    self.unknown["(none)" if category is None else str(category)[:40]] += 1
                elif action < _DEVICE:
                    host.append(event)
                    host_kinds.append(action)
                elif action < _MEMORY:
                    device.append(event)
                    device_kinds.append(action - _DEVICE)
            elif phase == "i" or phase == "I":
                if event.name == "[memory]":
                    memory.append(event)
            elif phase == "B" or phase == "E":
                closed = self._pair(event)
                if closed is not None:
                    host.append(closed)
                    host_kinds.append(_CATEGORIES.get(str(closed.cat).lower(), _ANNOTATION) % _DEVICE)
            elif phase is None:
                strange += 1
        self.events += len(events) - strange
        if device:
            self._add_device(device, device_kinds)
        if host:
            self._add_host(host, host_kinds)
        if memory:
            self._add_memory(memory)

    def _pair(self, event: Event) -> Event | None:
        """A begin and its end as one complete event."""
        stack = self._open.setdefault((str(event.pid), str(event.tid)), [])
        if event.ph == "B":
            stack.append(event)
            return None
        if not stack:
            self.unclosed += 1
            return None
        begin = stack.pop()
        start, end = nanoseconds([bytes(begin.ts), bytes(event.ts)]).tolist()
        if MISSING in (start, end):
            return begin  # its missing time is counted with the others
        begin.dur = msgspec.Raw(f"{(end - start) // 1000}.{(end - start) % 1000:03}".encode())
        return begin

    # --- one kind of event each ----------------------------------------------------------------

    def _times(self, events: Sequence[Event]) -> tuple[Array, Array, Array]:
        """Starts, ends, and a mask of the rows that have a time at all."""
        start = nanoseconds([bytes(event.ts) for event in events])
        duration = nanoseconds([bytes(event.dur) for event in events])
        known = start != MISSING
        self.untimed += int(np.count_nonzero(~known))
        duration[duration == MISSING] = 0
        negative = duration < 0
        self.negative_durations += int(np.count_nonzero(negative))
        duration[negative] = 0
        return start, start + np.where(known, duration, 0), known

    def _codes(self, events: Sequence[Event]) -> Array:
        names = self._names
        try:
            return np.array([names[event.name] for event in events], dtype=np.int32)
        except TypeError:  # a list or an object for a name
            return np.array([names[str(event.name)] for event in events], dtype=np.int32)

    def _thread_numbers(self, events: Sequence[Event]) -> Array:
        threads = self._threads
        try:
            return np.array([threads[event.pid, event.tid] for event in events], dtype=np.int64)
        except TypeError:
            return np.array([threads[str(event.pid), str(event.tid)] for event in events], dtype=np.int64)

    def _add_device(self, events: list[Event], kinds: list[int]) -> None:
        start, end, known = self._times(events)
        arguments = [event.args or NO_ARGUMENTS for event in events]
        names = self._codes(events)
        kind = np.array(kinds, dtype=np.uint8)
        rows_before = np.cumsum(known) - known
        for row, (args, code) in enumerate(zip(arguments, names.tolist(), strict=True)):
            if kinds[row] == _COPY:
                continue
            if args.collective is not None or (code >= 0 and is_communication(self.strings.values[code])):
                kind[row] = _COMMUNICATION
            if kind[row] == _COMMUNICATION and known[row]:
                self.collectives.append(("device", self._device_rows + int(rows_before[row]), args))
        columns = {
            "start_ns": start,
            "end_ns": end,
            "kind": kind,
            "device": whole(
                [e.pid if a.device is None else a.device for e, a in zip(events, arguments, strict=True)]
            ),
            "stream": whole([_stream(e, a) for e, a in zip(events, arguments, strict=True)]),
            "name": names,
            "bytes": whole([a.bytes for a in arguments]),
            "correlation": whole([a.correlation for a in arguments]),
        }
        self.device.append(_kept(columns, known))
        self._device_rows += int(np.count_nonzero(known))

    def _add_host(self, events: list[Event], kinds: list[int]) -> None:
        start, end, known = self._times(events)
        arguments = [event.args or NO_ARGUMENTS for event in events]
        text = self._texts
        columns = {
            "start_ns": start,
            "end_ns": end,
            "kind": np.array(kinds, dtype=np.uint8),
            "thread": self._thread_numbers(events),
            "name": self._codes(events),
            "module": np.array(
                [text[bytes(a.hierarchy)] if a.hierarchy else -1 for a in arguments], np.int32
            ),
            "correlation": whole([a.correlation for a in arguments]),
            "shapes": np.array([text[bytes(a.dimensions or a.old_dimensions)] for a in arguments], np.int32),
            "stack": np.array(
                [text[bytes(a.call_stack)] if a.call_stack else -1 for a in arguments], np.int32
            ),
        }
        self._mark_collectives(columns, arguments, known)
        self.host.append(_kept(columns, known))
        self._host_rows += int(np.count_nonzero(known))

    def _mark_collectives(self, columns: dict[str, Array], arguments: list[Arguments], known: Array) -> None:
        """Keep what collectives are made of: metadata, and the dtypes of annotations."""
        rows = self._host_rows + np.cumsum(known) - known
        metadata = self.strings.find("record_param_comms")
        for position in np.flatnonzero((columns["name"] == metadata) & known).tolist():
            self.collectives.append(("host", int(rows[position]), arguments[position]))
        for position in np.flatnonzero((columns["kind"] == _ANNOTATION) & known).tolist():
            if arguments[position].types:
                self.types[int(rows[position])] = bytes(arguments[position].types).decode("utf-8", "replace")

    def _add_memory(self, events: list[Event]) -> None:
        start, _, known = self._times(events)
        arguments = [event.args or NO_ARGUMENTS for event in events]
        on_host = np.array([a.device_type in (0, "0") for a in arguments])
        device = whole([a.device_id for a in arguments])
        columns = {
            "time_ns": start,
            "address": whole([a.address for a in arguments]),
            "bytes": whole([a.size for a in arguments]),
            "device": np.where(on_host, -1, device),
            "allocated_bytes": whole([a.allocated for a in arguments]),
            "reserved_bytes": whole([a.reserved for a in arguments]),
        }
        self.memory.append(_kept(columns, known))


def _stream(event: Event, arguments: Arguments) -> Any:
    if arguments.stream is not None:
        return arguments.stream
    thread = event.tid
    return thread.rsplit(" ", 1)[-1] if isinstance(thread, str) else thread


def _external(arguments: Arguments) -> Any:
    return arguments.old_external_id if arguments.external_id is None else arguments.external_id


def _kept(columns: dict[str, Array], known: Array) -> dict[str, Array]:
    return columns if known.all() else {name: column[known] for name, column in columns.items()}
