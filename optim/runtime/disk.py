"""Saved activations on disk: written behind the forward, read ahead of the backward, by threads.

Tensors go through buffers in the host's memory, of which only so many bytes wait to be written: a slow disk then slows
the forward, and memory stays bounded. The file never has a name of its own, so that it is gone when the process ends,
however it ends. Its space is reserved before it is written: a full disk is an error where it happens, in one line, and
not a signal that kills the process, as it would be in a memory-mapped file.

What is written has a checksum in memory, which every read compares: a wrong activation would be a wrong gradient, unseen.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

from trine.optim.runtime.activation_schedule import Link
from trine.optim.runtime.host_memory import Copier, HostMemory, Offloaded, Timed
from trine.optim.runtime.tiers.files import checksum_of
from trine.record.errors import TrainingError

__all__ = ["Disk"]

#: Bytes that may wait to be written.
STAGED_BYTES = 256 * 2**20
THREADS = 2
_PAGE = 4096


class Disk(HostMemory):
    """A store in one nameless file under ``folder``. Raises ``TrainingError`` where the disk is full or fails."""

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        staged_bytes: int = STAGED_BYTES,
        copier: Copier | None = None,
    ) -> None:
        super().__init__(device, copier)
        self._folder = folder
        self._staged_bytes = staged_bytes
        self._file = tempfile.TemporaryFile(dir=folder, prefix="trine-activations-", buffering=0)  # noqa: SIM115
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="trine-disk")
        self._writing: deque[OnDisk] = deque()
        self._free: list[tuple[int, int]] = []  # (bytes, offset), the smallest first
        self._returned: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._lock = threading.Lock()
        #: Bytes that the file takes.
        self.file_bytes = 0

    def take_extent(self, size: int) -> tuple[int, int]:
        """(bytes, offset) of a place in the file. Raises ``TrainingError`` where it cannot grow."""
        rounded = -(-size // _PAGE) * _PAGE
        with self._lock:
            while not self._returned.empty():
                self._free.append(self._returned.get())
            self._free.sort()
            for position, (free, _) in enumerate(self._free):
                if rounded <= free <= 2 * rounded:
                    return self._free.pop(position)
            try:
                os.posix_fallocate(self._file.fileno(), self.file_bytes, rounded)
            except OSError as error:
                raise self._failed(error, f"has {self.file_bytes} bytes and needs {rounded} more") from error
            self.file_bytes += rounded
            return rounded, self.file_bytes - rounded

    def give_extent(self, extent: tuple[int, int]) -> None:
        """To be written again. Takes no lock: finalizers call it, wherever a garbage collection runs."""
        self._returned.put(extent)

    def write(self, entry: OnDisk) -> None:
        """Begin to write; waits where too many bytes are waiting already."""
        entry.written = self._threads.submit(self._write, entry)
        self._writing.append(entry)
        while self._writing and self._writing[0].written.done():
            self._settle(self._writing.popleft())
        while sum(each.bytes for each in self._writing) > self._staged_bytes and len(self._writing) > 1:
            self._settle(self._writing.popleft())

    def read(self, entry: OnDisk) -> Future[torch.Tensor]:
        """Begin to read."""
        return self._threads.submit(self._read, entry)

    def settle(self, entry: OnDisk) -> torch.Tensor:
        """The bytes, in the host's memory: they never left it, or are read."""
        if entry.reading is None:
            return entry.buffer
        try:
            return entry.reading.result()
        except OSError as error:
            raise self._failed(error, "cannot be read") from error

    def measured_link(self, size: int) -> Link:
        """As for the host's memory, with the disk as the link and copies to its buffers as the thread's own time."""
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.put(flat).get()  # the buffer is made
        timed = Timed(self.device)
        entry, put_ns = timed.of(lambda: self._put_and_wait(flat))
        assert isinstance(entry, OnDisk)
        _, written_ns = timed.of(entry.written.result)
        _, read_ns = timed.of(entry.read_now)
        _, get_ns = timed.of(entry.get)
        on_device = self.window_bytes or 0
        return Link(
            (put_ns + get_ns) / 2 / size, written_ns / size, read_ns / size, self._staged_bytes, on_device
        )

    def close(self) -> None:
        """Stop the threads and let the file go."""
        super().close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._writing.clear()
        self._file.close()

    def _settle(self, entry: OnDisk) -> None:
        try:
            entry.written.result()
        except OSError as error:
            raise self._failed(error, "cannot be written") from error

    def _failed(self, error: OSError, what: str) -> TrainingError:
        reason = error.strerror or str(error)
        return TrainingError(
            f'offload.activations = "nvme": the file under offload.path = {self._folder} {what}: {reason}; make room, '
            "name another folder, or offload less"
        )

    # --- on the threads ------------------------------------------------------------------------

    def _write(self, entry: OnDisk) -> None:
        if entry.left is not None:  # the copy from the device
            entry.left.synchronize()
        values = entry.host_bytes()
        entry.checksum = checksum_of(values)
        data = memoryview(values.numpy())  # type: ignore[arg-type]
        offset = entry.extent[1]
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count
        entry.let_buffer_go()

    def _read(self, entry: OnDisk) -> torch.Tensor:
        buffer = self.pool.take(entry.bytes)
        try:
            self._read_into(buffer[: entry.bytes], entry)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        return buffer

    def _read_into(self, values: torch.Tensor, entry: OnDisk) -> None:
        data = memoryview(values.numpy())  # type: ignore[arg-type]
        offset = entry.extent[1]
        while data:
            count = os.preadv(self._file.fileno(), [data], offset)
            if count == 0:
                raise OSError("the file is shorter than what was written")
            data, offset = data[count:], offset + count
        if checksum_of(values) != entry.checksum:
            raise TrainingError(
                f"a saved activation of {entry.bytes} bytes, at byte {entry.extent[1]} of the file under offload.path = "
                f"{self._folder}, is not what was written there: the disk or its file is damaged: start again from a "
                'checkpoint, on another disk or without offload.activations = "nvme"'
            )

    def _entry(self, flat: torch.Tensor, buffer: torch.Tensor, size: int) -> OnDisk:
        return OnDisk(self, flat, buffer, size)


