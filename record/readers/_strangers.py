"""Names files of other tools, so that a refusal says what they are: known formats that no reader reads yet."""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["name_of"]

_HEAD_BYTES = 1 << 16

#: What all must stand in the head → what the file is. First match wins.
_MARKS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"SQLite format 3\x00",), "an SQLite database, as Nsight Systems exports"),
    ((b'"fwd_start"',), "timings of a pipeline schedule"),
    ((b"device_traces",), "a PyTorch memory snapshot"),
    ((b"segments", b"blocks"), "a PyTorch memory snapshot"),
)


def name_of(path: Path) -> str | None:
    """What a file is, in words (``a flight recorder dump``); of a folder, what its first known file is. Never raises."""
    try:
        if path.is_dir():
            inside = (each for each in sorted(path.rglob("*"))[:1000] if each.is_file())
            return next((name for each in inside if (name := _name_of_file(each))), None)
        return _name_of_file(path) if path.is_file() else None
    except OSError:
        return None


def _name_of_file(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return None
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16 text (convert it to UTF-8)"
    if head[:2] == b"\x1f\x8b":
        return "a gzip file within a gzip file (unpack it once)"
    if head[:4] == b"PK\x03\x04":
        return "a zip archive (unpack it)"
    return next((name for marks, name in _MARKS if all(mark in head for mark in marks)), None)
