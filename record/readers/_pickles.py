"""Pickles of strangers, opened without running anything.

PyTorch writes memory snapshots and flight recorder dumps as pickles, and a pickle is a program: it may
name any function and have it called. :func:`load` admits builtin containers and scalars and refuses
everything else by name, before anything is looked up.

Refusing names is not enough: a few hundred bytes can also ask for gigabytes (a memo index of four
billion, a million empty sets) or for years (a dictionary key of nested pairs, each the same object
twice, whose hash is worked out anew for each). So the opcodes are walked first (:func:`_walk`), most
of them by one regular expression at C speed:

- a memo index that no honest writer can have reached is refused;
- where tuples may lie in tuples, :mod:`._pickle_stream` reads the file, which looks at every key; else the
  unpickler of C, which takes a tenth of the time.

Opcodes and their arguments: Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import io
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnreadableInput

__all__ = [
    "MOST_UNPACKED_BYTES",
    "OTHER_OPCODES",
    "PLAIN_KEYS",
    "damaged",
    "load",
    "most_memos",
    "read_bytes",
    "refuse_hollow",
    "refused",
]

#: A gzip file of more than this is not unpacked; the largest snapshots in use are a few hundred MB.
MOST_UNPACKED_BYTES = 2 << 30

#: What empty containers may take beside the file itself: four times its bytes and this.
_SPARE_BYTES = 64 << 20

_PIECE_BYTES = 1 << 20

#: A memoised object takes at least six bytes of the file by the time that its index needs four.
_BYTES_A_MEMO, _FREE_MEMOS = 6, 1024

#: Tuples that may lie in each other: the hash of the last costs at most 3 to the power of their number.
_MOST_NESTED = 10

_SHORT_LONG = (
    rb"\x8a(?:" + b"|".join(rb"\x%02x.{%d}" % (n, n) for n in (6, 8, 5, 7, 0, 1, 2, 3, 4, 9)) + rb")"
)
_NUMBER = rb"K.|M..|J.{4}|G.{8}|" + _SHORT_LONG
_FETCH = rb"h.|j.{4}"
_MORE = rb"q.|\x80.|\x95.{8}|r..\x00\x00"

#: Harmless opcodes of fixed length, as many as there are.
_RUN = re.compile(
    rb"(?:(?:%s)++|[]}()\x94eua01s\x8f\x90\x91ldN\x88\x89]++|%s|%s)++" % (_FETCH, _NUMBER, _MORE), re.DOTALL
)

_SCALAR = rb"N|\x88|\x89|" + _NUMBER

#: The same, slower, with the tuples that cannot lie in each other: of scalars, or of anything memoised where
#: the tuple itself is not memoised.
_RUN_OF_TUPLES = re.compile(
    rb"(?:(?:%s){8}(?![\x85-\x87])|" % _FETCH
    + b"".join(
        rb"(?:%s){%d}%s|(?:%s|%s){%d}%s(?![\x94qrp])|" % (_SCALAR, n, op, _SCALAR, _FETCH, n, op)
        for n, op in ((2, rb"\x86"), (1, rb"\x85"), (3, rb"\x87"))
    )
    + rb"[]}()\x94eua01s\x8f\x90\x91ld]|%s|%s|%s)++" % (_SCALAR, _FETCH, _MORE),
    re.DOTALL,
)

#: Opcode → bytes of its length prefix; the counted bytes follow it.
_COUNTED = {
    **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES = frozenset(b"ILSVFgp")  # the argument ends with the line
_TUPLES = frozenset(b"\x85\x86\x87t")
_NAMES = frozenset(b"ci\x93")  # they name what is to be imported
OTHER_OPCODES = {
    ord("R"): "REDUCE (a call)",
    ord("b"): "BUILD (an object's state)",
    ord("o"): "OBJ (an object)",
    ord("P"): "PERSID (an object elsewhere)",
    ord("Q"): "BINPERSID (an object elsewhere)",
    0x81: "NEWOBJ (an object)",
    0x92: "NEWOBJ_EX (an object)",
    0x82: "EXT1 (a registered class)",
    0x83: "EXT2 (a registered class)",
    0x84: "EXT4 (a registered class)",
    0x97: "NEXT_BUFFER (memory elsewhere)",
    0x98: "READONLY_BUFFER (memory elsewhere)",
}


#: Types of keys whose hash costs nothing.
PLAIN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked where they are gzip.

    Raises ``UnreadableInput`` where it cannot be read or unpacks to more than :data:`MOST_UNPACKED_BYTES`.
    """
    try:
        data = path.read_bytes()
        if data[:2] != b"\x1f\x8b":
            return data
        unpacker = zlib.decompressobj(wbits=31)
        unpacked = unpacker.decompress(data, MOST_UNPACKED_BYTES)
    except (OSError, zlib.error, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreadableInput(f"cannot read {path}: {reason}") from None
    if unpacker.unconsumed_tail:
        most = MOST_UNPACKED_BYTES >> 30
        raise UnreadableInput(
            f"{path} unpacks to more than {most} GiB; unpack it yourself if it is what you meant"
        )
    return unpacked


def load(data: bytes, where: str) -> Any:
    """The plain data in a pickle: dict, list, tuple, set, frozenset, bytes, bytearray, str, int, float, bool, None.

    ``where`` names the source in errors. Raises ``UnreadableInput`` with one line where the pickle asks for
    anything else, is damaged or cut, or would take memory or time out of all proportion to its size.
    """
    try:
        refuse_hollow(data, where)
        nested = _walk(data, where)
        if nested > _MOST_NESTED:
            from ._pickle_stream import stream  # it looks at every key

            return stream(data, where, lambda found, replace: found)
        # A reader that can be peeked at spares the unpickler a call for each opcode.
        return _Fast(io.BufferedReader(io.BytesIO(data), 1 << 16), where).load()
    except UnreadableInput:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged stream makes of the unpickler
        raise damaged(where, error) from None


def damaged(where: str, why: Exception | str) -> UnreadableInput:
    """What to say of a pickle that cannot be read to its end."""
    reason = " ".join(str(why).split())[:200] or type(why).__name__
    return UnreadableInput(f"{where} is damaged or cut, or is no pickle ({reason}); copy or write it again")


def most_memos(size: int) -> int:
    """The largest memo index that an honest writer can reach in so many bytes."""
    return size // _BYTES_A_MEMO + _FREE_MEMOS


def refused(where: str, what: str) -> UnreadableInput:
    """What to say of a pickle that asks for more than plain data."""
    shown = "".join(c if c.isprintable() else "?" for c in what)[:200]
    return UnreadableInput(
        f"{where} is not opened: it refuses {shown}, since such a file holds plain data only"
    )


def _out_of_proportion(where: str, what: str) -> UnreadableInput:
    return UnreadableInput(
        f"{where} is not opened: it asks for {what} out of proportion to its size; write it again"
    )


def refuse_hollow(data: bytes, where: str) -> None:
    """Refuse what is mostly empty containers: of a byte each in the file, up to 216 in memory."""
    count = np.zeros(256, dtype=np.int64)
    for start in range(0, len(data), _PIECE_BYTES):  # counting takes eight bytes a byte
        piece = np.frombuffer(data[start : start + _PIECE_BYTES], dtype=np.uint8)
        count += np.bincount(piece, minlength=256)
    marks = int(count[ord("(")])
    takes = 72 * int(count[ord("]")]) + 64 * int(count[ord("}")]) + 216 * int(count[0x8F])
    takes += 72 * min(marks, int(count[ord("l")] + count[ord("d")])) + 216 * min(marks, int(count[0x91]))
    takes += 16 * (marks + int(count[[ord("N"), ord(")"), 0x88, 0x89]].sum()))
    if takes > 4 * len(data) + _SPARE_BYTES:
        raise _out_of_proportion(where, f"{takes >> 20} MiB for empty containers")


def _walk(data: bytes, where: str) -> int:
    """How many tuples may lie in one another. Raises ``UnreadableInput`` where an opcode is refused.

    Ends at the first name: the unpickler stops there, having done nothing else, and says which it is.
    """
    place, size, nested, run = 0, len(data), 0, _RUN.match
    largest_memo = most_memos(size)
    while place < size:
        start = place
        if (match := run(data, place)) is not None:
            place = match.end()
            if place < size and data[place] in _TUPLES and (match := _RUN_OF_TUPLES.match(data, start)):
                place = match.end()
            if place >= size:
                break
        opcode = data[place]
        if (prefix := _COUNTED.get(opcode)) is not None:
            length = int.from_bytes(data[place + 1 : place + 1 + prefix], "little")
            place += 1 + prefix + length
        elif opcode in _TUPLES:
            # A tuple of any number of things counts for as many levels as would cost the same.
            nested += 1 if opcode != ord("t") else _MOST_NESTED + 1
            place += 1
        elif opcode in _LINES:
            end = data.find(b"\n", place)
            if end < 0:
                break  # cut: the unpickler says so
            if opcode == ord("p") and _number(data[place + 1 : end]) > largest_memo:
                raise _out_of_proportion(where, "a memo index")
            place = end + 1
        elif opcode == ord("r"):
            if int.from_bytes(data[place + 1 : place + 5], "little") > largest_memo:
                raise _out_of_proportion(where, "a memo index")
            place += 5
        elif opcode == ord("2"):  # DUP: another way to the same object
            nested += _MOST_NESTED + 1
            place += 1
        elif opcode == ord(".") or opcode in _NAMES:
            break
        elif opcode in OTHER_OPCODES:
            raise refused(where, f"the opcode {OTHER_OPCODES[opcode]}")
        else:
            break  # no opcode, or one without all of its bytes: the unpickler says so
    return nested


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        return 0  # the unpickler refuses it


class _Fast(pickle.Unpickler):
    """The unpickler of C, which looks nothing up."""

    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        raise refused(self._where, f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise refused(self._where, "an object that lies elsewhere (persistent id)")
