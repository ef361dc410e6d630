"""Where collectives come from: the C++ observer, or a slower way that every installation has.

    source               sees                                        start   end     cost of one
    observer             everything, C++ included                    yes     yes     about 3 µs
    python (no library)  what Python calls on a process group        issue   yes     about 10 µs
                         and, from the flight recorder, what C++     no      no      about 20 µs, read later
                         issues (DDP's reducer)

:func:`open_source` picks the first that works here, starts a build of the observer for the next run when
there is none, and lets the record say so. On NCCL neither has starts and ends (see ``docs/collectives.md``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trine.record.model import MISSING

from .flight import FlightEntry, FlightReader
from .groups import global_rank, group_name, process_groups
from .observer import ObserverSource
from .observer_build import ensure_built, why_not_built
from .protocols import CollectiveSource, Note
from .spelling import standard_operation

__all__ = ["NoSource", "PythonSource", "open_source"]


def open_source(note: Note, prefer: str | None = None) -> CollectiveSource:
    """The best source that works in this process; never raises.

    ``prefer="python"`` passes the observer by: for comparing them.
    """
    try:
        import torch.distributed

        if not torch.distributed.is_available():
            return NoSource()
    except ImportError:
        return NoSource()
    if prefer == "python":
        return PythonSource(note)
    library = ensure_built(wait=False)
    reason = why_not_built() if library is None else ""
    if library is not None:
        try:
            return ObserverSource(library, note)
        except OSError as error:
            reason = f"the C++ observer cannot be loaded ({error})"
    note(
        "collectives-python",
        "info",
        f"collectives were observed from Python, not by the C++ observer: {reason}. Those that C++ issues (DDP) come "
        "from PyTorch's flight recorder, without start and end",
    )
    return PythonSource(note)


class NoSource:
    """For a torch without distributed: there are no collectives."""

    name = "none"

    def start(self) -> None:
        """Do nothing."""

    def drain(self) -> Mapping[str, Sequence[Any]]:
        """No rows."""
        return {}

    def stop(self) -> None:
        """Do nothing."""


#: Methods of ``ProcessGroup`` that start a collective; those that this torch lacks are passed over.
_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)

#: Which argument holds what goes in and what comes out, by operation; others give one tensor list.
_SIDES = {
    "all_gather": (1, 0),
    "reduce_scatter": (1, 0),
    "all_to_all": (1, 0),
    "gather": (1, 0),
    "scatter": (1, 0),
}


class _Call:
    """One call on a process group. Filled in by the caller's thread, ended by the backend's."""

    __slots__ = (
        "begun_ns",
        "done",
        "dtype",
        "ended_ns",
        "entry",
        "given",
        "group",
        "made",
        "operation",
        "peer",
        "returned_ns",
    )

    def __init__(self, operation: str, group: str | None) -> None:
        self.operation = operation
        self.group = group
        self.begun_ns = time.perf_counter_ns()
        self.returned_ns = self.ended_ns = self.given = self.made = self.peer = MISSING
        self.dtype: str | None = None
        self.entry: FlightEntry | None = None
        self.done = False


class PythonSource:
    """Wraps the methods of ``ProcessGroup`` and reads the flight recorder.

    The start of a call is taken to be its issue: right where nothing else is queued on its group.
    """

    name = "python"
    #: Ends that have not come after this are given up (some works offer no future: gloo's reduce-scatter).
    PATIENCE_NS = 1_000_000_000

    def __init__(self, note: Note) -> None:
        self._note = note
        self._flight = FlightReader(share=0.01)
        self._calls: list[_Call] = []
        self._guard = threading.Lock()
        self._originals: dict[str, Any] = {}
        self._enqueued = 0
        self._stopped = False
        self._until_ns = 1 << 62
        self._said = False
        self._fault: str | None = None
        self._said_fault = False

    def start(self) -> None:
        """Wrap the methods."""
        from torch._C._distributed_c10d import ProcessGroup

        for method in _METHODS:
            # From the class's own dictionary: getattr would give what is bound to nothing and cannot be put back.
            original = vars(ProcessGroup).get(method)
            if original is not None:
                self._originals[method] = original
                setattr(ProcessGroup, method, self._wrapped(getattr(ProcessGroup, method), method))
        process_groups()
        self._flight.read()
        self._flight.allow_next()
        self._enqueued = self._flight.enqueued() or 0

    def stop(self) -> None:
        """Put the methods back, unless somebody wrapped them after us."""
        from torch._C._distributed_c10d import ProcessGroup

        for method, original in self._originals.items():
            if getattr(getattr(ProcessGroup, method), "_trine", None) is self:
                setattr(ProcessGroup, method, original)
        self._originals = {}
        self._stopped = True
        self._until_ns = time.time_ns()

    def _wrapped(self, original: Any, method: str) -> Callable[..., Any]:
        operation = standard_operation(method)

        def collective(group: Any, *arguments: Any, **named: Any) -> Any:
            call = _Call(operation, group_name(group))
            try:
                work = original(group, *arguments, **named)
            finally:
                call.returned_ns = time.perf_counter_ns()
            self._finish(call, group, [*arguments, *named.values()], work)
            return work

        collective._trine = self  # type: ignore[attr-defined]
        collective.__name__ = method
        return collective

    def _finish(self, call: _Call, group: Any, arguments: list[Any], work: Any) -> None:
        """Note sizes and ask to be told of the end. A fault here costs a detail of a row, never the call."""
        try:
            _measure(call, group, arguments)
            if work is not None and call.operation not in ("send", "recv"):

                def ended(_: Any) -> None:
                    call.ended_ns = time.perf_counter_ns()
                    call.done = True

                work.get_future().add_done_callback(ended)
        except Exception as error:  # noqa: BLE001 - it is the user's call; some backends lack futures
            self._fault = f"{call.operation}: {error}"
        with self._guard:
            self._calls.append(call)

    def drain(self) -> Mapping[str, Sequence[Any]]:
        """Ended calls, and what the flight recorder knows beyond them."""
        self._tell_fault()
        ready = self._ready()
        process_groups()
        behind = time.time_ns() - time.perf_counter_ns()
        beyond: list[FlightEntry] = []
        entries = self._entries()
        with self._guard:
            known = [*ready, *self._calls]
        for entry in entries:
            call = _call_of(entry, known, behind)
            if call is None:
                beyond.append(entry)
            else:
                call.entry = entry
        rows = [_row_of_call(call) for call in ready]
        rows += [_row_of_entry(entry, behind) for entry in beyond]
        if not rows:
            return {}
        return {
            name: _column([row[position] for row in rows], name) for position, name in enumerate(_COLUMNS)
        }

    def _tell_fault(self) -> None:
        if self._fault is not None and not self._said_fault:
            self._said_fault = True
            told = " ".join(self._fault.split())[:200]
            self._note(
                "collectives-ends", "info", f"sizes or ends of some collectives are not known ({told})"
            )

    def _ready(self) -> list[_Call]:
        """Calls that ended, or never will be seen to."""
        now = time.perf_counter_ns()
        with self._guard:
            ready = [
                call
                for call in self._calls
                if call.done or self._stopped or now - call.returned_ns > self.PATIENCE_NS
            ]
            chosen = {id(call) for call in ready}
            self._calls = [call for call in self._calls if id(call) not in chosen]
        return ready

    def _entries(self) -> list[FlightEntry]:
        """New entries of the flight recorder, when reading it is worth its cost or it is about to wrap."""
        if not self._flight.available and not self._said:
            self._said = True
            self._note(
                "collectives-incomplete",
                "warning",
                "PyTorch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0) and the C++ observer is absent: "
                "collectives that C++ issues, DDP's among them, are not in this record",
            )
        enqueued = self._flight.enqueued()
        fresh = 0 if enqueued is None else enqueued - self._enqueued
        if fresh <= 0 or not (self._stopped or fresh > 1000 or self._flight.due()):
            return []
        self._enqueued = enqueued or 0
        entries = [e for e in self._flight.read() if not e.is_p2p and e.time_created_ns <= self._until_ns]
        if self._flight.lost:
            self._note(
                "collectives-dropped",
                "warning",
                f"{self._flight.lost} collectives left PyTorch's flight recorder before they were read",
            )
            self._flight.lost = 0
        return entries


_COLUMNS = (
    "operation",
    "group",
    "sequence",
    "peer",
    "in_bytes",
    "out_bytes",
    "bytes",
    "dtype",
    "issued_ns",
    "start_ns",
    "end_ns",
    "state",
)
_TEXT = frozenset({"operation", "group", "dtype", "state"})


def _column(values: list[Any], name: str) -> Sequence[Any]:
    return values if name in _TEXT else np.array(values, dtype=np.int64)  # type: ignore[return-value]


def _measure(call: _Call, group: Any, arguments: list[Any]) -> None:
    """Bytes, dtype and peer of a call from its arguments."""
    import torch

    if call.operation in ("send", "recv"):
        peer = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else None
        found = None if peer is None else global_rank(group, peer)
        call.peer = MISSING if found is None else found
    tensors = [_flat(argument, torch.Tensor) for argument in arguments[:2]]
    one, other = _SIDES.get(call.operation, (0, 0))
    given = tensors[one] if one < len(tensors) else []
    made = tensors[other] if other < len(tensors) else []
    call.given = sum(tensor.nbytes for tensor in given)
    call.made = sum(tensor.nbytes for tensor in made)
    some = given or made
    call.dtype = str(some[0].dtype).removeprefix("torch.") if some else None


def _flat(value: Any, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item, kind)]
    return []


def _call_of(entry: FlightEntry, calls: Sequence[_Call], behind: int) -> _Call | None:
    """The call inside which an entry was made."""
    at = entry.time_created_ns - behind
    operation = standard_operation(entry.operation)
    best: _Call | None = None
    for call in calls:
        # The two clocks are compared to within some microseconds.
        inside = call.begun_ns - _CLOCKS_NS <= at <= call.returned_ns + _CLOCKS_NS
        # gloo runs a reduce-scatter as an all-reduce, and says so.
        same = operation == call.operation or call.operation == "reduce_scatter"
        free = call.entry is None and call.group in (None, entry.group)
        if inside and same and free and (best is None or _distance(call, at) < _distance(best, at)):
            best = call
    return best


_CLOCKS_NS = 100_000


def _distance(call: _Call, at: int) -> int:
    return max(call.begun_ns - at, at - call.returned_ns, 0)


def _row_of_call(call: _Call) -> tuple[Any, ...]:
    entry = call.entry
    sequence = MISSING if entry is None else entry.collective_seq_id
    group = call.group if entry is None else entry.group
    done = call.ended_ns != MISSING
    size = call.made if call.operation == "all_gather" else call.given
    start = call.begun_ns if done else MISSING
    state = "completed" if done else "issued"
    return (
        call.operation,
        group,
        sequence,
        call.peer,
        call.given,
        call.made,
        size,
        call.dtype,
        call.begun_ns,
        start,
        call.ended_ns,
        state,
    )


def _row_of_entry(entry: FlightEntry, behind: int) -> tuple[Any, ...]:
    operation = standard_operation(entry.operation)
    given, made = entry.in_bytes, entry.out_bytes
    size = made if operation == "all_gather" else given
    issued = entry.time_created_ns - behind
    known = (operation, entry.group, entry.collective_seq_id, MISSING, given, made, size, entry.dtype, issued)
    return (*known, MISSING, MISSING, "issued")
