"""``trine.load``: whatever lies at a path, as a job.

Every file is shown to the readers, and each says which are its own. Files of several formats (traces,
memory snapshots, dumps, schedules, a record) are one job: :mod:`._joining` joins their ranks.
"""

from __future__ import annotations

import glob
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from . import readers
from ._expansion import ARCHIVE_NAMES, Workspace, head_of, unpacked, walk
from ._joining import PRIMACY, join_jobs
from ._remote import Fetched, as_local, called, fetch, is_url, renamed
from .errors import UnreadableInput, UsageError
from .model import Job, Quality
from .readers._strangers import name_of, unread_files

__all__ = ["format_of", "load"]

_RECORD, _TRACE = "trine", "kineto"
_TRACE_NAMES = (".json", ".json.gz", ".json.gzip")


class Reader(Protocol):
    """What a module in ``record/readers/`` offers; the registry finds it by its ``FORMAT``."""

    FORMAT: str

    def recognizes(self, path: Path) -> bool:
        """Whether this reader can open the path; cheap, and never raises on a stranger's file."""

    def open_job(self, path: Path) -> Job:
        """The job at the path. Raises ``UnreadableInput`` with one line."""

    def open_paths(self, paths: Sequence[Path], origin: Path) -> Job:
        """The job of several files. Readers whose job is always one folder lack it."""


def load(path: str | Path | Sequence[str | Path]) -> Job:
    """The job at ``path``: ranks that are read when asked for.

    ``path`` is a record's folder, a file of any format that a reader knows (``docs/reading.md``), a folder
    of such files, a glob (``"traces/*.json.gz"``), an archive (``.tar``, ``.tar.gz``, ``.zip``), a URL (``s3://…``,
    with the extra ``remote``), or a list of these. All of it is one job: of files of several formats each
    rank is joined.

    Raises ``UnreadableInput`` where nothing can be shown, ``UsageError`` for an empty list or several
    records. What is merely odd (missing ranks, damaged files, mixed runs) is said in ``Job.quality`` and
    ``Rank.quality``.
    """
    workspace = Workspace()
    fetched: list[Fetched] = []
    paths = _paths(path, workspace, fetched)
    try:
        job = _load(paths, workspace)
    except (UnreadableInput, UsageError) as error:
        raise type(error)(called(str(error), _names(workspace, fetched))) from None
    if workspace.used:
        job = replace(job, keep=[each for each in (job.keep, workspace) if each is not None])
    if names := _names(workspace, fetched):
        job = renamed(job, names)
        job.quality += [note for one in fetched for note in one.notes]
    return job


def _names(workspace: Workspace, fetched: Sequence[Fetched]) -> dict[str, str]:
    """Temporary paths → what the user knows them as; an archive's members first, since it may have been fetched."""
    return {**workspace.names, **{str(one.path): one.url.rstrip("/") for one in fetched}}


# --- paths -------------------------------------------------------------------------------------


def _paths(
    path: str | Path | Sequence[str | Path], workspace: Workspace, fetched: list[Fetched]
) -> list[Path]:
    if not isinstance(path, (str, Path, Iterable)):
        raise UsageError(f"path must be a trace, a record's folder or a list of these, not {path!r}")
    given = [path] if isinstance(path, (str, Path)) else list(path)
    if not given:
        raise UsageError("no path was given; name a trace, a record's folder or a folder of traces")
    found: list[Path] = []
    for each in given:
        if not str(each):  # Path("") is the working folder: an unset variable must not analyse that
            raise UsageError("an empty path was given; is a variable unset? name a trace or a record")
        local = as_local(each) if isinstance(each, str) else None
        if isinstance(each, str) and local is None and is_url(each):
            fetched.append(fetch(each, workspace))
            found.append(fetched[-1].path)
        else:
            found += _expand(Path(local or each).expanduser())
    return list(dict.fromkeys(found))


def _expand(path: Path) -> list[Path]:
    try:
        if path.exists():
            return [path]
        pattern = str(path)
        # Path.glob wants a relative pattern; the user's may be either.
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else []  # noqa: PTH207
    except (OSError, ValueError) as error:  # names that are too long or hold a NUL
        raise UnreadableInput(f"{str(path)[:200]!r} is not a usable path: {error}") from None
    if matches:
        return [Path(match) for match in matches]
    if glob.has_magic(str(path)):
        raise UnreadableInput(f"no file matches {path}; quote the pattern and check the folder")
    if re.match(r"[a-z][a-z0-9+.-]+:/[^/]", str(path)):
        raise UnreadableInput(f"{path} is a URL that a Path object has shortened; give it as text")
    if path.is_symlink():
        raise UnreadableInput(f"{path} is a link to something that does not exist")
    raise UnreadableInput(f"{path} does not exist; check the path, or give the folder that holds the traces")


