"""Buffers in the host's memory for what comes from the device or a disk, and goes back to it."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch

__all__ = ["BufferPool"]

_PAGE = 4096


class BufferPool:
    """Byte buffers in the host's memory, kept for the next step: pinning costs a millisecond a mebibyte.

    Safe to use from several threads.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[tuple[torch.Tensor, Any]] = []  # by size; with what the device must have done first
        self._returned: SimpleQueue[tuple[torch.Tensor, Any]] = SimpleQueue()
        self._lock = threading.Lock()
        #: Bytes of all buffers, in use or not.
        self.total_bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least ``size`` bytes, uint8; the smallest that fits, if it is less than twice as large."""
        with self._lock:
            self._sort_in()
            found = next(
                (at for at, (free, _) in enumerate(self._free) if size <= free.numel() <= 2 * size), -1
            )
            if found >= 0:
                buffer, event = self._free.pop(found)
            else:
                # Batches of other lengths would fill memory with buffers that fit none: the small ones go first.
                waste = sum(free.numel() for free, _ in self._free)
                while self._free and 2 * waste > self.total_bytes:
                    gone = self._free.pop(0)[0].numel()
                    waste -= gone
                    self.total_bytes -= gone
                rounded = -(-size // _PAGE) * _PAGE
                self.total_bytes += rounded
        if found >= 0:
            if event is not None:
                event.synchronize()
            return buffer
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor, event: Any = None) -> None:
        """To be used again, by the host once ``event`` has happened on the device.

        Takes no lock: finalizers call it, which a garbage collection may run on the thread that holds the lock.
        """
        self._returned.put((buffer, event))

    def _sort_in(self) -> None:
        while not self._returned.empty():
            self._free.append(self._returned.get())
        self._free.sort(key=lambda free: free[0].numel())
