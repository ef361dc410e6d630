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
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.))', re.DOTALL)
_EVENT_START = re.compile(rb'\{\s*"(?:ph|name|cat)"\s*:')
_QUOTE = re.compile(rb'\\.|"', re.DOTALL)
#: After a quote that really ends a string comes one of these.
_AFTER_STRING = re.compile(
    rb'\s*(?::|\}|\]|$|,\s*(?:[\[{\d-]|true|false|null|"(?:[^"\\]|\\.){0,4000}"\s*[:,\]}]))'
)


def mend(text: bytes) -> tuple[list[Event], int, int]:
    """Events of a chunk ``{…}, {…}`` that does not decode: the events, how many were repaired, how many given up."""
    events: list[Event] = []
    repaired = dropped = 0
    for piece in pieces(text):
        found, changed = _mend_piece(piece)
        if not found and piece.strip(b" \t\r\n,"):
            found = _sound_within(piece)
            dropped += 1
        events += found
        repaired += changed
    return events, repaired, dropped


def _sound_within(piece: bytes) -> list[Event]:
    """The sound events of a piece in which something between events is broken."""
    starts = [match.start() for match in _EVENT_START.finditer(piece)]
    events: list[Event] = []
    if len(starts) > 1:
        for start, end in zip(starts, [*starts[1:], len(piece)], strict=True):
            inner = piece[start:end]
            events += _mend_piece(inner[: inner.rfind(b"}") + 1])[0]
    return events


def pieces(text: bytes) -> Iterator[bytes]:
    """The objects of ``{…}, {…}``, each as text; a cut inside an object is healed by joining a few."""
    start = joined = 0
    for match in BETWEEN_EVENTS.finditer(text):
        piece = text[start : match.start() + 1]
        if joined < 16 and not _closed(piece):
            joined += 1
            continue  # an array of objects inside the event
        yield piece
        start, joined = match.end(), 0
    yield text[start:]


def _closed(piece: bytes) -> bool:
    """Whether the brackets of an object balance, strings left aside as far as they can be told."""
    if piece.count(b"{") <= piece.count(b"}"):
        return True
    bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", piece, flags=re.DOTALL)
    return bare.count(b"{") <= bare.count(b"}")


def _mend_piece(piece: bytes) -> tuple[list[Event], int]:
    """What a piece holds, one event as a rule, and how many of them had to be changed."""
    attempt = piece.strip(b" \t\r\n,")
    for repair in (None, _lightly, _quoted):
        attempt = repair(attempt) if repair else attempt
        events = _decoded(attempt)
        if events is not None:
            return events, len(events) if repair else 0
        try:
            event = lenient_event(attempt)
        except DECODE_ERRORS:
            continue
        return ([event], 1) if event is not None else ([], 0)
    return [], 0


def _decoded(text: bytes) -> list[Event] | None:
    try:
        return decode_events(b"[" + text + b"]")
    except DECODE_ERRORS:
        return None


def _lightly(text: bytes) -> bytes:
    """Repairs of what no JSON parser takes; a text inside a string that looks the same is changed with it."""
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
    out = []
    inside = False
    start = 0
    for match in _QUOTE.finditer(text):
        if match[0] != b'"':
            continue  # an escape
        end = match.start()
        if not inside:
            inside = True
        elif _AFTER_STRING.match(text, end + 1):
            inside = False
        else:
            out.append(text[start:end] + b"\\")
            start = end
    return b"".join(out) + text[start:]
