"""The files of a flight recorder: what a dump is, how its text becomes plain values, which world it tells of."""

from __future__ import annotations

import ast
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UnreadableInput
from ._names import MOST_RANKS
from ._pickle_stream import stream
from ._pickles import load, read_bytes

__all__ = [
    "head_of",
    "is_dump",
    "is_pickle",
    "ranks_of_text",
    "read_dump",
    "shapes_text",
    "stack_text",
    "types_text",
    "whole_number",
]

_HEAD_BYTES = 1 << 16
#: A pickle from this size on is read piece by piece: whole, a dump takes twenty times its bytes.
_LARGE_BYTES = 2 << 20
_CONTAINERS = (dict, list, tuple, set, frozenset)
#: Dumps name a frame once for each stack that it is in, and nothing else twice: a few times their bytes in full.
_MOST_TIMES_WRITTEN_OUT = 64
_GZIP = b"\x1f\x8b"
#: What only an entry of a flight recorder has; the oldest wrote ``seq_id``.
_MARKS = (b"collective_seq_id", b"profiling_name", b"time_created_ns", b"pg_status", b"seq_id")


def head_of(path: Path) -> bytes:
    """The first 64 KiB, unpacked where the file is gzip; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head[:2] == _GZIP:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return b""
    return head


def is_pickle(head: bytes) -> bool:
    """Whether bytes begin as a pickle of protocol 2 or later does."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def is_dump(head: bytes) -> bool:
    """Whether the beginning of a file is a flight recorder's: its entries, or its account of the groups."""
    if not (is_pickle(head) or head.lstrip()[:1] in (b"{", b"[")) or b"traceEvents" in head:
        return False
    if b"pg_config" in head and b"version" in head and (b"entries" in head or b"pg_status" in head):
        return True
    return sum(mark in head for mark in _MARKS) >= 2 and b"record_id" in head


def read_dump(path: Path) -> tuple[dict[str, Any], bool]:
    """A dump as plain values, and whether it was cut off (then with the entries that are complete).

    Raises ``UnreadableInput`` with one line.
    """
    data = read_bytes(path)
    if not data:
        raise UnreadableInput(f"{path} is empty: the rank was stopped before it could write its dump")
    if is_pickle(data[:2]):
        value: Any = (
            load(data, str(path))
            if len(data) < _LARGE_BYTES
            else stream(data, str(path), _Shrinking().finished)
        )
        if isinstance(value, _CONTAINERS):
            _refuse_repetition(value, len(data), str(path))
        cut = False
    else:
        value, cut = _json(data, path)
    if isinstance(value, list):  # before version 2 the dump was the bare list of entries
        value = {"entries": value}
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), (list, tuple)):
        raise UnreadableInput(
            f"{path} is no flight recorder dump (no list of entries); give the file that TORCH_FR_DUMP_TEMP_FILE names"
        )
    return value, cut


class _Shrinking:
    """Entries of a dump as they are read: a stack becomes one text, and so do shapes and types, each kept once."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def finished(self, found: dict[Any, Any], replace: Callable[[Any, Any], None]) -> Any:
        """What stands for a dictionary of the dump that is complete."""
        if "filename" in found and "line" in found:
            return self._once(frame_text(found))
        for key, write in (("frames", stack_text), ("input_sizes", shapes_text), ("output_sizes", shapes_text),
                           ("input_dtypes", types_text), ("output_dtypes", types_text)):  # fmt: skip
            value = found.get(key)
            if isinstance(value, list):
                text = write(value)
                found[key] = None if text is None else self._once(text)
        return found

    def _once(self, text: str) -> str:
        return self._texts.setdefault(text, text)


def _plain(value: Any) -> str:
    """A scalar as text. Of what is nested the text could take for ever: a pickle may name one list many times."""
    return "?" if isinstance(value, (dict, list, tuple, set, frozenset)) else str(value)


def _refuse_repetition(value: Any, size: int, where: str) -> None:
    """Refuse what a pickle of ``size`` bytes names over and over, or within itself: written out it would never end.

    Each container is looked at once; what it would come to in full is the sum of its members'.
    """
    most = _MOST_TIMES_WRITTEN_OUT * size + (1 << 20)
    full: dict[int, int] = {}
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        each, entered = waiting.pop()
        members = (*each.keys(), *each.values()) if isinstance(each, dict) else tuple(each)
        inner = [member for member in members if isinstance(member, _CONTAINERS)]
        if not entered:
            if id(each) in full:
                continue
            full[id(each)] = most + 1  # until it is known: whoever meets it meanwhile lies within it
            waiting.append((each, True))
            waiting.extend((member, False) for member in inner if id(member) not in full)
            continue
        texts = sum(len(member) >> 6 for member in members if isinstance(member, str))
        full[id(each)] = 1 + len(members) + texts + sum(full[id(member)] for member in inner)
        if full[id(each)] > most:
            raise UnreadableInput(
                f"{where} is not opened: it names the same lists over and over, out of proportion to its size; write it again"
            )


def frame_text(frame: dict[Any, Any]) -> str:
    """``file(line): function``, as Kineto writes a frame of its stacks."""
    filename, line, name = (_plain(frame.get(key, "?")) for key in ("filename", "line", "name"))
    return f"{filename}({line}): {name}"


def stack_text(frames: Any) -> str | None:
    """Frames, innermost first, with semicolons between them; None for none."""
    if isinstance(frames, str):
        return frames or None
    if not isinstance(frames, (list, tuple)):
        return None
    lines = [frame_text(frame) if isinstance(frame, dict) else frame for frame in frames]
    return ";".join(line for line in lines if isinstance(line, str)) or None


def shapes_text(value: Any) -> str | None:
    """``[4, 8], [2]``: a shape a tensor; None for what holds no shapes."""
    if not isinstance(value, (list, tuple)):
        return value if isinstance(value, str) else None
    shapes = (
        "[" + ", ".join(map(_plain, shape)) + "]" for shape in value if isinstance(shape, (list, tuple))
    )
    return ", ".join(shapes)


def types_text(value: Any) -> str | None:
    """``Float, Half``: a dtype a tensor."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else None


def _json(data: bytes, path: Path) -> tuple[Any, bool]:
    text = data.decode("utf-8", errors="replace")
    try:
        return json.loads(text), False
    except RecursionError:
        raise UnreadableInput(f"{path} is nested too deeply for a dump; check the file") from None
    except ValueError as error:
        entries = _complete_entries(text)
        if entries:
            return {"entries": entries}, True
        raise UnreadableInput(
            f"{path} is not valid JSON ({error}) and holds no complete entry; copy it again"
        ) from None


def _complete_entries(text: str) -> list[Any]:
    """The entries of a text that ends or breaks within them."""
    begin = text.find('"entries"')
    position = text.find("[", begin) + 1 if begin >= 0 else 0
    decoder = json.JSONDecoder()
    entries: list[Any] = []
    while position > 0:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    return entries


def ranks_of_text(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"`` (so does PyTorch write a group's ranks) or a list; empty where it says none."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value) if len(value) < 1 << 20 else ()
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return ()
    if not isinstance(value, (list, tuple)):
        return ()
    ranks = [whole_number(each) for each in value]
    return tuple(sorted({rank for rank in ranks if rank is not None and 0 <= rank < MOST_RANKS}))


def whole_number(value: Any) -> int | None:
    """An integer of 64 bits from what a dump holds: an int, or digits in a string (JSON's ``pg_status``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if -(2**63) < number < 2**63 else None
