"""Which runs lie under the given roots, found by name and by the first kilobytes, never by reading all.

A run is a native record (a folder that :mod:`trine.profiler` wrote), a folder of one job's files (traces, memory
snapshots, dumps, schedules, also in folders of their own below it), or a single one of these. A run is known by an
identifier made here and looked up here: no path from a request is ever joined to a root, so nothing outside the roots
can be asked for.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import time
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trine.dashboard.holdings import FOREIGN, Held, about_skipped, briefly
from trine.record._expansion import ARCHIVE_NAMES, is_of_record
from trine.record.errors import UnreadableInput
from trine.record.loading import format_of
from trine.record.readers import native
from trine.record.readers._names import rank_of_name

__all__ = ["Catalogue", "Run"]

Kind = Literal["record", "traces", "trace"]

_TRACE = "kineto"
_SUFFIXES = (".json", ".json.gz")
#: Of other files than traces, what their names end in, or look like (``nccl_trace_rank_0``); their content decides.
_STATED = (".pickle", ".pkl", ".raw.gz", ".sqlite", ".sqlite3")
_OTHERS = (*_STATED, ".db", ".html")
_DUMP = re.compile(r"[-_]\d+$")
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages"})
_DEEPEST = 8
_MOST_ENTRIES = 50_000
_FRESH_S = 2.0
_JUST_NOW_S = 0.05
#: A record that says it is running but has been silent for this long no longer is.
_SILENT_S = 120.0
#: Ranks whose state is read; the others of a larger run end with them.
_MOST_STATES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``files`` is how many, ``updated_s`` the newest (Unix time), ``size_bytes`` their sum;
    ``fingerprint`` changes when any of them does. ``held`` are its formats with their files, ``parts`` the
    identifiers of what can be opened alone although the list shows it only as a part of this run."""

    id: str
    path: Path
    kind: Kind
    files: int
    size_bytes: int
    updated_s: float
    fingerprint: str
    format: str = "kineto"
    held: tuple[tuple[str, int], ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def holds(self) -> Held:
        """Formats with how many files each has, the leading one first."""
        return self.held or ((self.format, self.files),)

    def state(self, now_s: float | None = None) -> str:
        """``running``, ``silent`` (says it runs, but has not written for two minutes), ``finished``,
        ``failed`` or ``stopped`` of a record; what the files are of anything else."""
        if self.kind != "record":
            return briefly(self.holds)
        said = _said_state(str(self.path), self.fingerprint)
        passed = (time.time() if now_s is None else now_s) - self.updated_s
        return "silent" if said == "running" and passed > _SILENT_S else said


@lru_cache(maxsize=4096)
def _said_state(path: str, fingerprint: str) -> str:
    """What the ranks of the newest attempt say: the worst that any says, running while one runs.

    ``fingerprint`` is only there to ask again when a file has changed.
    """
    attempts = sorted(Path(path).glob("attempt-*"))
    home = attempts[-1] if attempts else Path(path)
    said = set()
    for description in sorted(home.glob("rank-*/rank.json"))[:_MOST_STATES]:
        try:
            value = json.loads(description.read_bytes())
        except (OSError, ValueError):
            continue  # it is being replaced: the next look reads it
        said.add(str(value.get("state", "running")) if isinstance(value, dict) else "running")
    for state in ("failed", "running", "stopped", "finished"):
        if state in said:
            return state
    return "running" if not said else min(said)


class Catalogue:
    """The runs under some roots. Thread-safe; a walk is remembered for two seconds, or ten times as
    long as it takes."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises ``UnreadableInput`` when a root does not exist, or is a file that no trace is called."""
        for root in roots:
            if not root.exists():
                raise UnreadableInput(f"{root} does not exist; give a run, a trace, or a folder of them")
            if (
                not root.is_dir()
                and not root.name.endswith((*_SUFFIXES, *ARCHIVE_NAMES))
                and format_of(root) is None
            ):
                raise UnreadableInput(
                    f"{root} is no trace by its name; give a run, a trace, or a folder of them"
                )
        self.roots = tuple(root.resolve() for root in roots)
        self.notes: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._parts: dict[str, Run] = {}
        self._walked, self._took_s = -1e9, 0.0

    def runs(self) -> list[Run]:
        """All runs, the newest first."""
        with self._lock:
            # A walk over slow storage is not worth more than a tenth of the time.
            if time.monotonic() - self._walked > max(_FRESH_S, 10 * self._took_s):
                began = time.monotonic()
                self._runs, self._parts, self.notes = self._walk()
                self._walked = time.monotonic()
                self._took_s = self._walked - began
            return sorted(self._runs.values(), key=lambda run: (-run.updated_s, run.id))

    def find(self, id: str) -> Run:
        """The run of an identifier. Raises ``UnreadableInput`` when no root holds it (any more)."""
        for again in (False, True):
            if again:
                self._forget()  # it may have begun since the last walk
            for run in self.runs():
                if run.id == id:
                    return run
            part = self._parts.get(id)
            if part is not None:
                return part
        raise UnreadableInput(f"no run {id!r} under {', '.join(map(str, self.roots))}; see the list of runs")

    def _forget(self) -> None:
        """Let the next look walk again, unless the last walk took long or is just over."""
        with self._lock:
            if time.monotonic() - self._walked > max(_JUST_NOW_S, 10 * self._took_s):
                self._walked = -1e9

    def _walk(self) -> tuple[dict[str, Run], dict[str, Run], tuple[str, ...]]:
        runs: dict[str, Run] = {}
        parts: dict[str, Run] = {}
        notes: list[str] = []
        walker = _Walker()
        for root, label in zip(self.roots, _labels(self.roots), strict=True):
            walker.skipped.clear()
            for found in walker.under(root):
                inner = [run for part in found.parts if (run := _run(part, root, label)) is not None]
                parts |= {run.id: run for run in inner}
                run = _run(found, root, label, tuple(part.id for part in inner))
                if run is not None:
                    runs[run.id] = run
            said = about_skipped(walker.skipped, root)
            notes += [said] if said is not None else []
        if walker.left <= 0:
            notes.append(f"stopped after {_MOST_ENTRIES:,} files; name a folder closer to your runs")
        return runs, parts, tuple(notes)


def _labels(roots: Sequence[Path]) -> list[str]:
    """A short, unique name for each root."""
    labels: list[str] = []
    for root in roots:
        label, again = root.name or "root", 2
        while label in labels:
            label, again = f"{root.name}~{again}", again + 1
        labels.append(label)
    return labels


@dataclass(frozen=True, slots=True)
class _Found:
    """What the walk takes for a run: its files by format. ``parts`` are among them."""

    path: Path
    kind: Kind
    formats: Mapping[Path, str]
    parts: tuple[_Found, ...] = ()


def _run(found: _Found, root: Path, label: str, parts: tuple[str, ...] = ()) -> Run | None:
    inside = found.path.relative_to(root).as_posix() if found.path != root else ""
    newest, total, marks = 0, 0, []
    for file in found.formats:
        try:
            status = file.stat()
        except OSError:
            continue  # it was deleted or renamed since the walk
        newest, total = max(newest, status.st_mtime_ns), total + status.st_size
        marks.append(f"{file.name}:{status.st_mtime_ns}:{status.st_size}")
    if not marks:
        return None
    fingerprint = f"{zlib.crc32(chr(10).join(sorted(marks)).encode()):08x}-{newest}-{total}"
    held = tuple(Counter(found.formats.values()).items())
    # Traces and records lead: what they are of is what the rest is of.
    held = tuple(sorted(held, key=lambda item: (item[0] not in ("trine", _TRACE), item[0])))
    return Run(
        f"{label}/{inside}".rstrip("/"),
        found.path,
        found.kind,
        len(marks),
        total,
        newest / 1e9,
        fingerprint,
        "+".join(format for format, _ in held),
        held,
        parts,
    )


class _Walker:
    """Looks through folders for runs. ``left`` is how many files more it looks at; ``skipped`` are files that
    are called like a profile and are none."""

    def __init__(self) -> None:
        self.left = _MOST_ENTRIES
        self.skipped: list[Path] = []

    def under(self, root: Path, depth: int = 0) -> Iterator[_Found]:
        """The runs of a folder and of those below it; of a file, itself."""
        if root.is_file():
            yield _Found(root, "trace", {root: format_of(root) or _TRACE})
            return
        try:
            entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        except OSError:
            return
        self.left -= len(entries)
        if native.recognizes(root):
            yield _Found(root, "record", self._of_record(root))
            return
        formats: dict[Path, str] = {}
        for entry in entries:
            format = _format(entry)
            if format is not None:
                formats[Path(entry.path)] = format
            elif _is_called_a_profile(entry):
                self.skipped.append(Path(entry.path))
        below = list(self._below(entries, depth))
        if not _is_one_job(formats):
            for path, format in formats.items():
                yield _Found(path, "trace", {path: format})
            yield from below
            return
        parts = _parts(formats, below)
        mixed = len(set(formats.values())) > 1
        alone = [
            _Found(path, "trace", {path: format})
            for path, format in formats.items()
            if mixed and list(formats.values()).count(format) == 1
        ]
        joined = {**formats, **{path: format for part in parts for path, format in part.formats.items()}}
        yield _Found(root, "traces", joined, (*alone, *parts))
        yield from (found for found in below if found not in parts)

    def _below(self, entries: Sequence[os.DirEntry[str]], depth: int) -> Iterator[_Found]:
        for entry in entries:
            skipped = entry.name.startswith(".") or entry.name in _SKIPPED
            # Links to folders are not followed: they lead out of the root, or in circles.
            if entry.is_dir(follow_symlinks=False) and not skipped and depth < _DEEPEST and self.left > 0:
                yield from self.under(Path(entry.path), depth + 1)

    def _of_record(self, root: Path) -> dict[Path, str]:
        """All files of a record's folder: its own, and dumps and snapshots that lie beside them."""
        formats: dict[Path, str] = {}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            self.left -= len(names)
            for path in (Path(folder, name) for name in names):
                format = None if is_of_record(path) or not _may_be_one(path.name) else _format_of_file(path)
                formats[path] = "trine" if format in (None, _TRACE) else str(format)
        return formats


def _parts(formats: Mapping[Path, str], below: Sequence[_Found]) -> list[_Found]:
    """Of the runs in folders below, those that are parts of the job above them: of formats that it lacks, one
    of each, since a job has one set of dumps and two of them are two jobs."""
    above = set(formats.values())
    of: dict[str, list[_Found]] = defaultdict(list)
    for found in below:
        for format in set(found.formats.values()):
            of[format].append(found)
    return [
        found
        for found in below
        if found.kind != "record"
        and all(format not in above and len(of[format]) == 1 for format in found.formats.values())
    ]


def _is_one_job(formats: Mapping[Path, str]) -> bool:
    """Whether the files of a folder are one job: those of each format its ranks, or one file beside ranks of
    another format."""
    if len(formats) < 2:
        return False
    of: dict[str, list[Path]] = defaultdict(list)
    for path, format in formats.items():
        of[format].append(path)
    if len(of) > 1 and all(rank_of_name(path.name) is not None for path in formats):
        return True
    several = {format: paths for format, paths in of.items() if len(paths) > 1}
    return bool(several) and all(_are_ranks(format, paths) for format, paths in several.items())


def _are_ranks(format: str, paths: Sequence[Path]) -> bool:
    """Named alike but for numbers, or each for its rank; models that are numbered are not ranks."""
    if format == _TRACE:
        return len({re.sub(r"\d+", "#", path.name) for path in paths}) == 1
    return all(rank_of_name(path.name) is not None for path in paths)


def _is_called_a_profile(entry: os.DirEntry[str]) -> bool:
    try:
        named = entry.name.lower().endswith((*_SUFFIXES, *_STATED, *FOREIGN))
        return named and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def _may_be_one(name: str) -> bool:
    return name.endswith((*_SUFFIXES, *_OTHERS)) or bool(_DUMP.search(name))


def _format(entry: os.DirEntry[str]) -> str | None:
    """The format of a file that may be a run or a part of one, by its name and its first kilobytes."""
    try:
        if not entry.is_file(follow_symlinks=False) or entry.name.startswith("."):
            return None
        if entry.name.endswith(ARCHIVE_NAMES):
            return _TRACE if _may_hold_runs(Path(entry.path)) else None
        return _format_by_content(Path(entry.path)) if _may_be_one(entry.name) else None
    except OSError:
        return None


def _may_hold_runs(archive: Path) -> bool:
    """Whether an archive is worth a row: zip files are of anything, and list what they hold without unpacking."""
    if archive.suffix.lower() != ".zip":
        return True
    try:
        with zipfile.ZipFile(archive) as opened:
            return any(_may_be_one(name.rpartition("/")[2]) for name in opened.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def _format_of_file(path: Path) -> str | None:
    try:
        return _format_by_content(path) if path.is_file() else None
    except OSError:
        return None  # it was replaced since the walk


_seen: dict[tuple[str, int, int], str | None] = {}


def _format_by_content(path: Path) -> str | None:
    """Remembered until the file changes."""
    status = path.stat()
    key = (str(path), status.st_mtime_ns, status.st_size)
    if key not in _seen:
        named = path.name.endswith(_SUFFIXES)
        if named and _sniff(path):
            _seen[key] = _TRACE
        else:
            found = format_of(path)
            # The traces' reader takes any JSON file, to say what is wrong with it; a list has no room for settings.
            _seen[key] = None if found == _TRACE else found
    return _seen[key]


def _sniff(path: Path) -> bool:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            head = stream.read(65536)
    except (OSError, EOFError, zlib.error):
        # Half a file is shown as a run with its fault, rather than not at all.
        return path.name.endswith(".gz")
    if any(word in head for word in (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')):
        return True
    return head.lstrip()[:1] == b"[" and b'"ph"' in head
