"""What is decoded of an event, and nothing else: the typed structs that make reading fast and small.

Times and the texts that repeat (shapes, call stacks) stay raw JSON: times because a double would
round them, texts because most are seen again and need no second string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

__all__ = [
    "DECODE_ERRORS",
    "CallArguments",
    "CollectiveArguments",
    "DeviceArguments",
    "Event",
    "ExactEvent",
    "Facts",
    "HostArguments",
    "LabelArguments",
    "MemoryArguments",
    "SyncArguments",
    "active_blocks",
    "arguments",
    "decode_events",
    "lenient_event",
]

#: Everything that msgspec raises on input that a stranger wrote.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)

_NOTHING = msgspec.Raw(b"")


class DeviceArguments(
    msgspec.Struct,
    gc=False,
    rename={
        "collective": "Collective name",
        "graph": "graph id",
        "graph_node": "graph node id",
        "achieved": "est. achieved occupancy %",
    },
):
    """``args`` of device work; whatever a writer put there, so every field is ``Any`` or raw."""

    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    collective: Any = None
    grid: msgspec.Raw = _NOTHING
    block: msgspec.Raw = _NOTHING
    graph: Any = None
    graph_node: Any = None
    achieved: Any = None
    occupancy: msgspec.Raw = _NOTHING


class HostArguments(
    msgspec.Struct,
    gc=False,
    rename={
        "dimensions": "Input Dims",
        "old_dimensions": "Input dims",
        "types": "Input type",
        "call_stack": "Call stack",
        "hierarchy": "Module Hierarchy",
        "sequence": "Sequence number",
        "forward_thread": "Fwd thread id",
    },
):
    """``args`` of operators and annotations."""

    dimensions: msgspec.Raw = _NOTHING
    old_dimensions: msgspec.Raw = _NOTHING
    types: msgspec.Raw = _NOTHING
    call_stack: msgspec.Raw = _NOTHING
    hierarchy: msgspec.Raw = _NOTHING
    sequence: Any = None
    forward_thread: Any = None
    flops: Any = None


class CallArguments(msgspec.Struct, gc=False):
    """``args`` of runtime and driver calls."""

    correlation: Any = None
    grid: msgspec.Raw = _NOTHING
    block: msgspec.Raw = _NOTHING


class SyncArguments(
    msgspec.Struct,
    gc=False,
    rename={
        "kind": "cuda_sync_kind",
        "xpu_kind": "Type",
        "source_stream": "wait_on_stream",
        "event": "wait_on_cuda_event_id",
        "source_correlation": "wait_on_cuda_event_record_corr_id",
        "recorded_event": "event_id",
    },
):
    """``args`` of ``cuda_sync``, ``cuda_event`` and ``xpu_sync``."""

    kind: Any = None
    xpu_kind: Any = None
    device: Any = None
    stream: Any = None
    correlation: Any = None
    source_stream: Any = None
    event: Any = None
    source_correlation: Any = None
    recorded_event: Any = None


class LabelArguments(msgspec.Struct, gc=False):
    """``args`` of the metadata events that name processes."""

    name: Any = None
    labels: Any = None


class MemoryArguments(
    msgspec.Struct,
    gc=False,
    rename={
        "address": "Addr",
        "bytes": "Bytes",
        "device": "Device Id",
        "device_type": "Device Type",
        "allocated": "Total Allocated",
        "reserved": "Total Reserved",
    },
):
    """``args`` of ``[memory]`` events."""

    address: Any = None
    bytes: Any = None
    device: Any = None
    device_type: Any = None
    allocated: Any = None
    reserved: Any = None


class CollectiveArguments(
    msgspec.Struct,
    gc=False,
    rename={
        "external_id": "External id",
        "old_external_id": "external id",
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
        "group": "Process Group Name",
        "old_group": "Process Group ID",
        "group_description": "Process Group Description",
        "group_ranks": "Process Group Ranks",
        "rank_start": "Global rank start",
        "rank_stride": "Global rank stride",
        "sequence": "Seq",
        "source_rank": "Src Rank",
        "destination_rank": "Dst Rank",
        "communicator": "Comms Id",
        "concrete": "Concrete Inputs",
    },
):
    """``args`` of communication kernels, ``record_param_comms``, sends and receives, decoded for those few alone."""

    external_id: Any = None
    old_external_id: Any = None
    collective: Any = None
    dtype: Any = None
    in_elements: Any = None
    out_elements: Any = None
    group_size: Any = None
    group: Any = None
    old_group: Any = None
    group_description: Any = None
    group_ranks: Any = None
    rank_start: Any = None
    rank_stride: Any = None
    sequence: Any = None
    source_rank: Any = None
    destination_rank: Any = None
    communicator: Any = None
    concrete: msgspec.Raw = _NOTHING


_Arguments = TypeVar(
    "_Arguments",
    DeviceArguments,
    HostArguments,
    CallArguments,
    SyncArguments,
    LabelArguments,
    MemoryArguments,
    CollectiveArguments,
)


class Event(msgspec.Struct, gc=False):
    """One element of ``traceEvents``; ``ts`` and ``dur`` are decoded numbers, ``args`` raw JSON."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = _NOTHING


