"""A trace as a stream of decoded chunks: never the whole file in memory, never an event twice.

A file of a few hundred megabytes is cut between events, a few megabytes at a time, so that memory
stays flat. A cut is proved by decoding: an object that was cut inside cannot be valid JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..errors import UnreadableInput
from ._kineto_events import DECODE_ERRORS, Event, Facts, decode_events
from ._kineto_repair import BETWEEN_EVENTS, Mended, mend

__all__ = ["Chunk", "Findings", "Readable", "TraceStream", "blocks"]

CHUNK_BYTES = 2 << 20  # small enough to stay in the cache, which halves the time
_HEAD_LIMIT_BYTES = 64 << 20
#: Elements that are no events, and ten times as many as are, after which a file is given up.
_MOST_DROPPED = 20_000
#: No event comes near this; without a bound a small gzip file could ask for any amount of memory.
_LARGEST_ELEMENT_BYTES = 32 << 20
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST = re.compile(rb"\s*\[")
_OBJECT = re.compile(rb"\s*\{")
_CLOSING = re.compile(rb"[\s,]*\]\s*(?:,(?P<rest>[\s\S]*)|\}?\s*)\Z")
#: A likely cut: the end of an object, then the start of an event.
_BEFORE_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s)"\s*:)')
_END_OF_EVENTS = re.compile(
    rb"[\]}][\s,]*\](?=\s*,\s*\"(?:traceName|displayTimeUnit|baseTimeNanoseconds|distributedInfo|deviceProperties|"
    rb"schemaVersion|trace_id|host_name|[a-z_]+_version|with_\w+|record_shapes|profile_memory|metadata)\"\s*:)"
)
_facts = msgspec.json.Decoder(Facts)


@dataclass(slots=True)
class Findings:
    """What was wrong with a file and mended, in numbers."""

    repaired: int = 0
    dropped: int = 0
    truncated: bool = False
    damaged: str | None = None  # of the compression
    tail_lost: bool = False


class Readable(Protocol):
    """What is read of a file."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end."""


