"""Frames: how tables lie in a file that may be cut off at any byte.

A file is a row of frames, each ``TRN1``, payload length (u32), CRC-32 of the payload (u32), payload; all
little-endian. A payload is one byte (0 plain, 1 zlib) and a msgpack map. A frame is good or it is not there:
a torn tail, the mark of a killed process, ends the reading without harm, and a damaged frame in the middle is
skipped to the next good one and counted.

Columns are stored narrow: a constant as itself, integers as their distance from the smallest in the fewest
bytes that hold it. Text columns are codes into strings that the file's own frames introduce, so that each
file can be read, or deleted, alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .model import MISSING, SCHEMAS

__all__ = [
    "LOST",
    "SCHEMA",
    "SCHEMA_VERSION",
    "TABLES",
    "FrameFile",
    "Frames",
    "decode_rows",
    "encode_frame",
    "read_frames",
    "read_frames_after",
]

#: 2: regions, and frames that say where their strings begin.
SCHEMA_VERSION = 2
#: Names the format in ``run.json``, ``rank.json`` and the first frame of every file.
SCHEMA = f"trine.record/{SCHEMA_VERSION}"

#: Tables of a record. A step lies as one part, or as several when gradients accumulate over several batches;
#: ``complete`` is 1 in the last part of a step.
TABLES: Mapping[str, Mapping[str, str]] = {
    "parts": {**SCHEMAS["steps"], "complete": "int64"},
    "collectives": SCHEMAS["collectives"],
    "samples": SCHEMAS["samples"],
    "regions": SCHEMAS["regions"],
    "microbatches": SCHEMAS["microbatches"],
}

#: Stands for a string that a damaged frame took with it; no name is this.
LOST = "\0"
#: Of strings lost at a time: more is damage, and must not make a reader allocate gigabytes.
_MOST_LOST = 1 << 20

_MAGIC = b"TRN1"
_HEADER = struct.Struct("<4sII")
_COMPRESS_ABOVE_BYTES = 256
#: No frame that we write comes near this; a damaged length must not make a reader allocate gigabytes.
_LARGEST_PAYLOAD_BYTES = 256 << 20

#: Rows of one frame take no bytes where a column is constant, so that a damaged number could ask for any memory.
_MOST_ROWS = 1 << 24

#: Enough for the first frame of a file, which says what it is.
_HEAD_BYTES = 1 << 16

Array = npt.NDArray[Any]


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """One frame that holds ``message`` (msgpack types only)."""
    body = msgspec.msgpack.encode(message)
    # Level 1: the background thread shares the cores with training, and zlib lets go of the GIL.
    payload = b"\x01" + zlib.compress(body, 1) if len(body) > _COMPRESS_ABOVE_BYTES else b"\x00" + body
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


@dataclass(slots=True)
class FrameFile:
    """The frames of one file. ``torn_bytes``: cut off at the end; ``damaged``: stretches skipped before it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    torn_bytes: int = 0
    damaged: int = 0


def read_frames(path: Path, limit: int | None = None) -> FrameFile:
    """Every good frame of ``path``, or the first ``limit``. Raises ``OSError`` when it cannot be read at all."""
    with path.open("rb") as file:
        data = file.read(_HEAD_BYTES if limit == 1 else -1)
    result = FrameFile()
    position = 0
    while position < len(data) and (limit is None or len(result.messages) < limit):
        message, following = _frame_at(data, position)
        if message is not None:
            result.messages.append(message)
            position = following
            continue
        found = _next_good(data, position + 1)
        if found < 0:
            result.torn_bytes = len(data) - position
            break
        result.damaged += 1
        position = found
    return result


