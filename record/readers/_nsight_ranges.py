"""NVTX ranges: what torch, NCCL and people annotate, as columns of the host table.

``torch.autograd.profiler.emit_nvtx`` and ``nsys --pytorch`` write operators as
``aten::mul, seq = 45328, op_id = 990726, sizes = [[2, 3]]``: the figures are taken off, so that one name stays
one name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model import HOST_KINDS, MISSING, Strings
from ._kineto_categories import host_kind_of_name
from ._nsight_database import Database
from ._nsight_payloads import NcclPayload, Payloads

__all__ = ["NCCL_CALL", "Ranges", "operator_name", "read_ranges"]

Array = npt.NDArray[Any]

_OPERATOR, _ANNOTATION = HOST_KINDS.index("operator"), HOST_KINDS.index("annotation")

#: ``ENUM_NSYS_EVENT_TYPE``: push/pop and start/end ranges, of NVTX and of NVTXT files.
_RANGES = (59, 60, 70, 71)
#: What follows an operator's name, in torch's order (``torch/csrc/profiler/util.cpp``, ``getNvtxStr``).
_FIGURES = re.compile(
    r"(?:, seq = (-?\d{1,18}))?(?:, op_id = (\d{1,18}))?(?:, sizes = (\[.*?\]))?(?:, input_op_ids = .*)?$",
    re.DOTALL,
)
_FIRST_FIGURE = (", seq = ", ", op_id = ", ", sizes = ")
#: One word, as operators and autograd's nodes are called; what holds blanks or dots is somebody's annotation.
_WORD = re.compile(r"[A-Za-z_][\w:<>]*$")
_OPERATORS = ("aten::", "c10d::", "autograd::engine::evaluate_function: ")
#: A NCCL call's own range, in NCCL's domain.
NCCL_CALL = re.compile(r"nccl[A-Z]\w*$")
#: Times beyond this are damage: Unix time comes to 2^61 in the year 2043.
_LATEST_NS = 1 << 61
_MOST_REMEMBERED = 1 << 18
#: Columns that are read, of the types of the host table.
_TYPES = {"start_ns": np.int64, "end_ns": np.int64, "thread": np.int64, "kind": np.uint8, "name": np.int32,
          "sequence": np.int64, "shapes": np.int32}  # fmt: skip
_COLUMNS = ("start", "end", "eventType", "globalTid", "domainId", "textId")


@dataclass(slots=True)
class Ranges:
    """Ranges of one process as columns of the ``host`` table. ``payloads`` is row → what NCCL said there;
    ``unfinished`` were never closed."""

    columns: dict[str, Array]
    payloads: dict[int, NcclPayload] = field(default_factory=dict)
    unfinished: int = 0

    def __len__(self) -> int:
        return len(self.columns["start_ns"])


def operator_name(text: str) -> tuple[str, int, str | None, bool]:
    """Name, autograd's sequence number, shapes, and whether torch wrote it: ``aten::mul, seq = 3`` → ``aten::mul``, 3."""
    for mark in _FIRST_FIGURE:
        place = text.find(mark)
        if place > 0:
            match = _FIGURES.match(text, place)
            if match is not None:
                return text[:place], int(match[1]) if match[1] else MISSING, match[3], True
    return text, MISSING, None, False


def read_ranges(database: Database, process: int | None, strings: Strings, payloads: Payloads) -> Ranges:
    """NVTX ranges of one process, or of all where ``process`` is ``None``."""
    reader = _Reader(database, strings, payloads)
    table = "NVTX_EVENTS"
    if not database.has(table, "start", "end"):
        return reader.result()
    where = ""
    if process is not None and database.has(table, "globalTid"):
        where = f"WHERE (globalTid & ~16777215) = {process}"
    others = ["text", *(name for name in ("binaryData", "jsonText") if database.has(table, name))]
    for numbers, extra in database.chunks(table, _COLUMNS, others, where):
        reader.add(numbers, dict(zip(others, extra, strict=True)))
    return reader.result()


