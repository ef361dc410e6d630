"""Finding trace files, opening them, and looking at their ends.

A file's rank and world stand in its ``distributedInfo``, at its head or, in on-demand traces, at its end;
only those ends are read here. Where it says nothing, names help (``rank3``, ``_3.json``).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import UnreadableInput
from ..model import MISSING, Quality
from ._archives import ARCHIVE_NAMES, DAMAGE, RefusedArchive, open_archive, wrong_with
from ._kineto_stream import Findings, Readable, blocks
from ._kineto_times import nanoseconds_of
from ._names import natural, rank_of_name

__all__ = ["FoundTrace", "files_below", "found_in", "is_candidate", "open_source"]

_TRACE_NAMES = (".json", ".json.gz", ".json.gzip")
_PEEK_BYTES = 1 << 18
_WIDE_PEEK_BYTES = 8 << 20  # process groups of a large job may fill the head
_MOST_FILES = 100_000
_DEEPEST = 4

#: No job has a million ranks; a number of more digits is damage, and its head is another number.
_RANK = re.compile(rb'"rank"\s*:\s*"?(\d{1,6})(?!\d)"?')
_WORLD = re.compile(rb'"world_size"\s*:\s*"?(\d{1,6})(?!\d)"?')
_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*\{')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(-?\d{1,19})')
_TIME = re.compile(rb'"ts"\s*:\s*"?(-?[\d.]+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:|^\s*\[\s*(?:\{|\])')
_HEAD_KEY = re.compile(rb'"(?:distributedInfo|deviceProperties)"\s*:')


@dataclass(frozen=True, slots=True)
class FoundTrace:
    """A trace file and what a look at its ends tells."""

    path: Path
    member: str | None
    size: int
    rank: int | None
    world_size: int | None
    start_ns: int | None

    @property
    def name(self) -> str:
        return self.member or str(self.path)


# --- opening -------------------------------------------------------------------------------------


@contextmanager
def open_source(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    """The bytes of a file or of an archive's member, as stored. Raises ``UnreadableInput``."""
    try:
        if member is None:
            with path.open("rb") as file:
                yield file
        else:
            with open_archive(path) as archive:
                for info in archive:
                    if info.name == member and info.isfile():
                        inner = archive.extractfile(info)
                        if inner is not None:
                            yield inner
                            return
            raise UnreadableInput(f"{path} no longer has a member {member}")
    except DAMAGE as error:
        raise UnreadableInput(f"cannot read {path}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# --- finding -------------------------------------------------------------------------------------


def is_candidate(path: Path) -> bool:
    """Whether a path is a trace file by name or content, an archive, or a folder that holds some."""
    if path.is_dir():
        return next(files_below(path), None) is not None
    if not path.is_file():
        return False  # opening a pipe that nobody writes to would wait for ever
    name = path.name.lower()
    return name.endswith(_TRACE_NAMES + ARCHIVE_NAMES) or _looks_like_a_trace(path)


def _looks_like_a_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_PEEK_BYTES)
    except OSError:
        return False
    return _EVENTS.search(_inflated(head)) is not None


def files_below(folder: Path) -> Iterator[Path]:
    """Trace files of a folder and its subfolders, in order of name; hidden ones are skipped."""
    stack = [(folder, 0)]
    while stack:
        where, depth = stack.pop()
        try:
            entries = sorted(where.iterdir(), key=lambda entry: natural(entry.name))
        except OSError as error:
            raise UnreadableInput(f"cannot read the folder {where}: {_reason(error)}") from None
        inner = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if depth < _DEEPEST and not entry.is_symlink():
                    inner.append((entry, depth + 1))
            elif entry.name.lower().endswith(_TRACE_NAMES):
                yield entry
        stack.extend(reversed(inner))


# --- looking at the ends -------------------------------------------------------------------------


def _inflated(data: bytes, limit: int = 4 * _PEEK_BYTES) -> bytes:
    """The beginning of a gzip stream decompressed, anything else as it is."""
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, limit)
    except zlib.error:
        return b""


def _ends_early(path: Path) -> bool:
    """Whether a gzip file of no more than what is looked at stops before its stream does."""
    with path.open("rb") as file:
        data = file.read(_WIDE_PEEK_BYTES)
        if data[:2] != b"\x1f\x8b" or file.read(1):
            return False
    stream = zlib.decompressobj(wbits=31)
    try:
        while data and not stream.eof:
            stream.decompress(data, 4 * _PEEK_BYTES)
            data = stream.unconsumed_tail
    except zlib.error:
        return False
    return not stream.eof


def _tail_of_file(path: Path, size: int, compressed: bool) -> bytes:
    """The end of a file. Of a gzip file that means inflating it all: a tenth of the cost of reading it."""
    with path.open("rb") as file:
        if compressed:
            return _tail_of_stream(file)
        file.seek(max(0, size - _PEEK_BYTES))
        return file.read()


