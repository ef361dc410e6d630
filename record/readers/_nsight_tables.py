"""Tables of an export beside device work: runtime calls, waits, memory, metrics; and how all are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model import HOST_KINDS, MISSING, Strings
from ._kineto_categories import host_kind_of_name
from ._nsight_database import Database

__all__ = [
    "Calls",
    "Columns",
    "coded",
    "read_calls",
    "read_memory",
    "read_metrics",
    "read_waits",
    "sound",
    "where_of",
]

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_RUNTIME = HOST_KINDS.index("runtime")
_LATEST_NS = 1 << 61

_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_WAITS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_RECORDS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"

#: ``ENUM_CUPTI_SYNC_TYPE``.
_WAIT_KINDS = {1: "event_sync", 2: "stream_wait", 3: "stream_sync", 4: "device_sync"}

#: ``cudaLaunchKernel_v7000``: the interface's version is no part of the name.
_VERSION = re.compile(r"_v\d{3,6}$")
#: Samples kept of each hardware metric: its means over so many stretches of the capture.
_MOST_SAMPLES = 2_000


@dataclass(slots=True)
class Calls:
    """Runtime calls as columns of the ``host`` table."""

    columns: Columns
    broken: int = 0


def where_of(database: Database, table: str, process: int | None, device: int | None) -> str:
    """The condition that picks a rank's rows, as far as the table has the columns."""
    conditions = []
    if process is not None and database.has(table, "globalPid"):
        conditions.append(f"globalPid = {process}")
    elif process is not None and database.has(table, "globalTid"):
        conditions.append(f"(globalTid & ~16777215) = {process}")
    if device is not None and database.has(table, "deviceId"):
        conditions.append(f"deviceId = {device}")
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def sound(columns: Columns) -> tuple[Columns, int]:
    """Rows whose start and end are times in order, and how many are not."""
    start, end = columns["start"], columns["end"]
    good = (end >= start) & (start > -_LATEST_NS) & (end < _LATEST_NS)
    if good.all():
        return columns, 0
    return {name: column[good] for name, column in columns.items()}, int((~good).sum())


def coded(numbers: Array, name_of: Callable[[int], str | None], strings: Strings) -> Array:
    """Text codes for a column of numbers, each distinct one named once; -1 for those without a name."""
    found, inverse = np.unique(numbers, return_inverse=True)
    codes = [-1 if number == MISSING else strings.code(name_of(number)) for number in found.tolist()]
    return np.array(codes, np.int32)[inverse].reshape(len(numbers))


# --- host ----------------------------------------------------------------------------------------


def read_calls(database: Database, process: int | None, strings: Strings) -> Calls:
    """Runtime and driver calls of a process; those that block the host are waits."""
    if not database.has(_CALLS, "start", "end"):
        return Calls({})
    wanted = ("start", "end", "globalTid", "correlationId", "nameId")
    raw, broken = sound(database.integers(_CALLS, wanted, where_of(database, _CALLS, process, None)))
    by_id = database.lookup("StringIds", "id", "value")

    def name_of(number: int) -> str | None:
        text = by_id(number)
        return None if text is None else _VERSION.sub("", text)

    code = coded(raw["nameId"], name_of, strings)
    code[code < 0] = strings.code("unnamed call")
    kinds = np.full(len(code), _RUNTIME, np.uint8)
    for one in np.unique(code).tolist():
        kind = host_kind_of_name(strings.values[one], _RUNTIME)
        if kind != _RUNTIME:
            kinds[code == one] = kind
    columns = {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "kind": kinds,
        "thread": raw["globalTid"],
        "name": code,
        "correlation": raw["correlationId"],
    }
    return Calls(columns, broken)


def read_waits(database: Database, process: int | None, strings: Strings) -> Columns | None:
    """Waits of the host for the device and of streams for events, with the call that recorded the event."""
    if not database.has(_WAITS, "start", "end", "syncType"):
        return None
    wanted = (
        "start",
        "end",
        "syncType",
        "deviceId",
        "streamId",
        "correlationId",
        "eventId",
        "eventSyncId",
    )
    raw, _ = sound(database.integers(_WAITS, wanted, where_of(database, _WAITS, process, None)))
    known = np.isin(raw["syncType"], list(_WAIT_KINDS))
    raw = {name: column[known] for name, column in raw.items()}
    if not known.any():
        return None
    no_stream = (raw["streamId"] < 0) | (raw["streamId"] >= 1 << 32) - 1
    no_event = (raw["eventId"] < 0) | (raw["eventId"] >= (1 << 32) - 1)
    columns = {
        "kind": coded(raw["syncType"], _WAIT_KINDS.get, strings),
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "device": raw["deviceId"],
        "stream": np.where(no_stream, MISSING, raw["streamId"]),
        "event": np.where(no_event, MISSING, raw["eventId"]),
        "correlation": raw["correlationId"],
    }
    _add_sources(database, process, raw, columns)
    return columns