def blocks(file: Readable, findings: Findings, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The bytes of a file, decompressed when it is gzip (by content, not by name); what a broken one still gives."""
    first = file.read(size)
    if first[:2] != b"\x1f\x8b":
        while first:
            yield first
            first = file.read(size)
        return
    yield from _inflate(first, file, findings, size)


def _inflate(compressed: bytes, file: Readable, findings: Findings, size: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    while compressed:
        before = decoder.copy()
        try:
            data = decoder.decompress(compressed, size)
        except zlib.error as error:
            findings.damaged = str(error)
            yield _salvaged(before, compressed)
            return
        if data:
            yield data
        if decoder.eof:
            rest = decoder.unused_data
            if len(rest) < 18:
                rest += file.read(size)
            if rest[:2] != b"\x1f\x8b":  # the end, or padding after it
                return
            decoder, compressed = zlib.decompressobj(wbits=31), rest
        else:
            compressed = decoder.unconsumed_tail or file.read(1 << 20)
    findings.damaged = "the compressed stream ends early"
    yield decoder.flush()


def _salvaged(decoder: zlib._Decompress, compressed: bytes) -> bytes:
    """What comes out before the damage: a call that fails gives nothing, so go byte by byte."""
    out = []
    with contextlib.suppress(zlib.error):
        for position in range(len(compressed)):
            out.append(decoder.decompress(compressed[position : position + 1]))
    return b"".join(out)


@dataclass(slots=True)
class Chunk:
    """Some events. Times of those of a large sound file are doubles, which is fast; :meth:`exact` has them as text."""

    events: Sequence[Event]
    text: bytes | None = None

    def exact(self) -> Sequence[Event]:
        """The events with times as raw JSON numbers."""
        return self.events if self.text is None else decode_events(self.text)


class TraceStream:
    """Iterate to get chunks of events; then ``facts`` and ``findings`` are complete."""

    def __init__(self, source: Iterator[bytes], findings: Findings, where: str) -> None:
        self.facts = Facts()
        self.findings = findings
        self.where = where
        self._source = source
        self._buffer = b""
        self.is_list = False  # a bare list of events, with nothing said around it
        self._next_try = CHUNK_BYTES // 2
        self._given_up = False
        self.exact = False  # set it where doubles have not been enough

    def __iter__(self) -> Iterator[Chunk]:
        self._read_head()
        events = 0
        for block in self._source:
            self._buffer += block
            chunk = self._cut()
            if chunk is not None:
                events += len(chunk.events)
                yield chunk
            if self._is_rubble(events, chunk is None):
                self._buffer = self._buffer[:CHUNK_BYTES]  # the last events before it
                break
        yield Chunk(self._finish())

    def give_up(self, why: str) -> None:
        """Read no further; ``why`` is said of the file."""
        self.findings.damaged = why
        self._given_up = True

    def _is_rubble(self, events: int, uncut: bool) -> bool:
        """Whether to give up what comes: a small compressed file can ask for any amount of memory and time."""
        if uncut and len(self._buffer) > _LARGEST_ELEMENT_BYTES:
            self.give_up(f"an element of more than {_LARGEST_ELEMENT_BYTES >> 20} MiB")
        elif self.findings.dropped > max(_MOST_DROPPED, 10 * events):
            self.give_up(f"more than {_MOST_DROPPED:,} elements that are no events")
        return self._given_up

    # --- before the events ---------------------------------------------------------------------

    def _read_head(self) -> None:
        searched = 0
        for block in self._source:
            self._buffer = self._buffer + block if self._buffer else block.removeprefix(b"\xef\xbb\xbf")
            if searched == 0 and not (self._buffer.strip()):
                continue
            if _LIST.match(self._buffer):
                self.is_list = True
                self._buffer = self._buffer[_LIST.match(self._buffer).end() :]  # type: ignore[union-attr]
                return
            match = _EVENTS_KEY.search(self._buffer, max(0, searched - 64))
            if match:
                self._take_facts(self._buffer[: match.start()] + b'"traceEvents":null}')
                self._buffer = self._buffer[match.end() :]
                return
            searched = len(self._buffer)
            if not _OBJECT.match(self._buffer) or searched > _HEAD_LIMIT_BYTES:
                break
        raise UnreadableInput(self._why_no_trace())

    def _why_no_trace(self) -> str:
        start = self._buffer[:4096]
        if self.findings.damaged:
            return (
                f"{self.where} is a damaged gzip file ({self.findings.damaged}) with no event in what is left; "
                "copy it again from where it was written"
            )
        if not self._buffer.strip():
            return f"{self.where} is empty; was the profiler stopped before the process ended?"
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return f"{self.where} is UTF-16 text; convert it to UTF-8 first"
        if not _OBJECT.match(self._buffer):
            return f"{self.where} is not JSON; a trace is what torch.profiler's export_chrome_trace writes (.json or .json.gz)"
        try:
            msgspec.json.decode(self._buffer)
        except DECODE_ERRORS as error:
            return f"{self.where} is broken JSON ({str(error)[:120]}) and has no traceEvents; export the trace again"
        return f"{self.where} is JSON but not a trace (it has no list named traceEvents); export one with torch.profiler's export_chrome_trace"

    def _take_facts(self, text: bytes) -> Sequence[Event] | None:
        """Merge what an object says; its events, or ``None`` when it is not sound."""
        try:
            facts = _facts.decode(text)
        except DECODE_ERRORS:
            return None
        for name in Facts.__struct_fields__:
            value = getattr(facts, name)
            if value is not None and name != "traceEvents":
                setattr(self.facts, name, value)
        return facts.traceEvents or []

    # --- the events ----------------------------------------------------------------------------

    def _cut(self) -> Chunk | None:
        """Decode all complete events of the buffer but the last, and keep the rest."""
        buffer = self._buffer
        if len(buffer) < self._next_try:
            return None
        self._next_try = 2 * len(buffer)  # where no cut is found, not to try at every block
        for match in itertools.islice(self._boundaries_from_the_end(), 3):
            text = b"[" + buffer[: match.start() + 1] + b"]"
            try:
                events = decode_events(text, self.exact)
            except DECODE_ERRORS:
                continue
            self._keep(match.end())
            return Chunk(events, None if self.exact else text)
        if _END_OF_EVENTS.search(buffer):
            return None  # these are the facts after the events
        mended = mend(buffer, final=False)
        if not mended.consumed:
            return None
        self._count(mended)
        self._keep(mended.consumed)
        return Chunk(mended.events)

    def _keep(self, start: int) -> None:
        self._buffer = self._buffer[start:]
        self._next_try = CHUNK_BYTES // 2

    def _count(self, mended: Mended) -> None:
        self.findings.repaired += mended.repaired
        self.findings.dropped += mended.dropped

    def _boundaries_from_the_end(self) -> Iterator[re.Match[bytes]]:
        buffer = self._buffer
        window = 1 << 14
        end = len(buffer)
        while True:
            start = max(0, end - window)
            found = list(_BEFORE_EVENT.finditer(buffer, start, end))
            if found:
                yield from reversed(found)
                return
            if start == 0:  # events that begin with other names than is usual
                yield from list(BETWEEN_EVENTS.finditer(buffer, max(0, end - (1 << 14)), end))[-1:]
                return
            window *= 8

    # --- after the events ----------------------------------------------------------------------

    def _finish(self) -> Sequence[Event]:
        rest, self._buffer = self._buffer, b""
        if self.is_list:
            with contextlib.suppress(*DECODE_ERRORS):
                return decode_events(b"[" + rest)
        else:
            events = self._take_facts(b'{"traceEvents":[' + rest)
            if events is not None:
                return events
        return self._mend_the_end(rest)

    def _mend_the_end(self, rest: bytes) -> Sequence[Event]:
        body, tail = self._split_tail(rest)
        if tail is None:
            self.findings.truncated = True
        elif tail.strip(b" \t\r\n}") and self._take_facts(b"{" + tail) is None:
            self.findings.tail_lost = True
        if not body.strip(b" \t\r\n,"):
            return []
        with contextlib.suppress(*DECODE_ERRORS):
            return decode_events(b"[" + body + b"]")
        mended = mend(body)
        if tail is None and mended.dropped and not body.rstrip().endswith(b"}"):
            mended.dropped -= 1  # the event that was cut off
        self._count(mended)
        return mended.events

    def _split_tail(self, rest: bytes) -> tuple[bytes, bytes | None]:
        """Events, and the members after them; ``None`` instead of the latter where the file was cut."""
        match = _END_OF_EVENTS.search(rest)
        if match is not None:
            return rest[: match.start() + 1], rest[match.end() :].lstrip(b" \t\r\n,")
        for match in reversed(list(re.finditer(rb"\}[\s,]*\](?=\s*(?:,\s*\"|\}|\Z))", rest))):
            body, tail = rest[: match.start() + 1], rest[match.end() :]
            closing = _CLOSING.match(b"]" + tail)
            if closing is None:
                continue
            last = body[body.rfind(b"},", 0, len(body)) + 1 :]
            if last.count(b"{") > last.count(b"}"):
                continue  # the end of an array inside an event or inside the members after them
            return body, (closing["rest"] or b"")
        stripped = rest.lstrip()
        if stripped.startswith(b"]"):
            return b"", stripped[1:].lstrip(b" \t\r\n,")
        if b"{" not in rest and b"]" in rest:  # a list of something else
            return rest[: rest.rindex(b"]")], b""
        return rest, None
