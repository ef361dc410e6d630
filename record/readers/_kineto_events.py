"""What is decoded of an event, and nothing else: the typed structs that make reading fast and small.

Times and the texts that repeat (shapes, call stacks) stay raw JSON: times because a double would
round them, texts because most are seen again and need no second string.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DECODE_ERRORS", "NO_ARGUMENTS", "Arguments", "Event", "Facts", "decode_events", "lenient_event"]

#: Everything that msgspec raises on input that a stranger wrote.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)

_NOTHING = msgspec.Raw(b"")

_NAMES = {
    "external_id": "External id",
    "old_external_id": "external id",
    "dimensions": "Input Dims",
    "old_dimensions": "Input dims",
    "types": "Input type",
    "call_stack": "Call stack",
    "hierarchy": "Module Hierarchy",
    "address": "Addr",
    "size": "Bytes",
    "device_id": "Device Id",
    "device_type": "Device Type",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
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
}


class Arguments(msgspec.Struct, gc=False, rename=_NAMES):
    """``args`` of an event; whatever a writer put there, so every field is ``Any`` or raw."""

    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    external_id: Any = None
    old_external_id: Any = None
    dimensions: msgspec.Raw = _NOTHING
    old_dimensions: msgspec.Raw = _NOTHING
    types: msgspec.Raw = _NOTHING
    call_stack: msgspec.Raw = _NOTHING
    hierarchy: msgspec.Raw = _NOTHING
    address: Any = None
    size: Any = None
    device_id: Any = None
    device_type: Any = None
    allocated: Any = None
    reserved: Any = None
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


NO_ARGUMENTS = Arguments()


class Event(msgspec.Struct, gc=False):
    """One element of ``traceEvents``; ``ts`` and ``dur`` are the raw JSON numbers."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Arguments | None = None


class Facts(msgspec.Struct, gc=False):
    """What a trace says about itself, before or after its events."""

    traceEvents: list[Event] | None = None  # noqa: N815 the format's own name
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


_decoder = msgspec.json.Decoder(list[Event])


def decode_events(text: bytes) -> list[Event]:
    """Events of a JSON array. Raises one of :data:`DECODE_ERRORS`."""
    return _decoder.decode(text)


def lenient_event(text: bytes) -> Event | None:
    """An event whose fields have odd types, as far as it makes sense; ``None`` where it does not.

    Raises one of :data:`DECODE_ERRORS` where the text is no JSON at all.
    """
    value = msgspec.json.decode(text)
    if not isinstance(value, dict):
        return None
    arguments = value.get("args")
    kept = dict(value)
    if not isinstance(arguments, dict):
        kept["args"] = None
    return msgspec.json.decode(msgspec.json.encode(kept), type=Event)