def _tail_of_stream(file: Readable) -> bytes:
    tail = b""
    for block in blocks(file, Findings(), _PEEK_BYTES):
        tail = (tail + block)[-_PEEK_BYTES:]
    return tail


def _distributed(text: bytes) -> tuple[int | None, int | None]:
    """Rank and world size that ``distributedInfo`` states."""
    match = _DISTRIBUTED.search(text)
    if match is None:
        return None, None
    own = text[match.end() : match.end() + 4096].split(b'"pg_config"')[0]
    rank, world = _RANK.search(own), _WORLD.search(own)
    return (int(rank[1]) if rank else None), (int(world[1]) if world else None)


def _peek(path: Path, member: str | None, size: int, file: IO[bytes]) -> FoundTrace | None:
    """What the ends of a file tell; ``None`` when its head shows that it is no trace.

    ``file`` is read from its beginning, and for an archive's member on to its end where needed.
    """
    head = file.read(_PEEK_BYTES)
    compressed = head[:2] == b"\x1f\x8b"
    text = _inflated(head)
    if _EVENTS.search(text) is None and _HEAD_KEY.search(text) is None and text.strip():
        head += file.read(_WIDE_PEEK_BYTES)
        text = _inflated(head, 4 * _WIDE_PEEK_BYTES)
        if _EVENTS.search(text) is None:
            return None
    rank, world = _distributed(text)
    base, first = _BASE.search(text), _TIME.search(text)
    named = rank_of_name(member or path.name)
    if (
        size > len(head)
        and (rank is None or base is None)
        and not (compressed and (rank, named) != (None, None))
    ):
        tail = _tail_of_file(path, size, compressed) if member is None else _rest_of_member(head, file)
        late_rank, late_world = _distributed(tail)
        rank = late_rank if rank is None else rank
        world = late_world if world is None else world
        base = base or _BASE.search(tail)
    start = nanoseconds_of(first[1]) if first else MISSING
    start_ns = None if start == MISSING else start + (int(base[1]) if base else 0)
    return FoundTrace(path, member, size, rank, world, start_ns)


def _rest_of_member(head: bytes, file: IO[bytes]) -> bytes:
    """The end of a member that was read up to ``head``."""
    if head[:2] != b"\x1f\x8b":
        return _tail_of_stream(file)
    return _tail_of_stream(_Joined(head, file))


class _Joined:
    """Bytes already read, and the file they came from."""

    def __init__(self, head: bytes, file: IO[bytes]) -> None:
        self._head, self._file = head, file

    def read(self, size: int = -1) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._file.read(size)


def found_in(path: Path, notes: list[Quality]) -> Iterator[FoundTrace]:
    """Traces at a path: a file, an archive's members, a folder's files. What is left out becomes a note."""
    try:
        if path.is_dir():
            for count, file in enumerate(files_below(path)):
                if count >= _MOST_FILES:
                    notes.append(
                        Quality(
                            "too-many-files",
                            "warning",
                            f"only the first {_MOST_FILES:,} files of {path} were looked at",
                        )
                    )
                    return
                yield from found_in(file, notes)
            return
        if path.name.lower().endswith(ARCHIVE_NAMES):
            yield from _found_in_archive(path, notes)
            return
        size = path.stat().st_size
        if size == 0:
            notes.append(
                Quality(
                    "empty-file",
                    "error",
                    f"{path} is empty; was the profiler stopped before the process ended?",
                )
            )
            return
        with path.open("rb") as stream:
            found = _peek(path, None, size, stream)
    except OSError as error:
        notes.append(Quality("unreadable-file", "error", f"cannot read {path}: {_reason(error)}"))
        return
    if found is None and _ends_early(path):
        notes.append(
            Quality(
                "truncated-file",
                "error",
                f"{path} ends early (its compressed stream is cut), before any traceEvents; copy it again from where it was written",
            )
        )
    elif found is None:
        notes.append(Quality("not-a-trace", "info", f"{path} is not a trace and was left out"))
    else:
        yield found


def _found_in_archive(path: Path, notes: list[Quality]) -> Iterator[FoundTrace]:
    """Members that are traces, read in one pass and never extracted."""
    used = 0
    try:
        with open_archive(path) as archive:
            for count, info in enumerate(archive):
                name = Path(info.name).name
                if count >= _MOST_FILES:
                    return
                if not info.isfile() or name.startswith(".") or not name.lower().endswith(_TRACE_NAMES):
                    continue
                inner = archive.extractfile(info)
                found = _peek(path, info.name, info.size, inner) if inner else None
                if found is not None:
                    used += 1
                    yield found
    except RefusedArchive as error:
        notes.append(Quality("damaged-archive", "error", f"{path} is {wrong_with(error)}"))
    except DAMAGE as error:
        notes.append(
            Quality(
                "damaged-archive",
                "error",
                f"{path} is {wrong_with(error)}; "
                + (
                    f"the {used} traces before that are used"
                    if used
                    else "no trace comes before that, copy it again from where it was written"
                ),
            )
        )
