"""A file for state that does not fit into memory: reserved when it is made, nameless, mapped, and checked.

Our own threads read and write it by position: an error of the disk is then an exception, where a mapping would kill the
process. Everybody else (a checkpoint, the program) sees ordinary tensors over a shared mapping of the same pages. The
space is reserved with ``posix_fallocate``, so that a full disk is found before training and a mapped page is always there.

Each span that is written has a checksum in memory, which every read of ours compares: Σ wᵢ·(2i+1) over its 8-byte words
modulo 2⁶⁴. Odd weights are units there, so that damage within one word is always seen, and reordered words are too. It
runs at twice the speed of ``zlib.crc32`` here, which one thread of a fast disk would wait for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from trine.record.errors import TrainingError, UsageError

__all__ = ["DamagedTier", "Region", "TierFile", "checksum_of", "page_rounded"]

_PAGE = 4096
#: Words of a checksum's parts: their weights stay in the cache.
_WORDS = 1 << 16


class DamagedTier(TrainingError):
    """A tile that cannot be read or written, or is not what was written. A step may have been half done."""

    #: Parameters are not as they were before the step: the engine must not go on.
    half_done = True


def page_rounded(size: int) -> int:
    """Bytes, up to a whole page."""
    return -(-size // _PAGE) * _PAGE


@lru_cache(maxsize=1)
def _weights() -> torch.Tensor:
    return torch.arange(_WORDS, dtype=torch.int64).mul_(2).add_(1)


def checksum_of(data: torch.Tensor) -> int:
    """Of a contiguous uint8 tensor on the CPU, whose memory is aligned to 8 bytes; 64 bits."""
    words, rest = divmod(data.numel(), 8)
    total = data.numel()
    if words:
        whole = data[: words * 8].view(torch.int64)
        for start in range(0, words, _WORDS):
            piece = whole[start : start + _WORDS]
            # The parts are chained by an odd factor, so that they cannot change places either.
            total = (total * 0x9E3779B97F4A7C15 + int(torch.dot(piece, _weights()[: piece.numel()]))) % 2**64
    for byte in data[words * 8 :].tolist() if rest else ():
        total = (total * 257 + byte) % 2**64
    return total


class TierFile:
    """``size`` bytes under ``folder``. Raises ``UsageError`` where there is no room for them, with what there is."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = page_rounded(max(size, 1))
        self._taken = 0
        # Not named, or unlinked at once: it is gone when the process ends, however it ends.
        self._file = tempfile.TemporaryFile(dir=folder, prefix="trine-tier-", buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.size)
        except OSError as error:
            self._file.close()
            raise UsageError(_no_room(folder, self.size, error)) from error
        self._mapping = mmap.mmap(self._file.fileno(), self.size)

    def take(self, name: str, key: str, like: torch.Tensor, dtype: torch.dtype) -> Region:
        """The next free place in the file, for a tensor of ``like``'s shape and order of dimensions, on pages of its own."""
        size = like.numel() * dtype.itemsize
        offset, self._taken = self._taken, self._taken + page_rounded(size)
        assert self._taken <= self.size, "the file was made too small"
        # Each over a storage of its own: views of one would share its version, and a write to one be a write to all.
        flat = (
            torch.frombuffer(self._mapping, dtype=dtype, count=like.numel(), offset=offset)
            if size
            else torch.empty(0, dtype=dtype)
        )
        strides = torch.empty_like(like, device="meta").stride()  # without gaps
        return Region(self, offset, name, key, flat.as_strided(like.shape, strides))

    @property
    def descriptor(self) -> int:
        """Of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """Let the file go. Tensors over its mapping stay valid as long as somebody holds them."""
        self._file.close()


class Region:
    """One tensor in the file: a parameter, or a moment of one.

    ``tensor`` is mapped: reading it reads the disk. What is written to it from outside (a checkpoint that is loaded) is
    seen by its version, and then taken as it is: at the end of a load, or where the program wrote it, at the next use.
    """

    def __init__(self, file: TierFile, offset: int, name: str, key: str, tensor: torch.Tensor) -> None:
        self.file = file
        self.name = name
        self.key = key
        self.tensor = tensor
        self.bytes = tensor.numel() * tensor.element_size()
        self._offset = offset
        self._spans: list[tuple[int, int]] = []  # (start, end) in elements: what is read and written at once
        self._sums: dict[tuple[int, int], int] = {}  # of spans that were written
        self._watched: list[Any] = [tensor]
        self._version = self._versions()
        self._lock = threading.Lock()

    def cut(self, spans: Sequence[tuple[int, int]]) -> None:
        """Where it is cut from now on; what is there already is to be trusted anew."""
        self._spans = list(spans)

    def watch(self, tensor: torch.Tensor) -> None:
        """Another tensor over the same memory, whose changes are the program's own."""
        self._watched.append(tensor)
        self._version = self._versions()

    def _versions(self) -> int:
        return sum(tensor._version for tensor in self._watched)

    def read(self, start: int, end: int, into: torch.Tensor) -> None:
        """Elements [start, end) in the order of memory into ``into`` (uint8). Raises :class:`DamagedTier`."""
        size = self.tensor.element_size()
        data = _memory_of(into)
        offset = self._offset + start * size
        try:
            while data:
                count = os.preadv(self.file.descriptor, [data], offset)
                if count == 0:
                    raise OSError("the file is shorter than what was written")
                data, offset = data[count:], offset + count
        except OSError as error:
            raise self._failed("cannot be read", start, end, error) from error
        self._compare(start, end, into)

    def read_whole(self, into: torch.Tensor) -> None:
        """All of it into ``into`` (uint8), span by span as it was written. Raises :class:`DamagedTier`."""
        size = self.tensor.element_size()
        for start, end in list(self._sums):
            self.read(start, end, into[start * size : end * size])

    def write(self, start: int, end: int, values: torch.Tensor) -> None:
        """Elements [start, end) from ``values`` (uint8). Raises :class:`DamagedTier` where the disk fails."""
        found = checksum_of(values)
        data = _memory_of(values)
        offset = self._offset + start * self.tensor.element_size()
        try:
            while data:
                count = os.pwrite(self.file.descriptor, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise self._failed("cannot be written", start, end, error) from error
        with self._lock:
            self._sums[start, end] = found

    def fill(self, values: torch.Tensor) -> None:
        """Take a whole tensor in, of the region's shape, as what is right from now on."""
        with torch.no_grad():
            self.tensor.copy_(values)
        self.trust()

    def trust(self) -> None:
        """What is in the file is right, as the program wrote it: the checksums of its spans are taken anew."""
        flat = self.tensor.as_strided((self.tensor.numel(),), (1,)).view(torch.uint8)
        size = self.tensor.element_size()
        self._sums = {(a, b): checksum_of(flat[a * size : b * size]) for a, b in self._spans}
        self._version = self._versions()

    def notice(self) -> None:
        """See whether the program wrote to it since; to be called where nothing of ours is under way."""
        if self._versions() != self._version:
            self.trust()

    def verify(self) -> None:
        """Read all that was written, and compare. Raises :class:`DamagedTier`."""
        size = self.tensor.element_size()
        for start, end in list(self._sums):
            self.read(start, end, torch.empty((end - start) * size, dtype=torch.uint8))

    def _compare(self, start: int, end: int, data: torch.Tensor) -> None:
        wanted = self._sums.get((start, end))
        if wanted is not None and wanted != checksum_of(data):
            unseen = ", or the program wrote to its .data, unseen (write to the parameter itself under torch.no_grad())"
            unseen = unseen if self.key == "values" else ""
            raise self._failed(
                f"is not what was written there: the disk or its file is damaged{unseen}", start, end
            )

    def _failed(self, what: str, start: int, end: int, error: OSError | None = None) -> DamagedTier:
        reason = "" if error is None else f": {error.strerror or error}"
        return DamagedTier(
            f"elements {start} to {end} of {self.name}'s {self.key}, at byte {self._offset + start * self.tensor.element_size()} "
            f"of the file under offload.path = {self.file.folder}, {what}{reason}: start again from a checkpoint, on another disk"
        )


def _memory_of(data: torch.Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU. A view by numpy would forbid its storage to be resized ever after."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def _no_room(folder: Path, size: int, error: OSError) -> str:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return (
        f"offload.path = {folder}: {size} bytes are needed there and {free} are free ({error.strerror or error}): make room, "
        "name another folder, or offload less"
    )
