"""Mending the JSON that old writers produced, one chunk and then one event at a time.

Known faults: ``nan`` and ``inf`` printed by C++ streams, backslashes and quotes of kernel names and
call stacks left unescaped (torch 1.8 to 1.13), raw control characters, bytes that are not UTF-8,
commas too many. Everything is tried on text that failed to decode, never on text that did not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._kineto_events import DECODE_ERRORS, Event, decode_events, lenient_event

__all__ = ["BETWEEN_EVENTS", "Mended", "mend"]

#: The end of one object of an array and the start of the next.
BETWEEN_EVENTS = re.compile(rb"\}\s*,[\s,]*(?=\{)")

_CONTROL = bytes(range(32))
_SPACES = bytes.maketrans(_CONTROL, b" " * 32)
_NOT_A_NUMBER = re.compile(
    rb"([:\[,]\s*)[-+]?(?:nan(?:\(\w*\))?|inf(?:inity)?|1\.#\w+)(?=\s*[,\]}])", re.IGNORECASE
)
_HUGE = re.compile(rb"(:\s*)-?\d+(?:\.\d+)?[eE]\+?\d{3,}(?=\s*[,}])|(:\s*)-?\d{1000,}(?=\s*[,}])")
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.))', re.DOTALL)
_JOINED = 24  # pieces that are tried as one event at most
_LARGEST_EVENT_BYTES = 1 << 18  # beyond that it is no event but rubble, and every repair would cost seconds
_EVENT_START = re.compile(rb'\{\s*"(?:ph|name|cat)"\s*:')
_QUOTE = re.compile(rb'\\.|"', re.DOTALL)
#: After a quote that really ends a string comes one of these.
_AFTER_STRING = re.compile(
    rb'\s*(?::|\}|\]|$|,\s*(?:[\[{\d-]|true|false|null|"(?:[^"\\]|\\.){0,4000}"\s*[:,\]}]))'
)


@dataclass(slots=True)
class Mended:
    """What came out of a broken text; ``consumed`` bytes of it are done with."""

    events: list[Event] = field(default_factory=list)
    repaired: int = 0
    dropped: int = 0
    consumed: int = 0


def mend(text: bytes, final: bool = True) -> Mended:
    """Events of a text ``{…}, {…}`` that does not decode.

    Unless ``final``, more text follows: what is broken at the very end may be cut, and is not consumed.
    """
    result = Mended()
    bounds = [
        *((match.start() + 1, match.end()) for match in BETWEEN_EVENTS.finditer(text)),
        (len(text), len(text)),
    ]
    index, lost = 0, False
    while index < len(bounds):
        start = result.consumed
        events, changed, last = _mend_from(text, start, bounds, index)
        if not events and text[start : bounds[index][0]].strip(b" \t\r\n,"):
            if not final and bounds[min(index + _JOINED, len(bounds) - 1)][0] == len(text):
                break
            last = index
            piece = text[start : bounds[index][0]]
            events = _sound_within(piece)
            # What is left of an event that was given up begins in its middle and is not counted again.
            result.dropped += not lost or _EVENT_START.match(piece.lstrip(b" \t\r\n,")) is not None
            lost = True
        elif not final and bounds[last][0] == len(text):
            break
        else:
            lost = False
        result.events += events
        result.repaired += changed
        result.consumed = bounds[last][1]
        index = last + 1
    return result


def _mend_from(
    text: bytes, start: int, bounds: list[tuple[int, int]], index: int
) -> tuple[Sequence[Event], int, int]:
    """What begins at ``start``, how many of it were changed, and the boundary where it ends.

    The nearest boundary may lie in an array of objects inside the event; then one further on is the end.
    """
    for last in range(index, min(index + _JOINED, len(bounds))):
        piece = text[start : bounds[last][0]]
        if last > index and len(piece) > _LARGEST_EVENT_BYTES:
            break
        balanced = piece.count(b"{") <= piece.count(b"}")
        if last > index and not balanced:
            continue
        events, changed = _mend_piece(piece)
        if events or balanced:
            return events, changed, last
    return [], 0, index


def _sound_within(piece: bytes) -> list[Event]:
    """The sound events of a piece in which something between events is broken."""
    starts = [match.start() for match in _EVENT_START.finditer(piece)]
    events: list[Event] = []
    if len(starts) > 1:
        for start, end in zip(starts, [*starts[1:], len(piece)], strict=True):
            inner = piece[start:end]
            events += _mend_piece(inner[: inner.rfind(b"}") + 1])[0]
    return events


def _mend_piece(piece: bytes) -> tuple[Sequence[Event], int]:
    """What a piece holds, one event as a rule, and how many of them had to be changed."""
    attempt = piece.strip(b" \t\r\n,")
    repairs = (None, _lightly, _quoted) if len(attempt) < _LARGEST_EVENT_BYTES else (None,)
    for repair in repairs:
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


def _decoded(text: bytes) -> Sequence[Event] | None:
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