class OnDisk(Offloaded):
    """One flat tensor: in its buffer until it is written, and again from when backward comes near."""

    written: Future[None]
    #: Of what was written, by the thread that wrote it.
    checksum: int

    def __init__(self, store: Disk, flat: torch.Tensor, buffer: torch.Tensor, size: int) -> None:
        self._buffer = buffer  # first: whatever fails below, it goes back
        self.arriving = None
        self.extent = (0, 0)
        super().__init__(store, flat, buffer, size)
        self._disk = store
        self.extent = store.take_extent(size)
        self.reading: Future[torch.Tensor] | None = None
        self._wanted = False
        self._lock = threading.Lock()

    @property
    def buffer(self) -> torch.Tensor:
        """Its buffer; there is one where it is wanted."""
        assert self._buffer is not None
        return self._buffer

    def stored(self) -> None:
        """The copy to the host was issued: write it."""
        self._disk.write(self)

    def prepare(self) -> None:
        """Keep the buffer if it is still there, else read ahead."""
        with self._lock:
            self._wanted = True
            if self._buffer is None and self.reading is None:
                self.reading = self._disk.read(self)

    def is_ready(self) -> bool:
        """Whether its bytes are in the host's memory."""
        return self.reading is None or (self.reading.done() and self.reading.exception() is None)

    def host_bytes(self) -> torch.Tensor:
        """Its bytes in the host's memory; waits for the disk."""
        if self._wanted and self._buffer is None:
            self._buffer = self._disk.settle(self)
        return self.buffer[: self._size]

    def read_now(self) -> torch.Tensor:
        """Its bytes, read from the disk if they have left the host's memory."""
        self.prepare()
        return self.host_bytes()

    def let_buffer_go(self) -> None:
        """It is written: the buffer may serve another, unless backward is near already."""
        with self._lock:
            if not self._wanted:
                self.release()

    def __del__(self) -> None:
        reading = getattr(self, "reading", None)
        if self._buffer is None and reading is not None and not reading.cancel() and not reading.exception():
            self._buffer = reading.result()  # read ahead for nobody
        super().__del__()
        if self.extent[0]:
            self._disk.give_extent(self.extent)
