"""From what a user names to the files that readers are asked about: folders walked, archives unpacked.

Walks are bounded (four folders deep, a hundred thousand files) and leave out hidden files. What lies in
an archive beside traces is unpacked into a folder that lives as long as the job; traces stay where they
are, since they are read as streams.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .errors import UnreadableInput
from .model import Quality
from .readers._archives import ARCHIVE_NAMES, DAMAGE, open_archive, wrong_with
from .readers._names import natural

__all__ = ["ARCHIVE_NAMES", "Workspace", "head_of", "inflated", "is_of_record", "unpacked", "walk"]

RecordTest = Callable[[Path], bool]

_DEEPEST = 4
_MOST_FILES = 100_000
_HEAD_BYTES = 1 << 14
_INFLATED_BYTES = 1 << 16
#: Room that is left on the disk that files are unpacked or fetched to.
_SPARE_BYTES = 1 << 30


class Workspace:
    """A temporary folder, made when first asked for and removed with the last job that keeps it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        #: What lies in it → what the user knows it as (``job.tar:member`` of what came out of an archive).
        self.names: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """The folder. Raises ``UnreadableInput`` where none can be made."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="trine-"))
            except OSError as error:
                raise UnreadableInput(
                    f"no temporary folder can be made ({error.strerror or error}); name one in TMPDIR"
                ) from None
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def new(self, name: str) -> Path:
        """An empty folder of that name inside, another one each time."""
        inside = self.folder / f"{len(list(self.folder.iterdir()))}"
        place = inside / name if name else inside
        place.mkdir(parents=True)
        return place

    @property
    def used(self) -> bool:
        """Whether anything lies in it."""
        return self._folder is not None

    def room_for(self, size: int, what: str) -> None:
        """Raises ``UnreadableInput`` where the disk has no room for ``size`` bytes more."""
        free = shutil.disk_usage(self.folder).free
        if size + _SPARE_BYTES > free:
            raise UnreadableInput(
                f"{what} takes {size / 1e9:.1f} GB and {self.folder.parent} has {free / 1e9:.1f} GB free (1 GB must stay); "
                "set TMPDIR to a larger disk, or name fewer files"
            )


@dataclass(slots=True)
class Walk:
    """What a walk through a folder came upon."""

    records: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    inside: list[Path] = field(default_factory=list)  # files within records that the records do not own


def walk(root: Path, is_record: RecordTest, notes: list[Quality]) -> Walk:
    """Files of a folder and its subfolders in order of name. Folders that are records are not taken apart.

    Raises ``UnreadableInput`` when the folder itself cannot be listed.
    """
    found = Walk()
    stack = [(root, 0, False)]
    while stack:
        where, depth, in_record = stack.pop()
        if not in_record and is_record(where):
            found.records.append(where)
            in_record = True
        inner = []
        for entry in _entries(where, root, notes):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if depth < _DEEPEST and not entry.is_symlink():
                    inner.append((entry, depth + 1, in_record))
            elif not in_record:
                found.files.append(entry)
            elif not is_of_record(entry):
                found.inside.append(entry)
        if len(found.files) + len(found.inside) > _MOST_FILES:
            notes.append(
                Quality(
                    "too-many-files",
                    "warning",
                    f"only the first {_MOST_FILES:,} files of {root} were looked at",
                )
            )
            del found.files[_MOST_FILES:]
            break
        stack.extend(reversed(inner))
    return found


def _entries(folder: Path, root: Path, notes: list[Quality]) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: natural(entry.name))
    except OSError as error:
        message = f"cannot read the folder {folder}: {error.strerror or error}"
        if folder == root:
            raise UnreadableInput(message) from None
        notes.append(Quality("unreadable-file", "error", message))
        return []


def is_of_record(path: Path) -> bool:
    """Whether a file in a record's folder is the record's own."""
    return (
        path.name in ("run.json", "rank.json") or path.suffix == ".trine" or path.name.startswith("window-")
    )


# --- heads -------------------------------------------------------------------------------------


def head_of(path: Path) -> bytes:
    """The beginning of a file, decompressed where it is gzip; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return inflated(file.read(_HEAD_BYTES))
    except OSError:
        return b""


def inflated(head: bytes) -> bytes:
    """The beginning of a gzip stream decompressed, anything else as it is."""
    if head[:2] != b"\x1f\x8b":
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _INFLATED_BYTES)
    except zlib.error:
        return b""


# --- archives ----------------------------------------------------------------------------------


def unpacked(path: Path, workspace: Workspace, notes: list[Quality]) -> Iterator[Path]:
    """Members of an archive that are no traces, unpacked under their own names. Traces are left in it.

    Members are written below the workspace whatever their names say; links and devices are skipped.
    """
    place: Path | None = None
    try:
        with open_archive(path) as archive:
            for count, info in enumerate(archive):
                if count >= _MOST_FILES:
                    return
                parts = [part for part in Path(info.name).parts if part not in ("..", "/")]
                if not info.isfile() or not info.size or not parts or parts[-1].startswith("."):
                    continue
                inner = archive.extractfile(info)
                head = inner.read(_HEAD_BYTES) if inner is not None else b""
                if inner is None or not _may_be_something_else(parts[-1], inflated(head)):
                    continue
                workspace.room_for(info.size, f"{path}:{info.name}")
                if place is None:
                    place = workspace.new(path.name)
                    workspace.names[f"{place}/"] = f"{path}:"
                target = place.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                _write(target, head, inner)
                yield target
    except DAMAGE as error:
        # The reader of traces reads the archive too and says what is wrong with it, unless it needs none.
        notes.append(Quality("damaged-archive", "error", f"{path} is {wrong_with(error)}"))


def _may_be_something_else(name: str, head: bytes) -> bool:
    """Whether a member can be of a format other than a trace's: its head alone is looked at."""
    if b'"traceEvents"' in head or head.lstrip()[:1] not in (b"{", b"[", b"\x80", b"S", b"("):
        return False
    return not name.lower().endswith((".py", ".txt", ".log", ".md", ".sh", ".yaml", ".toml", ".cfg"))


def _write(target: Path, head: bytes, rest: IO[bytes]) -> None:
    with target.open("wb") as file:
        file.write(head)
        shutil.copyfileobj(rest, file, 1 << 20)
