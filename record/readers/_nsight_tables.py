"""Tables of an export into the model's: kernels and copies, runtime calls, waits, memory, metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import is_communication
from ..model import DEVICE_KINDS, HOST_KINDS, MISSING, Strings
from ._kineto_categories import host_kind_of_name
from ._nsight_database import Database

__all__ = [
    "Calls",
    "Work",
    "read_calls",
    "read_memory",
    "read_metrics",
    "read_waits",
    "read_work",
    "where_of",
]

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_COMPUTE, _COMMUNICATION, _COPY = range(len(DEVICE_KINDS))
_RUNTIME = HOST_KINDS.index("runtime")
_LATEST_NS = 1 << 61

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_WAITS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_RECORDS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"

#: ``ENUM_CUDA_MEMCPY_OPER``, in Kineto's words, so that runs compare across profilers.
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
           10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip
#: ``ENUM_CUDA_MEM_KIND``.
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
#: ``ENUM_CUPTI_SYNC_TYPE``.
_WAIT_KINDS = {1: "event_sync", 2: "stream_wait", 3: "stream_sync", 4: "device_sync"}

#: ``cudaLaunchKernel_v7000``: the interface's version is no part of the name.
_VERSION = re.compile(r"_v\d{3,6}$")
_LAMBDA = re.compile(r"\[(lambda\([^()]*(?:\([^()]*\)[^()]*)*\)) \(instance (\d+)\)\]")
_LITERAL = re.compile(r"\((int|unsigned int|long|unsigned long|short|char|unsigned char)\)(-?\d+)")
_SUFFIXES = {"unsigned int": "u", "long": "l", "unsigned long": "ul"}
#: Samples kept of each hardware metric: its means over so many stretches of the capture.
_MOST_SAMPLES = 2_000


@dataclass(slots=True)
class Work:
    """Device work as columns of the ``device`` table. ``broken`` counts rows whose times make no sense."""

    columns: Columns
    broken: int = 0
    graphs: int = 0


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


def _sound(columns: Columns) -> tuple[Columns, int]:
    """Rows whose start and end are times in order, and how many are not."""
    start, end = columns["start"], columns["end"]
    good = (np.abs(start) < _LATEST_NS) & (np.abs(end) < _LATEST_NS) & (end >= start)
    if good.all():
        return columns, 0
    return {name: column[good] for name, column in columns.items()}, int((~good).sum())


def _coded(numbers: Array, name_of: Callable[[int], str | None], strings: Strings) -> Array:
    """Text codes for a column of numbers, each distinct one named once; -1 for those without a name."""
    found, inverse = np.unique(numbers, return_inverse=True)
    codes = [-1 if number == MISSING else strings.code(name_of(number)) for number in found.tolist()]
    return np.array(codes, np.int64)[inverse].reshape(len(numbers))


# --- device work ---------------------------------------------------------------------------------


def read_work(database: Database, process: int | None, device: int | None, strings: Strings) -> Work:
    """Kernels, copies, memsets and whole graphs of a rank, in order of start."""
    parts, broken = [], 0
    graphs = 0
    for table, read in ((_KERNEL, _kernels), (_MEMCPY, _copies), (_MEMSET, _sets), (_GRAPH, _graphs)):
        if database.has(table, "start", "end"):
            columns, bad = read(database, where_of(database, table, process, device), strings)
            broken += bad
            parts.append(columns)
            if table == _GRAPH:
                graphs = len(columns["start_ns"])
    names = list(parts[0]) if parts else []
    whole = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if whole:
        _tell_contexts_apart(whole)
        order = np.argsort(whole["start_ns"], kind="stable")
        whole = {name: column[order] for name, column in whole.items()}
    return Work(whole, broken, graphs)


def _row_columns(
    raw: Columns,
    kind: Array | int,
    name: Array,
    size: Array | int = MISSING,
    blocks: Array | int = MISSING,
    threads: Array | int = MISSING,
) -> Columns:
    count = len(raw["start"])

    def full(value: Array | int) -> Array:
        return value if isinstance(value, np.ndarray) else np.full(count, value, np.int64)

    return {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "kind": full(kind),
        "device": np.where(raw["deviceId"] == MISSING, 0, raw["deviceId"]),
        "stream": np.where(raw["streamId"] == MISSING, 0, raw["streamId"]),
        "context": raw["contextId"],
        "name": name,
        "bytes": full(size),
        "correlation": raw["correlationId"],
        "grid_blocks": full(blocks),
        "block_threads": full(threads),
        "graph_node": raw["graphNodeId"],
    }


_PLACE = ("start", "end", "deviceId", "streamId", "contextId", "correlationId", "graphNodeId")


def _kernels(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    grid, block = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
    names = ("demangledName", "shortName", "mangledName")
    raw, broken = _sound(database.integers(_KERNEL, (*_PLACE, *names, *grid, *block), where))
    by_id = database.lookup("StringIds", "id", "value")

    def name_of(number: int) -> str | None:
        text = by_id(number)
        return kernel_name(text) if text else None

    code = _coded(raw["demangledName"], name_of, strings)
    for other in names[1:]:
        missing = code < 0
        if missing.any():
            code[missing] = _coded(raw[other][missing], name_of, strings)
    code[code < 0] = strings.code("unnamed kernel")
    kinds = np.full(len(code), _COMPUTE, np.int64)
    talking = [one for one in np.unique(code).tolist() if is_communication(strings.values[one])]
    kinds[np.isin(code, talking)] = _COMMUNICATION
    blocks, threads = _product(raw, grid), _product(raw, block)
    return _row_columns(raw, kinds, code, blocks=blocks, threads=threads), broken


def kernel_name(text: str) -> str:
    """A kernel's name as other profilers demangle it, so that runs compare across them:
    ``f<(int)4, (bool)1, a::[lambda(float) (instance 1)]>`` → ``f<4, true, a::{lambda(float)#1}>``."""
    text = (
        text.replace("(bool)0", "false")
        .replace("(bool)1", "true")
        .replace("<unnamed>", "(anonymous namespace)")
    )
    text = _LAMBDA.sub(r"{\1#\2}", text)
    text = _LITERAL.sub(lambda found: found[2] + _SUFFIXES.get(found[1], ""), text)
    return text.replace(" *", "*").replace(" &", "&")


def _product(raw: Columns, names: tuple[str, str, str]) -> Array:
    """The product of three sizes, MISSING where one is missing or absurd (a grid's sides end at 2^31)."""
    sides = np.stack([raw[name] for name in names])
    known = ((sides > 0) & (sides < 1 << 31)).all(axis=0)
    product = np.where(known, sides, 1).astype(np.float64).prod(axis=0)
    fits = known & (product < 1 << 62)
    return np.where(fits, np.where(fits, sides, 1).prod(axis=0), MISSING)


def _copies(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    raw, broken = _sound(
        database.integers(_MEMCPY, (*_PLACE, "copyKind", "srcKind", "dstKind", "bytes"), where)
    )
    kind, source, target = (np.clip(raw[name], -1, 62) for name in ("copyKind", "srcKind", "dstKind"))
    code = _coded((kind + 1) * 4096 + (source + 1) * 64 + target + 1, _copy_name, strings)
    return _row_columns(raw, _COPY, code, size=raw["bytes"]), broken


def _copy_name(packed: int) -> str:
    kind, source, target = packed // 4096 - 1, packed // 64 % 64 - 1, packed % 64 - 1
    ends = (
        f" ({_MEMORIES[source]} -> {_MEMORIES[target]})"
        if source in _MEMORIES and target in _MEMORIES
        else ""
    )
    return f"Memcpy {_COPIES.get(kind, 'Unknown')}{ends}"


def _sets(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    raw, broken = _sound(database.integers(_MEMSET, (*_PLACE, "memKind", "bytes"), where))
    kind = np.clip(raw["memKind"], -1, 62)
    code = _coded(kind, lambda one: f"Memset ({_MEMORIES[one]})" if one in _MEMORIES else "Memset", strings)
    return _row_columns(raw, _COPY, code, size=raw["bytes"]), broken


def _graphs(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    raw, broken = _sound(database.integers(_GRAPH, (*_PLACE, "graphId"), where))
    code = _coded(raw["graphId"], lambda one: f"CUDA graph {one}", strings)
    code[code < 0] = strings.code("CUDA graph")
    return _row_columns(raw, _COMPUTE, code), broken


def _tell_contexts_apart(columns: Columns) -> None:
    """Streams are numbered within a context: where two contexts use one number, the context goes in front."""
    context, stream = columns.pop("context"), columns["stream"]
    pairs = np.unique(np.column_stack((columns["device"], stream, context)), axis=0)
    if len(np.unique(pairs[:, :2], axis=0)) < len(pairs):
        known = (context > 0) & (context < 1 << 20) & (stream >= 0) & (stream < 1 << 40)
        columns["stream"] = np.where(known, context * (1 << 40) + stream, stream)


# --- host ----------------------------------------------------------------------------------------


def read_calls(database: Database, process: int | None, strings: Strings) -> Calls:
    """Runtime and driver calls of a process; those that block the host are waits."""
    if not database.has(_CALLS, "start", "end"):
        return Calls({})
    wanted = ("start", "end", "globalTid", "correlationId", "nameId")
    raw, broken = _sound(database.integers(_CALLS, wanted, where_of(database, _CALLS, process, None)))
    by_id = database.lookup("StringIds", "id", "value")

    def name_of(number: int) -> str | None:
        text = by_id(number)
        return None if text is None else _VERSION.sub("", text)

    code = _coded(raw["nameId"], name_of, strings)
    code[code < 0] = strings.code("unnamed call")
    kinds = np.full(len(code), _RUNTIME, np.int64)
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
    raw, _ = _sound(database.integers(_WAITS, wanted, where_of(database, _WAITS, process, None)))
    known = np.isin(raw["syncType"], list(_WAIT_KINDS))
    raw = {name: column[known] for name, column in raw.items()}
    if not known.any():
        return None
    no_stream = (raw["streamId"] < 0) | (raw["streamId"] >= 1 << 32) - 1
    no_event = (raw["eventId"] < 0) | (raw["eventId"] >= (1 << 32) - 1)
    columns = {
        "kind": _coded(raw["syncType"], _WAIT_KINDS.get, strings),
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
