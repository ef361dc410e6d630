"""torch's words for collectives, types and groups → ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..model import MISSING, Group

__all__ = [
    "EVENT_RECORD",
    "bytes_of",
    "dtype_of",
    "groups_of",
    "integer_of",
    "operation_of_call",
    "ranks_of",
    "sync_kind",
    "text_of",
]

#: torch's scalar type names, as c10 prints them in metadata ("Float") and in "Input type" ("c10::Half").
_DTYPES = {
    "float": ("float32", 4),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "double": ("float64", 8),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "complexfloat": ("complex64", 8),
    "complex<float>": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "complex<double>": ("complex128", 16),
}

#: What torch calls a collective in metadata, annotations and operators → the one name used here.
_OPERATIONS = (
    (re.compile(r"all_?reduce"), "all_reduce"),
    (re.compile(r"reduce_?scatter"), "reduce_scatter"),
    (re.compile(r"all_?gather"), "all_gather"),
    (re.compile(r"all_?to_?all"), "all_to_all"),
    (re.compile(r"broadcast"), "broadcast"),
    (re.compile(r"barrier"), "barrier"),
    (re.compile(r"reduce"), "reduce"),
    (re.compile(r"gather"), "gather"),
    (re.compile(r"scatter"), "scatter"),
    (re.compile(r"recv"), "recv"),
    (re.compile(r"send"), "send"),
)
_NOT_COLLECTIVES = ("init", "wait", "start_coalescing", "end_coalescing", "wait_tensor", "monitored")


def operation_of_call(name: str) -> str | None:
    """``all_reduce`` of ``allreduce_coalesced``, ``_allgather_base``, ``all_to_allv`` and the like."""
    name = name.lower()
    if name.lstrip("_").startswith(_NOT_COLLECTIVES):
        return None
    for pattern, operation in _OPERATIONS:
        if pattern.search(name):
            return operation
    return name.strip("_") or None


def dtype_of(name: str) -> tuple[str | None, int]:
    """torch's name of a scalar type and its size in bytes; ``(None, 0)`` when unknown."""
    return _DTYPES.get(name.lower().removeprefix("c10::"), (None, 0))


def bytes_of(operation: str | None, in_bytes: int, out_bytes: int) -> int:
    """Bytes of a call as nccl-tests counts them, MISSING where unknown.

    All-gather's output, reduce-scatter's and all-to-all's input, the sender's and the receiver's own
    buffer, else the buffer (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    if operation in ("all_gather", "recv", "gather"):
        return out_bytes
    if operation in ("reduce_scatter", "all_to_all", "send", "scatter", "reduce"):
        return in_bytes
    return out_bytes if in_bytes in (MISSING, 0) else in_bytes


#: CUPTI's names of waits (``cuda_sync_kind``) and PTI's (``Type`` of ``xpu_sync``) → ours. Kineto's
#: "Context Sync" is cudaDeviceSynchronize. A GPU barrier holds back what comes after it in its queue.
_SYNC_KINDS = {
    "stream wait event": "stream_wait",
    "event sync": "event_sync",
    "stream sync": "stream_sync",
    "context sync": "device_sync",
    "device sync": "device_sync",
    "gpu_barrier_execution": "stream_wait",
    "gpu_barrier_memory": "stream_wait",
    "host_event": "event_sync",
    "host_fence": "stream_sync",
    "host_command_list": "stream_sync",
    "host_command_queue": "stream_sync",
}
#: Not a wait: where an event was recorded. It completes the waits for that event and is then left out.
EVENT_RECORD = "event_record"


def sync_kind(name: Any, category: Any = None) -> str | None:
    """The kind of a wait by the profiler's name for it; ``None`` of one that is not known."""
    if str(category).lower() == "cuda_event":
        return EVENT_RECORD
    return _SYNC_KINDS.get(str(name).strip().lower())


def integer_of(value: Any) -> int:
    if type(value) is int and abs(value) < 2**62:
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    return MISSING


def text_of(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def ranks_of(value: Any, size: int = MISSING, start: int = MISSING, stride: int = MISSING) -> tuple[int, ...]:
    """Global ranks of a group from a list or from its text; ``()`` when they cannot be known.

    Long lists are cut with "..." by the writer; then first rank and stride give them back.
    """
    if isinstance(value, list):
        found = [rank for rank in value if type(rank) is int]
        if len(found) == len(value):
            return tuple(found)
    text = value if isinstance(value, str) else ""
    numbers = tuple(int(number) for number in re.findall(r"\d{1,9}", text))
    cut = "..." in text or (size > 0 and len(numbers) != size)
    if numbers and not cut:
        return numbers
    if 0 < size <= 1 << 20 and start != MISSING and start >= 0 and stride != MISSING and stride > 0:
        return tuple(range(start, start + size * stride, stride))
    return ()


def groups_of(distributed: Any, seen: Iterable[tuple[str, str | None, tuple[int, ...]]]) -> tuple[Group, ...]:
    """Process groups: those of ``distributedInfo.pg_config``, completed by those that collectives name."""
    groups: dict[str, Group] = {}
    configured = distributed.get("pg_config") if isinstance(distributed, dict) else None
    for entry in configured if isinstance(configured, list) else ():
        if not isinstance(entry, dict) or entry.get("pg_name") is None:
            continue
        name = str(entry["pg_name"])
        description = text_of(entry.get("pg_desc"))
        ranks = ranks_of(entry.get("ranks"), integer_of(entry.get("pg_size")))
        groups[name] = Group(name, name, description, ranks)
    for (name, description, ranks), _ in Counter(seen).most_common():
        known = groups.get(name)
        if known is None or not known.ranks:
            groups[name] = Group(name, name, description or (known.description if known else None), ranks)
    return tuple(groups.values())
