"""Checksums of everything that a checkpoint holds: made while it is written, compared while it is read.

Each item of a tensor file has one of its own, so that a rank that reads a few of a file's items verifies those, and an
error names the tensor. They are CRC-32 (as in zip, gzip and PNG): made against accidents of disks and memory, at some GB/s.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from trine.record.errors import UnreadableInput

__all__ = ["Damaged", "Reader", "Writer", "flush_file", "flush_folder", "read_whole", "write_whole"]

#: (offset, bytes, CRC-32) of an item.
Item = tuple[int, int, int]

#: Of a file: ``bytes``, and ``items``, which lie one behind the other and are all of it.
Described = dict[str, Any]


class Damaged(UnreadableInput):
    """A checkpoint that is not what was written; an older one may be."""


# --- writing -----------------------------------------------------------------------------------


class _Summed(io.RawIOBase):
    """A stream to a file that sums what is written between two :meth:`tell`: DCP asks before and after each item."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin = self._end = self._sum = 0
        self.items: list[Item] = []
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:  # torch.save says of it only that writing failed
            self.failed = error
            raise
        self._sum = zlib.crc32(view, self._sum)
        self._end += len(view)
        return len(view)

    def tell(self) -> int:
        if self._end > self._begin:
            self.items.append((self._begin, self._end - self._begin, self._sum))
            self._begin, self._sum = self._end, 0
        return self._end

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # it is asked for to call fsync, and DCP leaves out to flush .metadata before
        return self._file.fileno()

    def described(self) -> Described:
        self.tell()
        return {"bytes": self._end, "items": self.items}


class _SummedFiles(FileSystem):
    """What DCP writes through: keeps the checksums of each file, by its name."""

    def __init__(self) -> None:
        self.described: dict[str, Described] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode) as file:
            stream = _Summed(cast(IO[bytes], file))
            try:
                yield stream
            except Exception as error:
                if stream.failed is not None and error is not stream.failed:
                    raise stream.failed from error
                raise
            self.described[Path(path).name] = stream.described()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.described[Path(new_path).name] = self.described.pop(Path(path).name)


class Writer(FileSystemWriter):
    """DCP's, whose files are summed and flushed to the disk; other readers of DCP read them as any."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs: _SummedFiles = _SummedFiles()

    @property
    def described(self) -> dict[str, Described]:
        """File's name → what the description says of it, of those that this process has written."""
        return self.fs.described


def write_whole(path: Path, data: bytes | memoryview) -> Described:
    """Write a small file and flush it to the disk; what the description says of it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "items": [(0, len(data), zlib.crc32(data))]}


def flush_file(path: Path) -> None:
    """Make what somebody else has written to it last."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in it last. Nothing where a file system has no such thing."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)


# --- reading -----------------------------------------------------------------------------------


def read_whole(path: Path, described: Described | None) -> bytes:
    """A small file, verified. ``None``: an old checkpoint, which has no checksums. Raises :class:`Damaged`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path} of the checkpoint cannot be read: {error.strerror}") from error
    if described is not None:
        _require(data, _item(described["items"][0]), str(path))
    return data


def _item(read: Any) -> Item:
    offset, size, checksum = read  # JSON has lists
    return int(offset), int(size), int(checksum)


def _require(data: bytes, item: Item, what: str) -> None:
    if len(data) != item[1]:
        raise Damaged(f"the checkpoint is damaged: {what} ends after {len(data)} of {item[1]} bytes")
    if zlib.crc32(data) != item[2]:
        raise Damaged(f"the checkpoint is damaged: {what} is not what was written, by its checksum")


class Reader(FileSystemReader):
    """DCP's, which verifies each item before it is used. ``files``: what the description says of them."""

    def __init__(self, folder: Path, files: dict[str, Described] | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files
        self._items: dict[tuple[str, int], Item] = {}
        for name, described in (files or {}).items():
            for item in map(_item, described["items"]):
                self._items[name, item[0]] = item
        self._names: dict[tuple[str, int], str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """It is a pickle: verified before it is opened."""
        read_whole(self._folder / ".metadata", None if self._files is None else self._files.get(".metadata"))
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note which tensor lies where."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._names = {
            (info.relative_path, info.offset): index.fqn for index, info in self.storage_data.items()
        }

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        place = (sinfo.relative_path, sinfo.offset)
        what = f"{self._folder / sinfo.relative_path}, in which {self._names.get(place, 'a tensor')} is,"
        data = super()._slice_file(file, sinfo).read(-1)
        if self._files is not None:
            if place not in self._items:
                raise Damaged(f"the checkpoint is damaged: {what} has no checksum in its description")
            _require(data, self._items[place], what)
        elif len(data) != sinfo.length:
            raise Damaged(f"the checkpoint is damaged: {what} ends after {len(data)} of {sinfo.length} bytes")
        return io.BytesIO(data)

    def read_into(self, planner: Any) -> None:
        """Carry out what ``planner`` wants, in this process alone. Raises ``UnreadableInput``."""
        metadata = self.read_metadata()
        planner.set_up_planner({}, metadata, True)
        self.set_up_storage_reader(metadata, True, rank=0)
        plan = self.prepare_local_plan(planner.create_local_plan())
        plan = self.prepare_global_plan(planner.create_global_plan([plan]))[0]
        with torch.no_grad():
            self.read_data(planner.finish_plan(plan), planner).wait()