def _add_sources(database: Database, process: int | None, raw: Columns, columns: Columns) -> None:
    """The last record of each awaited event before the wait: its stream and its call."""
    if not database.has(_RECORDS, "timestamp", "eventId"):
        return
    wanted = ("timestamp", "eventId", "eventSyncId", "streamId", "correlationId")
    records = database.integers(_RECORDS, wanted, where_of(database, _RECORDS, process, None))
    if not len(records["eventId"]):
        return
    # eventSyncId numbers the records of one event, where there is one; else the last record counts.
    numbered = bool((records["eventSyncId"] > 0).any() and (raw["eventSyncId"] > 0).any())
    second = "eventSyncId" if numbered else "timestamp"
    order = np.lexsort((records[second], records["eventId"]))
    keys = _pairs(records["eventId"][order], records[second][order])
    asked = _pairs(columns["event"], raw["eventSyncId"] if numbered else raw["start"])
    place = np.searchsorted(keys, asked, side="right") - 1
    row = order[np.maximum(place, 0)]
    found = (place >= 0) & (records["eventId"][row] == columns["event"])
    if numbered:
        found &= records["eventSyncId"][row] == raw["eventSyncId"]
    columns["source_stream"] = np.where(found, records["streamId"][row], MISSING)
    columns["source_correlation"] = np.where(found, records["correlationId"][row], MISSING)


def _pairs(first: Array, second: Array) -> Array:
    """Two columns as one that sorts by the first, then by the second."""
    pairs = np.empty(len(first), dtype=[("first", np.int64), ("second", np.int64)])
    pairs["first"], pairs["second"] = first, second
    return pairs


# --- memory and metrics --------------------------------------------------------------------------


def read_memory(
    database: Database, process: int | None, device: int | None, strings: Strings
) -> Columns | None:
    """Device memory that was allocated and released through CUDA (``--cuda-memory-usage``).

    Under PyTorch these are the segments of its caching allocator, so they count as reserved.
    """
    if not database.has(_MEMORY, "start", "bytes", "memoryOperationType"):
        return None
    wanted = ("start", "bytes", "memoryOperationType", "memKind", "address", "deviceId", "streamId")
    raw = database.integers(_MEMORY, wanted, where_of(database, _MEMORY, process, device))
    operation, kind, size = raw["memoryOperationType"], raw["memKind"], raw["bytes"]
    on_device = np.isin(kind, (MISSING, 2, 3, 4, 5, 6)) & (size >= 0) & (size < 1 << 50)
    kept = on_device & np.isin(operation, (0, 1)) & (np.abs(raw["start"]) < _LATEST_NS)
    if not kept.any():
        return None
    order = np.flatnonzero(kept)[np.argsort(raw["start"][kept], kind="stable")]
    operation, size = operation[order], size[order]
    change = np.where(operation == 0, size, -size)
    running = np.cumsum(change)
    codes = np.array([strings.code("segment_alloc"), strings.code("segment_free")], np.int64)
    return {
        "time_ns": raw["start"][order],
        "address": raw["address"][order],
        "bytes": change,
        "device": np.where(raw["deviceId"][order] == MISSING, 0, raw["deviceId"][order]),
        "reserved_bytes": running - min(0, int(running.min())),
        "action": codes[operation],
        "stream": raw["streamId"][order],
    }


def read_metrics(database: Database, device: int | None, strings: Strings) -> Columns | None:
    """Hardware metrics that were sampled (``--gpu-metrics-devices``), as means over stretches of the capture."""
    table, names = "GPU_METRICS", "TARGET_INFO_GPU_METRICS"
    if not database.has(table, "timestamp", "typeId", "metricId", "value"):
        return None
    # The lowest byte of the type is the number of the GPU.
    mine = f"WHERE (typeId & 255) = {device}" if device is not None else ""
    bounds = database.ask(table, f"SELECT MIN(timestamp), MAX(timestamp) FROM {table} {mine}")
    if not bounds or not all(isinstance(value, int) for value in bounds[0]):
        return None
    first, last = bounds[0]
    stretch = max((last - first) // _MOST_SAMPLES, 1)
    query = (
        f"SELECT metricId, CAST(AVG(timestamp) AS INTEGER), AVG(value) FROM {table} {mine} "
        f"GROUP BY metricId, (timestamp - {first}) / {stretch}"
    )
    named = {row[0]: row[1] for row in database.rows(names, ("metricId", "metricName"))}
    rows = [
        (time, _metric_name(named.get(metric), metric), value)
        for metric, time, value in database.ask(table, query)
        if isinstance(time, int) and isinstance(value, int | float)
    ]
    if not rows:
        return None
    return {
        "time_ns": np.array([row[0] for row in rows], np.int64),
        "metric": np.array([strings.code(row[1]) for row in rows], np.int64),
        "value": np.array([row[2] for row in rows], np.float64),
    }


def _metric_name(name: Any, number: Any) -> str:
    """``SMs Active [Throughput %]`` → ``gpu/sms_active_throughput_percent``."""
    text = str(name if name is not None else f"metric {number}").lower().replace("%", "percent")
    return "gpu/" + re.sub(r"[^a-z0-9]+", "_", text).strip("_")
