"""Buffers of the tiles in flight: as many as were said, each as large as the largest tile, and never more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

__all__ = ["Slab", "Slabs"]

_ALIGNED = 64


class Slab:
    """Bytes in the host's memory, given out from the front."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._used = 0
        #: What must have happened before it is used again: writes to disk, copies to the device.
        self.writing: Future[None] | None = None
        self.events: list[Any] = []

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """(elements,) of it."""
        size = elements * dtype.itemsize
        start, self._used = self._used, self._used + padded(size)
        return self._bytes[start : start + size].view(dtype)

    def finish_writing(self) -> None:
        """Wait for its write; raises what that raised."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def settle(self) -> None:
        """Wait for what still uses it, to be used anew."""
        self.finish_writing()
        for event in self.events:
            event.synchronize()
        self.events.clear()
        self._used = 0

    @property
    def bytes(self) -> int:
        """Its size."""
        return self._bytes.numel()


class Slabs:
    """``count`` slabs of ``size`` bytes, made when first needed."""

    def __init__(self, count: int, size: int, pinned: bool, waited: Callable[[int], None]) -> None:
        self._count, self._size, self._pinned = count, size, pinned
        self._free: deque[Slab] = deque()  # by age: the oldest may still be written
        self._made = 0
        self._waited = waited

    @property
    def total_bytes(self) -> int:
        """Of those that were made."""
        return self._made * self._size

    def take(self) -> Slab:
        """One that nothing uses any more; waits for the oldest."""
        if self._made < self._count:  # all of them, whether or not the oldest is busy: as planned
            made = Slab(self._size, self._pinned)
            self._made += 1
            return made
        slab = self._free.popleft()
        before = time.monotonic_ns()
        try:
            slab.settle()
        except BaseException:
            self._free.append(slab)
            raise
        finally:
            self._waited(time.monotonic_ns() - before)
        return slab

    def give_back(self, slab: Slab) -> None:
        """Its writes and copies may still be under way."""
        self._free.append(slab)

    def finish_writing(self) -> None:
        """Wait for all writes to disk; raises what one of them raised."""
        for slab in self._free:
            slab.finish_writing()


def padded(size: int) -> int:
    """Bytes that :meth:`Slab.take` uses up for ``size``."""
    return -(-size // _ALIGNED) * _ALIGNED
