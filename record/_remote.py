"""Files behind a URL (``s3://``, ``gs://``, ``hf://``, ``https://``, anything that fsspec knows), fetched for a job.

Readers read local files, so what is named is copied to a temporary folder first and removed with the
job. What no reader could want (weights, code, pictures) is not fetched, and the disk is never filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from ._expansion import Workspace
from .errors import TrineError, UnreadableInput, UsageError
from .model import Job, Quality, Rank, RankSource

__all__ = ["Fetched", "as_local", "called", "fetch", "is_url", "renamed"]

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+(?:::[^/]*)?://|^[a-z0-9]+::")
_DEEPEST = 5
_MOST_FILES = 100_000
_AT_ONCE = 8

#: What no reader reads, by the end of its name; folders of runs hold weights as well.
_UNWANTED = tuple(
    re.findall(
        r"\.\S+",
        ".pt .pth .bin .ckpt .safetensors .distcp .gguf .onnx .npz .npy .parquet .arrow .feather .csv .tsv .jsonl .py .pyc "
        ".ipynb .md .txt .log .out .err .html .png .jpg .jpeg .gif .svg .pdf .mp4 .wav .yaml .yml .cfg .ini .sh .so .o .whl "
        ".deb .lock .nsys-rep .qdrep .pftrace .pb",
    )
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where a URL's files lie now: ``path`` stands for ``url``."""

    url: str
    path: Path
    notes: list[Quality] = field(default_factory=list)


def is_url(path: str) -> bool:
    """Whether a path names a protocol (``s3://…``); a drive letter (``C:\\``) is none."""
    return _URL.match(path) is not None


def as_local(url: str) -> Path | None:
    """The path of a ``file://`` URL, ``None`` of any other."""
    try:
        parts = urlsplit(url)
    except ValueError:  # an address in brackets that is none: its protocol says what is wrong with it
        return None
    if parts.scheme != "file" or "::" in url:
        return None
    return Path(unquote(parts.path))