class _Reader:
    def __init__(self, database: Database, strings: Strings, payloads: Payloads) -> None:
        self._strings = strings
        self._payloads = payloads
        self._by_id = database.lookup("StringIds", "id", "value")
        self._names: dict[str, tuple[int, int, int, int]] = {}
        self._ids: dict[int, tuple[int, int, int, int]] = {}
        self._parts: dict[str, list[Array]] = {name: [] for name in _TYPES}
        self._found: dict[int, NcclPayload] = {}
        self._rows = 0
        self._unfinished = 0

    def add(self, numbers: Array, extra: dict[str, tuple[Any, ...]]) -> None:
        start, end, event = numbers[:, 0], numbers[:, 1], numbers[:, 2]
        ranges = np.isin(event, _RANGES) | (event == MISSING)
        sound = (np.abs(start) < _LATEST_NS) & (np.abs(end) < _LATEST_NS) & (end >= start)
        self._unfinished += int((ranges & ~sound).sum())
        kept = np.flatnonzero(ranges & sound)
        texts, text_ids = extra["text"], numbers[:, 5].tolist()
        named = [self._named(texts[row], text_ids[row]) for row in kept.tolist()]
        known = np.array([one[0] >= 0 for one in named], dtype=bool)
        chosen = kept[known]
        self._take_payloads(chosen, extra)
        names, kinds, sequences, shapes = (
            zip(*(one for one in named if one[0] >= 0), strict=True) if len(chosen) else ((),) * 4
        )
        values = (start[chosen], end[chosen], numbers[chosen, 3], kinds, names, sequences, shapes)
        for (name, type_), column in zip(_TYPES.items(), values, strict=True):
            self._parts[name].append(np.array(column, dtype=type_))
        self._rows += len(chosen)

    def _take_payloads(self, rows: Array, extra: dict[str, tuple[Any, ...]]) -> None:
        blobs, texts = extra.get("binaryData"), extra.get("jsonText")
        if blobs is None and texts is None:
            return
        for place, row in enumerate(rows.tolist()):
            blob, text = blobs[row] if blobs else None, texts[row] if texts else None
            if blob is not None or text is not None:
                payload = self._payloads.decode(blob, text)
                if payload is not None:
                    self._found[self._rows + place] = payload

    def _named(self, text: Any, text_id: int) -> tuple[int, int, int, int]:
        """(name, kind, sequence, shapes) of a range; the name is -1 where it has none."""
        if isinstance(text, str):
            return self._parsed(text)
        if text_id == MISSING:
            return (-1, _ANNOTATION, MISSING, -1)
        known = self._ids.get(text_id)
        if known is None:
            found = self._by_id(text_id)
            known = (-1, _ANNOTATION, MISSING, -1) if found is None else self._parsed(found)
            if len(self._ids) >= _MOST_REMEMBERED:  # torch's texts differ by a number: each has an identity
                self._ids.clear()
            self._ids[text_id] = known
        return known

    def _parsed(self, text: str) -> tuple[int, int, int, int]:
        name, sequence, shapes, from_torch = operator_name(text)
        known = self._names.get(name)
        if known is None or known[3] != from_torch:
            operator = (from_torch and _WORD.match(name)) or name.startswith(_OPERATORS)
            kind = host_kind_of_name(name, _OPERATOR if operator else _ANNOTATION)
            known = self._names[name] = (self._strings.code(name), kind, 0, int(from_torch))
        return known[0], known[1], sequence, self._strings.code(shapes)

    def result(self) -> Ranges:
        columns = {}
        for name, type_ in _TYPES.items():
            parts = self._parts.pop(name)
            columns[name] = np.concatenate(parts) if parts else np.empty(0, type_)
            parts.clear()
        return Ranges(columns, self._found, self._unfinished)
