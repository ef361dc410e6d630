"""Mending the JSON that old writers produced, one chunk and then one event at a time.

Known faults: ``nan`` and ``inf`` printed by C++ streams, backslashes and quotes of kernel names and
call stacks left unescaped (torch 1.8 to 1.13), raw control characters, bytes that are not UTF-8,
commas too many. Everything is tried on text that failed to decode, never on text that did not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._kineto_events import DECODE_ERRORS, Event, decode_events, lenient_event

__all__ = ["BETWEEN_EVENTS", "mend", "pieces"]

#: The end of one object of an array and the start of the next.
BETWEEN_EVENTS = re.compile(rb"\}\s*,[\s,]*(?=\{)")

_CONTROL = bytes(range(32))
_SPACES = bytes.maketrans(_CONTROL, b" " * 32)
_NOT_A_NUMBER = re.compile(
    rb"([:\[,]\s*)[-+]?(?:nan(?:\(\w*\))?|inf(?:inity)?|1\.#\w+)(?=\s*[,\]}])", re.IGNORECASE
)
_HUGE = re.compile(rb"(:\s*)-?\d+(?:\.\d+)?[eE]\+?\d{3,}(?=\s*[,}])|(:\s*)-?\d{1000,}(?=\s*[,}])")
_BAD_ESCAPE = re.compile(rb"\\(u(?![0-9a-fA-F]{4})|[^\"\\/bfnrtu])")
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.))', re.DOTALL)
#: After a quote that really ends a string comes one of these.
_AFTER_STRING = re.compile(rb'\s*(?::|\}|\]|$|,\s*(?:["\[{\d-]|true|false|null))')


def mend(text: bytes) -> tuple[list[Event], int, int]:
    """Events of a chunk ``{…}, {…}`` that does not decode: the events, how many were repaired, how many given up."""
    light = _lightly(text)
    events = _decoded(light)
    if events is not None:
        return events, _difference(text, light), 0
    events, repaired, dropped = [], 0, 0
    for piece in pieces(text):
        event, changed = _mend_one(piece)
        if event is None:
            dropped += bool(piece.strip(b" \t\r\n,"))
        else:
            events.append(event)
            repaired += changed
    return events, repaired, dropped


def pieces(text: bytes) -> Iterator[bytes]:
    """The objects of ``{…}, {…}``, each as text; a cut inside an object is healed by joining."""
    start = 0
    for match in BETWEEN_EVENTS.finditer(text):
        end = match.start() + 1
        piece = text[start:end]
        if not _closed(piece) and end - start < 1 << 16:
            continue  # an array of objects inside the event
        yield piece
        start = match.end()
    yield text[start:]


def _closed(piece: bytes) -> bool:
    """Whether the brackets of an object balance, strings left aside as far as they can be told."""
    bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", piece, flags=re.DOTALL)
    return bare.count(b"{") <= bare.count(b"}")


def _mend_one(piece: bytes) -> tuple[Event | None, bool]:
    piece = piece.strip(b" \t\r\n,")
    for changed, attempt in ((False, piece), (True, _lightly(piece)), (True, _quoted(_lightly(piece)))):
        events = _decoded(attempt)
        if events is not None:
            return (events[0] if events else None), changed
        try:
            event = lenient_event(attempt)
        except DECODE_ERRORS:
            continue
        return event, True
    return None, True


def _decoded(text: bytes) -> list[Event] | None:
    try:
        return decode_events(b"[" + text + b"]")
    except DECODE_ERRORS:
        return None


def _lightly(text: bytes) -> bytes:
    """Repairs that cannot change the meaning of sound JSON around the fault."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        text = text.decode("utf-8", "replace").encode()
    text = text.translate(_SPACES)
    text = _NOT_A_NUMBER.sub(rb"\1null", text)
    text = _HUGE.sub(lambda match: (match[1] or match[2]) + b"null", text)
    if b"\\" in text:
        text = _ESCAPE.sub(lambda match: b"\\" + match[0] if match[1] is not None else match[0], text)
    return re.sub(rb",[\s,]*(?=[,}\]])", b"", text)


def _quoted(text: bytes) -> bytes:
    """Escapes the quotes inside strings: those after which neither ``:``, ``,`` nor a bracket follows."""
    out = bytearray()
    inside = False
    position = 0
    while position < len(text):
        byte = text[position : position + 1]
        if inside and byte == b"\\":
            out += text[position : position + 2]
            position += 2
            continue
        if byte == b'"':
            if not inside:
                inside = True
            elif _AFTER_STRING.match(text, position + 1):
                inside = False
            else:
                out += b"\\"
        out += byte
        position += 1
    return bytes(out)


def _difference(before: bytes, after: bytes) -> int:
    """How many events of a chunk a repair touched: at least one."""
    flat = before.translate(_SPACES)
    if len(flat) == len(after):
        return max(1, sum(a != b for a, b in zip(pieces(flat), pieces(after), strict=False)))
    return max(
        1, len(_NOT_A_NUMBER.findall(flat)) + len(_HUGE.findall(flat)) + len(_BAD_ESCAPE.findall(flat))
    )
