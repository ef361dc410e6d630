"""``trine.load``: whatever lies at a path, as a job."""

from __future__ import annotations

import glob
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from . import readers
from .errors import UnreadableInput, UsageError
from .model import Job
from .readers._strangers import name_of

__all__ = ["load"]


class Reader(Protocol):
    """What a module in ``record/readers/`` offers; the registry finds it by its ``FORMAT``."""

    FORMAT: str

    def recognizes(self, path: Path) -> bool:
        """Whether this reader can open the path; cheap, and never raises on a stranger's file."""

    def open_job(self, path: Path) -> Job:
        """The job at the path. Raises ``UnreadableInput`` with one line."""


def load(path: str | Path | Sequence[str | Path]) -> Job:
    """The job at ``path``: ranks that are read when asked for.

    ``path`` is a record's folder, a trace (``.json``, ``.json.gz``), a folder of ranks, a glob
    (``"traces/*.json.gz"``), an archive (``.tar``, ``.tar.gz``), or a list of trace files.

    Raises ``UnreadableInput`` where nothing can be shown, ``UsageError`` for an empty list. What is
    merely odd (missing ranks, damaged files, mixed runs) is said in ``Job.quality`` and
    ``Rank.quality``.
    """
    paths = _paths(path)
    if len(paths) == 1:
        return _reader_of(paths[0]).open_job(paths[0])
    return _load_many(paths)


def _paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    given = [path] if isinstance(path, (str, Path)) else list(path)
    if not given:
        raise UsageError("no path was given; name a trace, a record's folder or a folder of traces")
    found: list[Path] = []
    for each in given:
        if not str(each):  # Path("") is the working folder: an unset variable must not analyse that
            raise UsageError("an empty path was given; is a variable unset? name a trace or a record")
        found += _expand(Path(each).expanduser())
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
    if path.is_symlink():
        raise UnreadableInput(f"{path} is a link to something that does not exist")
    raise UnreadableInput(f"{path} does not exist; check the path, or give the folder that holds the traces")


def _readers() -> Iterator[Reader]:
    """All readers, the native record's first: it knows its folder by one file name."""
    names = [
        module.name for module in pkgutil.iter_modules(readers.__path__) if not module.name.startswith("_")
    ]
    for name in sorted(names, key=lambda name: (name != "native", name)):
        module = importlib.import_module(f"{readers.__name__}.{name}")
        if hasattr(module, "FORMAT"):
            yield cast(Reader, module)


def _reader_of(path: Path) -> Reader:
    known = []
    for reader in _readers():
        if reader.recognizes(path):
            return reader
        known.append(reader.FORMAT)
    stranger = name_of(path)
    if stranger is not None:
        holds = "holds" if path.is_dir() else "is"
        raise UnreadableInput(
            f"{path} {holds} {stranger}, which this version does not read; give a trace of torch.profiler or a record"
        )
    if path.is_dir():
        inside = (
            "it is empty" if next(path.iterdir(), None) is None else "no *.json, *.json.gz or run.json in it"
        )
        raise UnreadableInput(f"{path} holds no trace and no record ({inside}); give the folder that does")
    if not path.is_file():
        raise UnreadableInput(f"{path} is a pipe or a device; write what comes out of it to a file first")
    raise UnreadableInput(
        f"{path} is in no format that can be read ({', '.join(known)}); give a .json or .json.gz trace"
    )


def _load_many(paths: list[Path]) -> Job:
    from .readers import kineto

    for path in paths:
        reader = _reader_of(path)
        if reader.FORMAT != kineto.FORMAT:
            raise UsageError(
                f"{path} is a whole run of its own; load it alone, or compare runs with `trine compare`"
            )
    parents = {path.parent for path in paths}
    origin = parents.pop() if len(parents) == 1 else paths[0]
    return kineto.open_paths(paths, origin)
