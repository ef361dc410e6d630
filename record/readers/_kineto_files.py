"""Which files make a job: finding them, telling whose rank each is, and leaving out what does not belong.

A file's rank and world stand in its ``distributedInfo``, at its head or, in on-demand traces, at its end;
only those ends are read here. Where it says nothing, names help (``rank3``, ``_3.json``), and then the order
of names; that is said.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import UnreadableInput
from ..model import MISSING, Job, Quality, Rank, RankSource
from ._kineto_stream import Findings, Readable, blocks
from ._kineto_times import nanoseconds_of

__all__ = ["is_candidate", "job_of_paths", "open_source"]

Read = Callable[[RankSource], Rank]

_TRACE_NAMES = (".json", ".json.gz", ".json.gzip")
_ARCHIVE_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_PEEK_BYTES = 1 << 18
_WIDE_PEEK_BYTES = 8 << 20  # process groups of a large job may fill the head
_MOST_FILES = 100_000
_DEEPEST = 4

_RANK = re.compile(rb'"rank"\s*:\s*"?(\d{1,7})"?')
_WORLD = re.compile(rb'"world_size"\s*:\s*"?(\d{1,7})"?')
_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*\{')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(-?\d{1,19})')
_TIME = re.compile(rb'"ts"\s*:\s*"?(-?[\d.]+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:|^\s*\[\s*(?:\{|\])')
_HEAD_KEY = re.compile(rb'"(?:distributedInfo|deviceProperties)"\s*:')

#: Name patterns of a rank, most certain first.
_RANK_NAMES = (
    re.compile(r"(?:^|[^a-zA-Z])rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(
        r"(?:^|[^a-zA-Z])(?:worker|trainer|process|proc|gpu|device|r)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE
    ),
    re.compile(r"(?:^|[-_.])(\d{1,6})(?:\.pt)?(?:\.trace)?\.json", re.IGNORECASE),
    re.compile(r"^(\d{1,6})[-_.]"),
)


@dataclass(frozen=True, slots=True)
class _Found:
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
            with _archive(path) as archive:
                for info in archive:
                    if info.name == member and info.isfile():
                        inner = archive.extractfile(info)
                        if inner is not None:
                            yield inner
                            return
            raise UnreadableInput(f"{path} no longer has a member {member}")
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UnreadableInput(f"cannot read {path}: {_reason(error)}") from None


def _archive(path: Path) -> tarfile.TarFile:
    """An archive for reading members in order; one that is not compressed can skip to any."""
    try:
        return tarfile.open(path, "r:")
    except tarfile.ReadError:
        return tarfile.open(path, "r|*")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# --- finding -------------------------------------------------------------------------------------


def is_candidate(path: Path) -> bool:
    """Whether a path is a trace file by name or content, an archive, or a folder that holds some."""
    if path.is_dir():
        return next(_files_below(path), None) is not None
    name = path.name.lower()
    return name.endswith(_TRACE_NAMES + _ARCHIVE_NAMES) or _looks_like_a_trace(path)


def _looks_like_a_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_PEEK_BYTES)
    except OSError:
        return False
    return _EVENTS.search(_inflated(head)) is not None


def _files_below(folder: Path) -> Iterator[Path]:
    """Trace files of a folder and its subfolders, in order of name; hidden ones are skipped."""
    stack = [(folder, 0)]
    while stack:
        where, depth = stack.pop()
        try:
            entries = sorted(where.iterdir(), key=lambda entry: _natural(entry.name))
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


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key by which rank10 comes after rank9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# --- looking at the ends -------------------------------------------------------------------------


def _inflated(data: bytes, limit: int = 4 * _PEEK_BYTES) -> bytes:
    """The beginning of a gzip stream decompressed, anything else as it is."""
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, limit)
    except zlib.error:
        return b""


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


def _peek(path: Path, member: str | None, size: int, file: IO[bytes]) -> _Found | None:
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
    named = _rank_of_name(member or path.name)
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
    return _Found(path, member, size, rank, world, start_ns)


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


def _rank_of_name(name: str, patterns: Sequence[re.Pattern[str]] = _RANK_NAMES) -> int | None:
    parts = Path(name).parts
    for part in reversed(parts[-2:]):
        for pattern in patterns:
            match = pattern.search(part)
            if match:
                return int(match[1])
    return None


def _found_in(path: Path, notes: list[Quality]) -> Iterator[_Found]:
    try:
        if path.is_dir():
            for count, file in enumerate(_files_below(path)):
                if count >= _MOST_FILES:
                    notes.append(
                        Quality(
                            "too-many-files",
                            "warning",
                            f"only the first {_MOST_FILES:,} files of {path} were looked at",
                        )
                    )
                    return
                yield from _found_in(file, notes)
            return
        if path.name.lower().endswith(_ARCHIVE_NAMES):
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
    if found is None:
        notes.append(Quality("not-a-trace", "info", f"{path} is not a trace and was left out"))
    else:
        yield found


def _found_in_archive(path: Path, notes: list[Quality]) -> Iterator[_Found]:
    """Members that are traces, read in one pass and never extracted."""
    try:
        with _archive(path) as archive:
            for count, info in enumerate(archive):
                name = Path(info.name).name
                if count >= _MOST_FILES:
                    return
                if not info.isfile() or name.startswith(".") or not name.lower().endswith(_TRACE_NAMES):
                    continue
                inner = archive.extractfile(info)
                found = _peek(path, info.name, info.size, inner) if inner else None
                if found is not None:
                    yield found
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        notes.append(
            Quality(
                "damaged-archive",
                "error",
                f"{path} is damaged ({_reason(error)}); the members before that are used",
            )
        )


# --- the job -------------------------------------------------------------------------------------


def job_of_paths(paths: Sequence[Path], origin: Path, read: Read) -> Job:
    """The largest consistent set of ranks in what lies at ``paths``.

    Raises ``UnreadableInput`` where there is no trace at all.
    """
    notes: list[Quality] = []
    found = [each for path in paths for each in _found_in(path, notes)]
    if not found:
        raise UnreadableInput(_nothing_found(paths, origin, notes))
    found = _one_run(found, notes)
    ranked = _ranks(found, notes)
    sources = tuple(RankSource(rank, each.path, read, each.member) for rank, each in sorted(ranked.items()))
    worlds = [each.world_size for each in found if each.world_size]
    world = max(worlds) if worlds else None
    if world is None and len(ranked) > 1:
        world = max(ranked) + 1
        notes.append(
            Quality(
                "world-size-unknown",
                "info",
                f"no file states the world size; {world} is taken from the highest rank",
            )
        )
    if world is not None and max(ranked) >= world:
        notes.append(
            Quality(
                "rank-beyond-world", "warning", f"rank {max(ranked)} lies outside the stated world of {world}"
            )
        )
        world = max(ranked) + 1
    job = Job(origin, "kineto", sources, world, quality=notes)
    if job.missing_ranks:
        missing = job.missing_ranks
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes.append(
            Quality(
                "missing-ranks",
                "warning",
                f"{len(missing)} of {world} ranks have no trace ({some}); waits are known for those present only",
            )
        )
    return job


def _nothing_found(paths: Sequence[Path], origin: Path, notes: list[Quality]) -> str:
    if notes and len(paths) == 1 and not paths[0].is_dir():
        if notes[0].id == "not-a-trace":
            return f"{paths[0]} is not a trace (no traceEvents in it); export one with torch.profiler's export_chrome_trace"
        return notes[0].message
    return f"{origin} holds no trace (looked for *.json and *.json.gz); export one with torch.profiler's export_chrome_trace"


def _one_run(found: list[_Found], notes: list[Quality]) -> list[_Found]:
    """The largest group of files that can be one run: one world size, times that belong together, each rank once."""
    if len(found) == 1:
        return found
    groups: list[list[_Found]] = []
    by_world: dict[int | None, list[_Found]] = defaultdict(list)
    for each in found:
        by_world[each.world_size].append(each)
    unknown = by_world.pop(None, [])
    if not by_world:
        by_world[None] = unknown
    elif unknown:
        max(by_world.values(), key=len).extend(unknown)
    for files in by_world.values():
        groups += _windows(files)
    best = max(
        groups, key=lambda group: (len(group), sum(each.size for each in group), group[0].start_ns or 0)
    )
    if len(groups) > 1:
        left = len(found) - len(best)
        why = "world sizes" if len(by_world) > 1 else "times"
        notes.append(
            Quality(
                "mixed-runs",
                "warning",
                f"{len(groups)} runs or windows lie together (their {why} differ); the largest, {len(best)} files from "
                f"{best[0].name} on, is analysed and {left} files are left out; name the files of another to see it",
            )
        )
    return best


_APART_NS = (
    600 * 10**9
)  # clocks of one job's hosts do not differ by ten minutes, and no window lasts that long


def _windows(files: list[_Found]) -> list[list[_Found]]:
    """Files by time: a new window begins where a rank comes again, or after a long pause."""
    timed = sorted((each for each in files if each.start_ns is not None), key=lambda each: each.start_ns or 0)
    untimed = [each for each in files if each.start_ns is None]
    windows: list[list[_Found]] = []
    seen: dict[int, _Found] = {}
    for each in timed:
        rank = each.rank if each.rank is not None else _rank_of_name(each.name)
        last = windows[-1][-1] if windows else None
        apart = last is None or (each.start_ns or 0) - (last.start_ns or 0) > _APART_NS
        again = rank is not None and rank in seen and seen[rank].start_ns != each.start_ns
        if apart or again:
            windows.append([])
            seen = {}
        windows[-1].append(each)
        if rank is not None:
            seen[rank] = each
    if untimed:
        if windows:
            max(windows, key=len).extend(untimed)
        else:
            windows.append(untimed)
    return windows


def _ranks(found: list[_Found], notes: list[Quality]) -> dict[int, _Found]:
    """Rank → file, each rank once."""
    if len(found) == 1:
        only = found[0]
        # Of one file alone a number in its name may be anything; only "rank3" is a rank.
        named = _rank_of_name(only.name, _RANK_NAMES[:1])
        return {next((rank for rank in (only.rank, named) if rank is not None), 0): only}
    stated: dict[int, list[_Found]] = defaultdict(list)
    silent = []
    for each in found:
        if each.rank is not None:
            stated[each.rank].append(each)
        else:
            silent.append(each)
    ranked = {rank: _one_of(rank, files, notes) for rank, files in stated.items()}
    if silent:
        _name_ranks(silent, ranked, notes)
    return ranked


def _one_of(rank: int, files: list[_Found], notes: list[Quality]) -> _Found:
    best = max(files, key=lambda each: each.size)
    for other in files:
        if other is not best:
            notes.append(
                Quality(
                    "duplicate-rank",
                    "warning",
                    f"{other.name} is rank {rank} too; the larger file {best.name} is used",
                    rank,
                )
            )
    return best


def _ranks_by_name(files: list[_Found]) -> list[int] | None:
    """Ranks from the most certain part of the names that tells all files apart: the file's, else a folder's."""
    for pattern in _RANK_NAMES:
        for level in range(1, _DEEPEST + 1):
            parts = [Path(each.name).parts for each in files]
            found = [pattern.search(part[-level]) if len(part) >= level else None for part in parts]
            ranks = [int(match[1]) for match in found if match]
            if len(ranks) == len(files) == len(set(ranks)):
                return ranks
    return None


def _name_ranks(silent: list[_Found], ranked: dict[int, _Found], notes: list[Quality]) -> None:
    """Ranks of files that do not state one: from names when those tell them apart, else in order of name."""
    named = _ranks_by_name(silent)
    if named is not None and not set(named) & set(ranked):
        for rank, each in zip(named, silent, strict=True):
            ranked[rank] = each
        how = "ranks are taken from file names"
    else:
        free = (rank for rank in range(len(silent) + len(ranked) + 1) if rank not in ranked)
        ordered = sorted(silent, key=lambda each: _natural(each.name))
        for each in ordered:
            rank = next(free)
            ranked[rank] = each
        how = "ranks are numbered in order of file names"
    notes.append(Quality("rank-unknown", "info", f"{len(silent)} files do not state their rank; {how}"))