def read_frames_after(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Good frames from byte ``position`` on, and where to go on from when the file has grown.

    A file that is still written may end in half a frame: it is read next time. Raises ``OSError``.
    """
    with path.open("rb") as stream:
        stream.seek(position)
        data = stream.read()
    messages: list[dict[str, Any]] = []
    offset = 0
    while offset < len(data):
        message, following = _frame_at(data, offset)
        if message is None:
            following = _next_good(data, offset + 1)
            if following < 0:
                break
        else:
            messages.append(message)
        offset = following
    return messages, position + offset


def _frame_at(data: bytes, position: int) -> tuple[dict[str, Any] | None, int]:
    if position + _HEADER.size > len(data):
        return None, position
    magic, length, checksum = _HEADER.unpack_from(data, position)
    start = position + _HEADER.size
    if magic != _MAGIC or not 0 < length <= _LARGEST_PAYLOAD_BYTES or start + length > len(data):
        return None, position
    payload = data[start : start + length]
    if zlib.crc32(payload) != checksum:
        return None, position
    try:
        message = msgspec.msgpack.decode(_inflated(payload[1:]) if payload[0] == 1 else payload[1:])
    except (zlib.error, msgspec.DecodeError):  # sound by its checksum, and yet none that we wrote
        return None, position
    return (message, start + length) if isinstance(message, dict) else (None, position)


def _inflated(data: bytes) -> bytes:
    """Raises ``zlib.error`` for what unpacks to more than any frame that we write."""
    unpacker = zlib.decompressobj()
    body = unpacker.decompress(data, _LARGEST_PAYLOAD_BYTES)
    if not unpacker.eof:
        raise zlib.error("cut, or larger than any frame")
    return body


def _next_good(data: bytes, position: int) -> int:
    while (position := data.find(_MAGIC, position)) >= 0:
        if _frame_at(data, position)[0] is not None:
            return position
        position += 1
    return -1


class Frames:
    """Encodes rows into frames of one file, and keeps that file's strings."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def head(self, kind: str, **about: Any) -> bytes:
        """The first frame of a file."""
        return encode_frame({"kind": kind, "schema": SCHEMA, **about})

    def rows(self, table: str, columns: Mapping[str, Sequence[Any] | Array]) -> bytes:
        """A frame with rows of ``table``; text columns are given as ``str | None``.

        Raises ``ValueError`` on unequal lengths and ``KeyError`` on a column that the table lacks.
        """
        schema = TABLES[table]
        lengths = {len(column) for column in columns.values()}
        if len(lengths) != 1:
            raise ValueError(f"columns of {table!r} differ in length: {sorted(lengths)}")
        new: list[str] = []
        known = len(self._codes)
        encoded: dict[str, Any] = {}
        for name, column in columns.items():
            kind = schema[name]
            if kind == "text":
                encoded[name] = _encode_integers(self._intern(column, new))
            elif kind == "float64":
                encoded[name] = _encode_floats(np.asarray(column, dtype=np.float64))
            else:
                encoded[name] = _encode_integers(np.asarray(column, dtype=np.int64))
        message = {"kind": "rows", "table": table, "rows": lengths.pop(), "strings": new, "columns": encoded}
        if new:
            message["strings_from"] = known
        return encode_frame(message)

    def _intern(self, values: Iterable[str | None], new: list[str]) -> Array:
        codes = self._codes
        result = []
        for value in values:
            if value is None:
                result.append(-1)
                continue
            code = codes.get(value)
            if code is None:
                code = codes[value] = len(codes)
                new.append(value)
            result.append(code)
        return np.array(result, dtype=np.int64)


def _encode_integers(column: Array) -> list[Any]:
    if len(column) == 0:
        return [0, 0, b""]
    low, high = int(column.min()), int(column.max())
    if low == high:
        return [0, low, b""]
    span = high - low  # a Python integer: MISSING beside a time would overflow int64
    for width, dtype in ((1, np.uint8), (2, np.uint16), (4, np.uint32)):
        if span < 1 << (8 * width):
            return [width, low, (column - low).astype(dtype).tobytes()]
    return [8, 0, column.astype(np.int64).tobytes()]


def _encode_floats(column: Array) -> list[Any]:
    if len(column) and (np.isnan(column).all() or (column == column[0]).all()):
        return [0, float(column[0]), b""]
    return [8, 0.0, column.tobytes()]


def decode_rows(message: Mapping[str, Any], strings: list[str]) -> dict[str, Array]:
    """Columns of a rows frame; text columns as codes into ``strings``, to which the frame's own were added.

    Columns that this version does not know are left out, and of a table that it does not know all; columns that the
    frame lacks are missing values. Strings that a damaged frame took with it are :data:`LOST`.
    Raises ``ValueError``, ``TypeError`` or ``KeyError`` on a frame that no recorder wrote.
    """
    lost = int(message.get("strings_from", len(strings))) - len(strings)
    if lost > _MOST_LOST:
        raise ValueError(f"a frame says that {lost} strings came before it")
    strings.extend([LOST] * lost)
    strings.extend(str(text) for text in message["strings"])
    rows = int(message["rows"])
    if not 0 <= rows <= _MOST_ROWS:
        raise ValueError(f"a frame of {rows} rows")
    result: dict[str, Array] = {}
    for name, kind in TABLES.get(message["table"], {}).items():
        encoded = message["columns"].get(name)
        if encoded is None:
            result[name] = _missing(name, kind, rows)
            continue
        width, base, data = encoded
        dtype: Any = np.float64 if kind == "float64" else np.int64
        if width == 0:
            result[name] = np.full(rows, base, dtype=dtype)
        elif width == 8:
            result[name] = np.frombuffer(data, dtype=dtype)
        else:
            narrow = np.frombuffer(data, dtype={1: np.uint8, 2: np.uint16, 4: np.uint32}[width])
            result[name] = narrow.astype(np.int64) + base
        if len(result[name]) != rows:
            raise ValueError(f"{len(result[name])} values of {name} in a frame of {rows} rows")
    return result


def _missing(name: str, kind: str, rows: int) -> Array:
    if kind == "float64":
        return np.full(rows, np.nan)
    default = -1 if kind == "text" or name in ("device_row", "host_row") else MISSING
    return np.full(rows, default, dtype=np.int64)
