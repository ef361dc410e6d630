"""Files that hold the traces of several processes: told by a look, and numbered as ranks."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import UnreadableInput
from ._kineto_categories import OPERATOR, RUNTIME, action_of
from ._kineto_events import DECODE_ERRORS, decode_events
from ._kineto_files import open_source
from ._kineto_processes import Part
from ._kineto_stream import Findings, blocks

__all__ = ["may_hold_several", "ranks_of_parts"]

#: Stands once in every file that Kineto closes, torch 1.8 to today.
_ONCE = b"Iteration Start: "
#: Stands once for each process.
_NAME = b'"process_name"'
_PROCESS = re.compile(rb'"pid"\s*:\s*("[^"]*"|-?\d+)')
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_BLOCK_BYTES = 1 << 18
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_RANK = re.compile(r"(?:^|[^a-zA-Z])rank[-_ #:=]*(\d{1,6})(?!\d)", re.IGNORECASE)


def may_hold_several(path: Path, member: str | None) -> bool:
    """Whether a file shows signs of several recordings or processes; reading it decides.

    A look at some samples of it and a search for two strings: about a tenth of the cost of reading it. Never raises.
    """
    signs = _Signs()
    try:
        if _is_plain(path, member):
            _look_at_file(path, signs)
        else:
            _look_at_stream(path, member, signs)
    except (OSError, ValueError, UnreadableInput):
        return False
    return signs.several


class _Signs:
    """What was seen of a file."""

    def __init__(self) -> None:
        self.closed = 0
        self.named: Counter[bytes] = Counter()
        self.working: set[str] = set()

    @property
    def several(self) -> bool:
        return self.closed > 1 or len(self.working) > 1 or max(self.named.values(), default=0) > 1

    def search(self, text: bytes | mmap.mmap) -> None:
        """Count the marks that every recording has once."""
        self.closed += sum(1 for _ in _positions(text, _ONCE))
        for position in _positions(text, _NAME):
            around = text[max(0, position - 200) : position + 200]
            # The event begins at the last "{" before its name.
            begin = around.rfind(b"{", 0, min(200, position))
            match = _PROCESS.search(around, max(begin, 0))
            if match:
                self.named[match[1]] += 1

    def sample(self, text: bytes) -> None:
        """Add the processes that work in a stretch of the file."""
        self.working.update(_working_processes(text))


def _positions(text: bytes | mmap.mmap, wanted: bytes) -> Iterator[int]:
    position = text.find(wanted)
    while position >= 0:
        yield position
        position = text.find(wanted, position + 1)


def _is_plain(path: Path, member: str | None) -> bool:
    if member is not None:
        return False
    with path.open("rb") as file:
        return file.read(2) != b"\x1f\x8b"


def _look_at_file(path: Path, signs: _Signs) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        signs.search(content)
        last = max(0, len(content) - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            start = last * index // (_SAMPLES - 1)
            signs.sample(content[start : start + _SAMPLE_BYTES])


def _look_at_stream(path: Path, member: str | None, signs: _Signs) -> None:
    """Of a compressed file samples are taken at its beginning, its end, and ever farther apart between."""
    with open_source(path, member) as file:
        wanted, text = 0, b""
        for index, text in enumerate(blocks(file, Findings(), _BLOCK_BYTES)):
            signs.search(text)  # what a border cuts is missed, and decides nothing alone
            if index == wanted:
                signs.sample(text[:_SAMPLE_BYTES])
                wanted = max(index + 1, index * 5 // 4)
        signs.sample(text[-_SAMPLE_BYTES:])


def _working_processes(text: bytes) -> Iterable[str]:
    """Process ids of the operators and calls in a stretch of a file."""
    bounds = [match.span() for match in _BETWEEN.finditer(text)]
    if len(bounds) < 2:
        return ()
    try:
        events = decode_events(b"[" + text[bounds[0][1] : bounds[-1][0] + 1] + b"]", exact=False)
    except DECODE_ERRORS:
        return ()
    return {
        str(event.pid) for event in events if event.ph == "X" and action_of(event.cat) in (OPERATOR, RUNTIME)
    }


def ranks_of_parts(
    parts: Sequence[Part], labels: Mapping[str, Iterable[str]], devices: Sequence[frozenset[int]]
) -> tuple[list[int], str]:
    """Ranks of a file's processes, and in words where they are from.

    From "rank 3" in a process id or its label; else in the order of the devices that each alone works on; else in
    the order of the file. ``devices`` are those of each part.
    """
    stated = [_stated(part, labels) for part in parts]
    known = [rank for rank in stated if rank is not None]
    if len(known) == len(set(known)) == len(parts):
        return known, "by the ranks in their labels"
    if all(len(own) == 1 for own in devices) and len(set().union(*devices)) == len(parts):
        order = sorted(min(own) for own in devices)
        return [order.index(min(own)) for own in devices], "in the order of their devices"
    return list(range(len(parts))), "in the order of the file"


def _stated(part: Part, labels: Mapping[str, Iterable[str]]) -> int | None:
    for text in (part.process, *sorted(labels.get(part.process, ()))):
        match = _RANK.search(text)
        if match:
            return int(match[1])
    return None