# --- readers -----------------------------------------------------------------------------------


#: Readers that most jobs need and no others: a trace must not wait until all are imported.
_MODULES = {_RECORD: "native", _TRACE: "kineto"}


@cache
def _reader(format: str) -> Reader:
    name = _MODULES.get(format)
    if name is None:
        return _readers()[format]
    return cast(Reader, importlib.import_module(f"{readers.__name__}.{name}"))


@cache
def _readers() -> dict[str, Reader]:
    """All readers by format, the record's and the traces' last: files are shown to the others first, since
    the traces' takes any JSON file to say what is wrong with it."""
    names = [
        module.name for module in pkgutil.iter_modules(readers.__path__) if not module.name.startswith("_")
    ]
    found = {}
    for name in names:
        module = importlib.import_module(f"{readers.__name__}.{name}")
        if hasattr(module, "FORMAT"):
            found[module.FORMAT] = cast(Reader, module)
    order = sorted(found, key=lambda format: (format in _MODULES, format))
    return {format: found[format] for format in order}


def format_of(path: Path) -> str | None:
    """The format of a file by its content; a JSON file that is none of the others' goes to the traces' reader."""
    if not path.is_file():  # opening a pipe that nobody writes to would wait for ever
        return None
    if path.name.lower().endswith(ARCHIVE_NAMES):
        return _TRACE
    head = head_of(path)
    if b'"traceEvents"' in head and head.lstrip()[:1] == b"{":
        return _TRACE
    for format, reader in _readers().items():
        if format not in (_RECORD, _TRACE) and reader.recognizes(path):
            return format
    if path.name.lower().endswith(_TRACE_NAMES):
        return _TRACE
    # A source file that mentions traceEvents is no trace.
    return _TRACE if head.lstrip()[:1] in (b"{", b"[") and _reader(_TRACE).recognizes(path) else None


def _is_record(folder: Path) -> bool:
    """Whether a folder is a record. People call folders of traces ``rank-0`` too: a description must lie there."""
    described = (folder / "run.json").is_file() or (folder / "rank.json").is_file()
    described = described or next(folder.glob("rank-*/rank.json"), None) is not None
    return described and _reader(_RECORD).recognizes(folder)


# --- the job -----------------------------------------------------------------------------------


class _Claims:
    """Which paths are whose, and what is left."""

    def __init__(self, workspace: Workspace) -> None:
        self.of: dict[str, list[Path]] = defaultdict(list)
        self.left: list[Path] = []
        self.notes: list[Quality] = []
        self._workspace = workspace

    def add(self, path: Path) -> None:
        """Look at what a user named: a folder or a file."""
        if not path.is_dir():
            self._add_file(path)
            return
        found = walk(path, _is_record, self.notes)
        self.of[_RECORD] += found.records
        for file in found.files:
            self._add_file(file)
        for file in found.inside:
            # Within a record's folder only its own files are traces.
            format = format_of(file)
            if format is not None and format != _TRACE:
                self.of[format].append(file)

    def _add_file(self, path: Path) -> None:
        format = format_of(path)
        if format is None:
            self._leave(path)
            return
        self.of[format].append(path)
        if path.name.lower().endswith(ARCHIVE_NAMES):
            for member in unpacked(path, self._workspace, self.notes):
                inner = format_of(member)
                if inner is not None and inner != _TRACE:
                    self.of[inner].append(member)

    def _leave(self, path: Path) -> None:
        try:
            path.stat()
        except OSError as error:  # a link that leads nowhere
            message = f"cannot read {path}: {error.strerror or error}"
            self.notes.append(Quality("unreadable-file", "error", message))
        else:
            self.left.append(path)

    def formats(self) -> list[str]:
        """Formats that have any path, the leading one first."""
        found = [format for format, paths in self.of.items() if paths]
        return sorted(
            found, key=lambda format: (PRIMACY.index(format) if format in PRIMACY else len(PRIMACY), format)
        )


