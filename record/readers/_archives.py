"""Archives as a list of members that are read as streams and never extracted: tar in all its forms, and zip.

A zip archive says beforehand what it unpacks to, and no more than that is read of a member. One that is
encrypted, whose members lie over each other, or that unpacks to what no trace does, is refused before.
"""

from __future__ import annotations

import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

__all__ = ["ARCHIVE_NAMES", "DAMAGE", "RefusedArchive", "ZipMember", "open_archive", "wrong_with"]

ARCHIVE_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

#: What reading an archive may raise.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error)

#: A member of a zip archive beyond both is no trace: JSON of the most even run shrinks to a fiftieth.
_LARGE_BYTES, _MOST_TIMES = 1 << 30, 300

_BROKEN = (
    ValueError,
    IndexError,
    OverflowError,
    struct.error,
    NotImplementedError,  # another compression
    RuntimeError,  # a password is needed
    lzma.LZMAError,
    zlib.error,
    EOFError,
)


class RefusedArchive(zipfile.BadZipFile):
    """An archive that is whole and is not read; the message says what it is."""


class ZipMember:
    """A member of a zip archive as ``tarfile`` describes one."""

    def __init__(self, info: zipfile.ZipInfo) -> None:
        self.info = info
        self.name = info.filename
        self.size = info.file_size

    def isfile(self) -> bool:
        """Whether it is neither a folder nor a link."""
        return not self.info.is_dir() and not stat.S_ISLNK(self.info.external_attr >> 16)


class _Contents:
    """The bytes of a member. Whatever is wrong with them is a ``BadZipFile``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except _BROKEN as error:
            raise zipfile.BadZipFile(str(error)) from None


class _Zip:
    """A zip archive with the part of ``tarfile.TarFile``'s interface that is used here."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except _BROKEN as error:
            raise zipfile.BadZipFile(str(error)) from None
        try:
            _check(self._zip.infolist(), path.stat().st_size)
        except RefusedArchive:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def __iter__(self) -> Iterator[ZipMember]:
        return (ZipMember(info) for info in self._zip.infolist())

    def extractfile(self, member: ZipMember) -> IO[bytes]:
        try:
            return cast("IO[bytes]", _Contents(self._zip.open(member.info)))
        except _BROKEN as error:
            raise zipfile.BadZipFile(str(error)) from None


def _check(members: list[zipfile.ZipInfo], size: int) -> None:
    """Raises ``RefusedArchive`` with what an archive is that is not read."""
    names = {member.filename.rpartition("/")[2] for member in members}
    if {"data.pkl", "version"} <= names:
        raise RefusedArchive(
            "what torch.save wrote, and not an archive of traces; save a memory snapshot with "
            "torch.cuda.memory._dump_snapshot or pickle.dump"
        )
    if any(member.flag_bits & 1 for member in members):
        raise RefusedArchive("an encrypted archive; unpack it with its password")
    packed = sum(member.compress_size for member in members)
    huge = [
        member
        for member in members
        if member.file_size > _LARGE_BYTES and member.file_size > _MOST_TIMES * max(member.compress_size, 1)
    ]
    if packed > size or huge:
        unpacked = sum(member.file_size for member in members)
        raise RefusedArchive(
            f"an archive that unpacks to {unpacked / 1e9:,.1f} GB from {size / 1e6:,.1f} MB, as no traces do; it is not unpacked"
        )


def open_archive(path: Path) -> Any:
    """An archive for reading members in order, in a ``with``; one that is not a compressed tar can skip to any.

    Members have ``name``, ``size`` and ``isfile()``; ``extractfile(member)`` is a stream. Raises one of :data:`DAMAGE`.
    """
    if path.name.lower().endswith(".zip"):
        return _Zip(path)
    try:
        return tarfile.open(path, "r:")
    except tarfile.ReadError:
        return tarfile.open(path, "r|*")


def wrong_with(error: BaseException) -> str:
    """What follows ``… is`` in a sentence about an archive that raised one of :data:`DAMAGE`."""
    if isinstance(error, RefusedArchive):
        return str(error)
    return f"damaged ({getattr(error, 'strerror', None) or str(error) or type(error).__name__})"