class ExactEvent(Event, gc=False):
    """An event whose ``ts`` and ``dur`` are the raw JSON numbers, for where a double is not enough."""

    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING


class _Occupancy(msgspec.Struct, gc=False, rename={"active": "activeBlocksPerMultiprocessor"}):
    active: int = 0


def active_blocks(text: msgspec.Raw) -> int:
    """Blocks of a kernel that fit a multiprocessor at once, from ``occupancy``; 0 where it does not say."""
    try:
        return max(0, msgspec.json.decode(text, type=_Occupancy).active)
    except DECODE_ERRORS:
        return 0


def arguments(events: Sequence[Event], kind: type[_Arguments]) -> list[_Arguments]:
    """``args`` of events, in one go; of an event whose ``args`` make no sense, none."""
    texts = [event.args or b"{}" for event in events]
    try:
        return _decoders[kind].decode(b"[" + b",".join(texts) + b"]")  # type: ignore[no-any-return]
    except DECODE_ERRORS:
        return [_arguments_of_one(text, kind) for text in texts]


def _arguments_of_one(text: msgspec.Raw | bytes, kind: type[_Arguments]) -> _Arguments:
    try:
        return msgspec.json.decode(text, type=kind)
    except DECODE_ERRORS:
        return kind()


class Facts(msgspec.Struct, gc=False):
    """What a trace says about itself, before or after its events."""

    traceEvents: list[ExactEvent] | None = None  # noqa: N815 the format's own name
    schemaVersion: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815
    deviceProperties: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    host_name: Any = None
    trace_id: Any = None
    traceName: Any = None  # noqa: N815
    with_stack: Any = None
    record_shapes: Any = None
    profile_memory: Any = None
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    hip_runtime_version: Any = None


_decoders: dict[Any, Any] = {
    kind: msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
    for kind in (
        DeviceArguments,
        HostArguments,
        CallArguments,
        SyncArguments,
        LabelArguments,
        MemoryArguments,
        CollectiveArguments,
    )
}
_quick = msgspec.json.Decoder(list[Event])
_exact = msgspec.json.Decoder(list[ExactEvent])


def decode_events(text: bytes, exact: bool = True) -> Sequence[Event]:
    """Events of a JSON array. Raises one of :data:`DECODE_ERRORS`."""
    return _exact.decode(text) if exact else _quick.decode(text)


def lenient_event(text: bytes) -> Event | None:
    """An event whose fields have odd types, as far as it makes sense; ``None`` where it does not.

    Raises one of :data:`DECODE_ERRORS` where the text is no JSON at all.
    """
    value = msgspec.json.decode(text)
    return (
        msgspec.json.decode(msgspec.json.encode(value), type=ExactEvent) if isinstance(value, dict) else None
    )
