"""Which runs lie under the given roots, found by name and by the first kilobytes, never by reading all.

A run is a native record (a folder that :mod:`trine.profiler` wrote), a folder of one job's files (traces, memory
snapshots, dumps, schedules), or a single one of these. A run is known by an identifier made here and looked up here: no path from a request is ever
joined to a root, so nothing outside the roots can be asked for.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trine.record.errors import UnreadableInput
from trine.record.loading import format_of
from trine.record.readers import native
from trine.record.readers._names import rank_of_name

__all__ = ["Catalogue", "Run"]

Kind = Literal["record", "traces", "trace"]

_TRACE = "kineto"
_SUFFIXES = (".json", ".json.gz")
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
#: Of other files than traces, what their names end in, or look like (``nccl_trace_rank_0``); their content decides.
_OTHERS = (".pickle", ".pkl", ".raw.gz", ".sqlite", ".sqlite3", ".db", ".html")
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
    ``fingerprint`` changes when any of them does."""

    id: str
    path: Path
    kind: Kind
    files: int
    size_bytes: int
    updated_s: float
    fingerprint: str
    format: str = "kineto"

    def state(self, now_s: float | None = None) -> str:
        """``running``, ``silent`` (says it runs, but has not written for two minutes), ``finished``,
        ``failed`` or ``stopped`` of a record; ``trace`` of anything else."""
        if self.kind != "record":
            return "trace"
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
                and not root.name.endswith((*_SUFFIXES, *_ARCHIVES))
                and format_of(root) is None
            ):
                raise UnreadableInput(
                    f"{root} is no trace by its name; give a run, a trace, or a folder of them"
                )
        self.roots = tuple(root.resolve() for root in roots)
        self.notes: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._walked, self._took_s = -1e9, 0.0

    def runs(self) -> list[Run]:
        """All runs, the newest first."""
        with self._lock:
            # A walk over slow storage is not worth more than a tenth of the time.
            if time.monotonic() - self._walked > max(_FRESH_S, 10 * self._took_s):
                began = time.monotonic()
                self._runs, self.notes = self._walk()
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
        raise UnreadableInput(f"no run {id!r} under {', '.join(map(str, self.roots))}; see the list of runs")

    def _forget(self) -> None:
        """Let the next look walk again, unless the last walk took long or is just over."""
        with self._lock:
            if time.monotonic() - self._walked > max(_JUST_NOW_S, 10 * self._took_s):
                self._walked = -1e9

    def _walk(self) -> tuple[dict[str, Run], tuple[str, ...]]:
        runs: dict[str, Run] = {}
        budget = [_MOST_ENTRIES]
        for root, label in zip(self.roots, _labels(self.roots), strict=True):
            for path, kind, files, format in _runs_under(root, budget):
                inside = path.relative_to(root).as_posix() if path != root else ""
                run = _run(f"{label}/{inside}".rstrip("/"), path, kind, files, format)
                if run is not None:
                    runs[run.id] = run
        notes: tuple[str, ...] = ()
        if budget[0] <= 0:
            notes = (f"stopped after {_MOST_ENTRIES:,} files; name a folder closer to your runs",)
        return runs, notes


def _labels(roots: Sequence[Path]) -> list[str]:
    """A short, unique name for each root."""
    labels: list[str] = []
    for root in roots:
        label, again = root.name or "root", 2
        while label in labels:
            label, again = f"{root.name}~{again}", again + 1
        labels.append(label)
    return labels


def _run(id: str, path: Path, kind: Kind, files: Sequence[Path], format: str) -> Run | None:
    newest, total, parts = 0, 0, []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue  # it was deleted or renamed since the walk
        newest, total = max(newest, status.st_mtime_ns), total + status.st_size
        parts.append(f"{file.name}:{status.st_mtime_ns}:{status.st_size}")
    if not parts:
        return None
    fingerprint = f"{zlib.crc32(chr(10).join(sorted(parts)).encode()):08x}-{newest}-{total}"
    return Run(id, path, kind, len(parts), total, newest / 1e9, fingerprint, format)


def _runs_under(
    root: Path, budget: list[int], depth: int = 0
) -> Iterator[tuple[Path, Kind, list[Path], str]]:
    if root.is_file():
        yield root, "trace", [root], format_of(root) or _TRACE
        return
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    budget[0] -= len(entries)
    if native.recognizes(root):
        yield root, "record", _files_of_record(root, budget), "trine"
        return
    formats = {Path(entry.path): format for entry in entries if (format := _format(entry)) is not None}
    if _is_one_job(formats):
        yield root, "traces", list(formats), "+".join(sorted(set(formats.values())))
    else:
        for path, format in formats.items():
            yield path, "trace", [path], format
    for entry in entries:
        skipped = entry.name.startswith(".") or entry.name in _SKIPPED
        # Links to folders are not followed: they lead out of the root, or in circles.
        if entry.is_dir(follow_symlinks=False) and not skipped and depth < _DEEPEST and budget[0] > 0:
            yield from _runs_under(Path(entry.path), budget, depth + 1)


def _files_of_record(root: Path, budget: list[int]) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        budget[0] -= len(names)
        files += [Path(folder, name) for name in names]
    return files


def _is_one_job(formats: Mapping[Path, str]) -> bool:
    """Whether the files of a folder are the ranks of one job: named alike but for numbers, or each for its rank."""
    if len(formats) < 2:
        return False
    if len({re.sub(r"\d+", "#", path.name) for path in formats}) == 1:
        return set(formats.values()) == {_TRACE} or all(
            rank_of_name(path.name) is not None for path in formats
        )
    return set(formats.values()) != {_TRACE} and all(rank_of_name(path.name) is not None for path in formats)


def _format(entry: os.DirEntry[str]) -> str | None:
    """The format of a file that may be a run or a part of one, by its name and its first kilobytes."""
    try:
        if not entry.is_file(follow_symlinks=False) or entry.name.startswith("."):
            return None
        if entry.name.endswith(_ARCHIVES):
            return _TRACE
        if entry.name.endswith((*_SUFFIXES, *_OTHERS)) or _DUMP.search(entry.name):
            return _format_by_content(Path(entry.path))
    except OSError:
        return None
    return None


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