def fetch(url: str, workspace: Workspace) -> Fetched:
    """Copy what a URL names (a file, a folder or a glob) into the workspace.

    Raises ``UsageError`` where fsspec or the protocol's package is not installed, ``UnreadableInput``
    where there is nothing, access is denied, or the disk has no room.
    """
    system, place = _open(url)
    with _in_one_line(url):
        found, root = _listed(system, place)
    wanted = {name: size for name, size in found.items() if not name.lower().endswith(_UNWANTED)}
    notes = []
    if len(found) > len(wanted):
        message = f"{len(found) - len(wanted)} files of {url} are of kinds that are never read, and were not fetched"
        notes.append(Quality("not-fetched", "info", message))
    if not wanted:
        inside = (
            f"{len(found)} files, none of a kind that is read" if found else "it is empty or does not exist"
        )
        raise UnreadableInput(f"{url} holds no trace and no record ({inside}); check the address")
    if len(wanted) > _MOST_FILES:
        raise UnreadableInput(
            f"{url} holds {len(wanted):,} files, more than {_MOST_FILES:,}; name the folder of one run"
        )
    workspace.room_for(sum(wanted.values()), url)
    alone = list(wanted) == [root]
    base = workspace.new("" if alone else PurePosixPath(root).name)
    targets = {name: base / _relative(name, root, alone) for name in wanted}
    with _in_one_line(url), ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trine-fetch") as pool:
        for _ in pool.map(lambda item: _copy(system, *item), targets.items()):
            pass
    named = system.unstrip_protocol(root) if any(sign in url for sign in "*?[") and "::" not in url else url
    return Fetched(named, next(iter(targets.values())) if alone else base, notes)


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL and the place in it."""
    try:
        import_module("fsspec")
        core = import_module("fsspec.core")
    except ImportError:
        raise UsageError(
            f"{url} needs fsspec, which is not installed: pip install 'trine[remote]', or copy the files here"
        ) from None
    try:
        system, place = core.url_to_fs(url)
    except ImportError as error:  # its text names the protocol's own package
        raise UsageError(f"{url} cannot be opened: {_line(error)}, or copy the files here") from None
    except ValueError as error:
        raise UsageError(f"{url} cannot be opened: {_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - whatever the protocol's package raises
        raise UnreadableInput(_refusal(url, error)) from None
    return system, str(place)


def _listed(system: Any, place: str) -> tuple[dict[str, int], str]:
    """Files with their sizes, and the folder (or the file) that they lie in."""
    if any(sign in place for sign in "*?[") and not system.exists(place):
        matches = system.glob(place, detail=True)
        files = {name: _size(info) for name, info in matches.items() if info.get("type") != "directory"}
        for name, info in matches.items():
            if info.get("type") == "directory":
                files |= _below(system, name)
        return files, _common_folder(list(files))
    if system.isfile(place):
        return {place: _size(system.info(place))}, place
    return _below(system, place), place.rstrip("/")


def _below(system: Any, folder: str) -> dict[str, int]:
    found = system.find(folder, maxdepth=_DEEPEST, detail=True)
    start = len(folder.rstrip("/")) + 1
    return {
        name: _size(info)
        for name, info in found.items()
        if not any(part.startswith(".") for part in name[start:].split("/"))
    }


def _size(info: dict[str, Any]) -> int:
    return int(info.get("size") or 0)


def _common_folder(names: Sequence[str]) -> str:
    parts = [PurePosixPath(name).parts[:-1] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return str(PurePosixPath(*common)) if common else ""


def _relative(name: str, root: str, alone: bool) -> Path:
    """Where a file goes below the target folder. No name leads out of it."""
    if alone:
        parts = PurePosixPath(urlsplit(name).path or name).parts[-1:]
    else:
        parts = PurePosixPath(name.removeprefix(root)).parts
    safe = [part for part in parts if part not in ("..", ".", "/", "//")]
    return Path(*safe) if safe else Path("file")


def _copy(system: Any, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    system.get_file(name, str(target))


@contextmanager
def _in_one_line(url: str) -> Iterator[None]:
    """What a protocol's package raises is its own affair: credentials, networks, missing buckets."""
    try:
        yield
    except TrineError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the protocol's package raises
        raise UnreadableInput(_refusal(url, error)) from None


def _refusal(url: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{url} does not exist; check the address"
    kind = type(error).__name__
    denied = isinstance(error, PermissionError) or re.search(
        r"credential|denied|forbidden|unauthori[sz]ed|\b40[13]\b|token", f"{kind} {error}", re.IGNORECASE
    )
    advice = (
        "give credentials as that storage's own tools read them (environment or configuration file)"
        if denied
        else "check the address and the network, or copy the files here"
    )
    return f"cannot read {url}: {kind}: {_line(error)}; {advice}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# --- names -------------------------------------------------------------------------------------


def called(text: str, names: Mapping[str, str]) -> str:
    """A text with every temporary path in it called by what the user knows it as; ``names`` in the order to apply them."""
    for path, known in names.items():
        text = text.replace(path, known)
    return text


def renamed(job: Job, names: Mapping[str, str]) -> Job:
    """The job with URLs and archives' names wherever it names files that were fetched or unpacked."""

    sources = tuple(
        replace(source, read=_Renamed(source.read, dict(names)), label=called(source.name, names))
        for source in job.sources
    )
    quality = [replace(note, message=called(note.message, names)) for note in job.quality]
    return replace(job, sources=sources, quality=quality, name=called(str(job.path), names))


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Reads a source and calls its files by what the user knows them as, in errors as well."""

    read: Any
    names: Mapping[str, str]

    def __call__(self, source: RankSource) -> Rank:
        try:
            rank: Rank = self.read(source)
        except TrineError as error:
            raise type(error)(called(str(error), self.names)) from None
        for one in (rank, *rank.windows):
            one.source = called(one.source, self.names)
            one.quality = [replace(note, message=called(note.message, self.names)) for note in one.quality]
        return rank
