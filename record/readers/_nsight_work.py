"""Device work of an export: kernels, copies, memsets and graphs that were recorded whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import is_communication
from ..model import DEVICE_KINDS, MISSING, Strings
from ._nsight_database import Database, constant, is_constant
from ._nsight_tables import Columns, coded, sound, where_of

__all__ = ["Work", "kernel_name", "read_work"]

Array = npt.NDArray[Any]

_COMPUTE, _COMMUNICATION, _COPY = range(len(DEVICE_KINDS))

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"

#: ``ENUM_CUDA_MEMCPY_OPER``, in Kineto's words, so that runs compare across profilers.
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
           10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip
#: ``ENUM_CUDA_MEM_KIND``.
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_LAMBDA = re.compile(r"\[(lambda\([^()]*(?:\([^()]*\)[^()]*)*\)) \(instance (\d+)\)\]")
_LITERAL = re.compile(r"\((int|unsigned int|long|unsigned long|short|char|unsigned char)\)(-?\d+)")
_SUFFIXES = {"unsigned int": "u", "long": "l", "unsigned long": "ul"}


@dataclass(slots=True)
class Work:
    """Device work as columns of the ``device`` table. ``broken`` counts rows whose times make no sense."""

    columns: Columns
    broken: int = 0
    graphs: int = 0


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
    whole = _joined([part for part in parts if len(part["start_ns"])] or parts[:1])
    if whole:
        _tell_contexts_apart(whole)
        start = whole["start_ns"]
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            for name, column in whole.items():
                whole[name] = column if is_constant(column) else column[order]
    return Work(whole, broken, graphs)


def _joined(parts: list[Columns]) -> Columns:
    """One array a column, the parts emptied on the way; what is one value in all parts stays one."""
    if len(parts) < 2:
        return parts[0] if parts else {}
    whole: Columns = {}
    rows = sum(len(part["start_ns"]) for part in parts)
    for name in list(parts[0]):
        columns = [part.pop(name) for part in parts]
        values = {column[0].item() for column in columns if is_constant(column)}
        if len(values) == 1 and all(is_constant(column) for column in columns):
            whole[name] = constant(columns[0][0], rows)
        else:
            whole[name] = np.concatenate(columns)
    return whole


def _row_columns(
    raw: Columns,
    kind: Array | int,
    name: Array,
    size: Array | int = MISSING,
    blocks: Array | int = MISSING,
    threads: Array | int = MISSING,
) -> Columns:
    rows = len(raw["start"])
    sizes = {"bytes": size, "grid_blocks": blocks, "block_threads": threads}
    return {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "kind": kind if isinstance(kind, np.ndarray) else constant(np.uint8(kind), rows),
        "device": _or_zero(raw["deviceId"]),
        "stream": _or_zero(raw["streamId"]),
        "context": raw["contextId"],
        "name": name,
        "correlation": raw["correlationId"],
        "graph_node": raw["graphNodeId"],
        **{
            key: value if isinstance(value, np.ndarray) else constant(np.int64(value), rows)
            for key, value in sizes.items()
        },
    }


def _or_zero(column: Array) -> Array:
    if is_constant(column):
        return constant(np.int64(0), len(column)) if len(column) and column[0] == MISSING else column
    return np.where(column == MISSING, 0, column)


_PLACE = ("start", "end", "deviceId", "streamId", "contextId", "correlationId", "graphNodeId")


def _kernels(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    grid, block = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
    names = ("demangledName", "shortName", "mangledName")
    raw, broken = sound(database.integers(_KERNEL, (*_PLACE, *names, *grid, *block), where))
    by_id = database.lookup("StringIds", "id", "value")

    def name_of(number: int) -> str | None:
        text = by_id(number)
        return kernel_name(text) if text else None

    code = coded(raw["demangledName"], name_of, strings)
    for other in names[1:]:
        missing = code < 0
        if missing.any():
            code[missing] = coded(raw[other][missing], name_of, strings)
    code[code < 0] = strings.code("unnamed kernel")
    kinds = np.full(len(code), _COMPUTE, np.uint8)
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
    if any(is_constant(raw[name]) for name in names):
        return constant(np.int64(MISSING), len(raw["start"]))
    sides = np.stack([raw[name] for name in names])
    known = ((sides > 0) & (sides < 1 << 31)).all(axis=0)
    product = np.where(known, sides, 1).astype(np.float64).prod(axis=0)
    fits = known & (product < 1 << 62)
    return np.where(fits, np.where(fits, sides, 1).prod(axis=0), MISSING)


def _copies(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    raw, broken = sound(
        database.integers(_MEMCPY, (*_PLACE, "copyKind", "srcKind", "dstKind", "bytes"), where)
    )
    kind, source, target = (np.clip(raw[name], -1, 62) for name in ("copyKind", "srcKind", "dstKind"))
    code = coded((kind + 1) * 4096 + (source + 1) * 64 + target + 1, _copy_name, strings)
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
    raw, broken = sound(database.integers(_MEMSET, (*_PLACE, "memKind", "bytes"), where))
    kind = np.clip(raw["memKind"], -1, 62)
    code = coded(kind, lambda one: f"Memset ({_MEMORIES[one]})" if one in _MEMORIES else "Memset", strings)
    return _row_columns(raw, _COPY, code, size=raw["bytes"]), broken


def _graphs(database: Database, where: str, strings: Strings) -> tuple[Columns, int]:
    raw, broken = sound(database.integers(_GRAPH, (*_PLACE, "graphId"), where))
    code = coded(raw["graphId"], lambda one: f"CUDA graph {one}", strings)
    code[code < 0] = strings.code("CUDA graph")
    return _row_columns(raw, _COMPUTE, code), broken


def _tell_contexts_apart(columns: Columns) -> None:
    """Streams are numbered within a context: where two contexts use one number, the context goes in front."""
    context, stream = columns.pop("context"), columns["stream"]
    if not len(context) or is_constant(context) or (context == context[0]).all():
        return
    pairs = np.unique(np.column_stack((columns["device"], stream, context)), axis=0)
    if len(np.unique(pairs[:, :2], axis=0)) < len(pairs):
        known = (context > 0) & (context < 1 << 20) & (stream >= 0) & (stream < 1 << 40)
        columns["stream"] = np.where(known, context * (1 << 40) + stream, stream)