def _load(paths: list[Path], workspace: Workspace) -> Job:
    claims = _Claims(workspace)
    for path in paths:
        claims.add(path)
    formats = claims.formats()
    if not formats:
        raise UnreadableInput(_refusal(paths[0]) if len(paths) == 1 else _refusals(paths))
    origin = _origin(paths)
    records = claims.of[_RECORD]
    if len(records) > 1:
        some = ", ".join(str(record) for record in records[:3]) + (", ..." if len(records) > 3 else "")
        raise UsageError(
            f"there are {len(records)} records ({some}), and each is a whole run of its own; load one alone, "
            "or compare runs with `trine compare`"
        )
    if formats == [_TRACE] and len(paths) == 1:
        job = _traces_alone(paths[0], claims.of[_TRACE])
        claims.notes = [note for note in claims.notes if note.id != "damaged-archive"]  # the reader says it
    else:
        job = _mixed(formats, claims, origin)
    unread = unread_files(claims.left, origin, given=paths)
    return replace(job, quality=[*job.quality, *claims.notes, *unread])


def _origin(paths: list[Path]) -> Path:
    if len(paths) == 1:
        return paths[0]
    parents = {path.parent for path in paths}
    return parents.pop() if len(parents) == 1 else paths[0]


def _traces_alone(path: Path, files: list[Path]) -> Job:
    """Traces and nothing else; what is wrong with a folder of none is the reader's to say."""
    reader = _reader(_TRACE)
    try:
        job = reader.open_paths(files, path)
    except UnreadableInput:
        job = reader.open_paths([path], path)
    return replace(job, formats=(_TRACE,))


def _mixed(formats: list[str], claims: _Claims, origin: Path) -> Job:
    """One job of several formats. What one reader refuses is a note while another finds something."""
    jobs: list[Job] = []
    # Words alone: an error would keep this frame alive, and with it the unpacked files.
    refused: list[tuple[str, str]] = []
    for format in formats:
        try:
            jobs.append(_opener(format)(claims.of[format], origin))
        except UnreadableInput as error:
            refused.append((format, str(error)))
    if not jobs:
        raise UnreadableInput(refused[0][1])
    for format, why in refused:
        claims.notes += _about_refused(format, claims.of[format], why)
    return join_jobs(jobs, origin)


def _opener(format: str) -> Callable[[Sequence[Path], Path], Job]:
    reader = _reader(format)
    if hasattr(reader, "open_paths"):
        return reader.open_paths
    return lambda paths, _: reader.open_job(paths[0])


def _about_refused(format: str, paths: list[Path], error: str) -> Iterator[Quality]:
    """A JSON file that happens to lie beside dumps is no fault; a file of a known format that cannot be read is."""
    archives = [path for path in paths if path.name.lower().endswith(ARCHIVE_NAMES)]
    marked = any(b'"traceEvents"' in head_of(path) for path in paths)
    if format != _TRACE or marked:
        yield Quality("unreadable-part", "error", error)
        return
    for path in paths:
        if path not in archives:
            yield Quality("not-a-trace", "info", f"{path} is not a trace and was left out")


#: Paths of which a refusal of several says what each is.
_MOST_REFUSED = 4


def _refusals(paths: Sequence[Path]) -> str:
    """Why nothing at several paths can be read: what each of the first is."""
    said = []
    for path in paths[:_MOST_REFUSED]:
        stranger = name_of(path)
        empty = path.is_file() and path.stat().st_size == 0
        said.append(
            f"{path} {f'is {stranger}' if stranger else 'is empty' if empty else 'is in no known format'}"
        )
    more = f"; {len(paths) - _MOST_REFUSED} more" if len(paths) > _MOST_REFUSED else ""
    return f"none of the {len(paths)} paths can be read ({'; '.join(said)}{more}); known formats: {', '.join(_readers())}"


def _refusal(path: Path) -> str:
    """Why nothing at a path can be read, and what to do instead."""
    stranger = name_of(path)
    if stranger is not None:
        holds = "holds" if path.is_dir() else "is"
        return (
            f"{path} {holds} {stranger}, which this version does not read; "
            "give a trace of torch.profiler or a record"
        )
    if path.is_dir():
        inside = (
            "it is empty" if next(path.iterdir(), None) is None else "no *.json, *.json.gz or run.json in it"
        )
        return f"{path} holds no trace and no record ({inside}); give the folder that does"
    if not path.is_file():
        return f"{path} is a pipe or a device; write what comes out of it to a file first"
    known = ", ".join(_readers())
    return f"{path} is in no format that can be read ({known}); give a .json or .json.gz trace"
