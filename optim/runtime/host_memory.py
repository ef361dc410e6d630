"""Saved activations in the host's memory, and from there back before backward needs them.

On CUDA the buffers are pinned and copies run on a stream of their own, next to the computation. Memory is given out on
the host's timeline, which runs ahead of the device: a tensor that waits for its copy is held until a few later ones have
been packed, then the computing stream is made to wait for the copy and the tensor is let go. The host itself never
waits. In backward, unpacking a tensor starts the copies of those that were packed before it.

On a CPU the same code copies within memory: nothing is gained, and everything can be tested.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch

__all__ = ["BufferPool", "Copier", "HostMemory", "Offloaded"]

#: Tensors whose copies may be under way while the forward goes on. More hide longer copies and hold more memory.
IN_FLIGHT = 4
#: Tensors that are fetched ahead of the one that backward asks for.
AHEAD = 3
_PAGE = 4096


class BufferPool:
    """Byte buffers in the host's memory, kept for the next step: pinning costs a millisecond a mebibyte.

    Safe to use from several threads.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[tuple[torch.Tensor, Any]] = []  # by size; with what the device must have done first
        self._lock = threading.Lock()
        #: Bytes of all buffers, in use or not.
        self.total_bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least ``size`` bytes, uint8; the smallest that fits, if it is less than twice as large."""
        with self._lock:
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
        """To be used again, by the host once ``event`` has happened on the device."""
        with self._lock:
            self._free.append((buffer, event))
            self._free.sort(key=lambda free: free[0].numel())


class Copier:
    """Copies at once, as on a CPU. Subclasses copy beside the computation, in the order in which they are asked."""

    is_asynchronous = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """After what is computed now; returns the event that it is done, or ``None`` where it is done already."""
        target.copy_(source)

    def computing(self) -> Any:
        """The stream that computes now."""

    def wait(self, event: Any, stream: Any) -> None:
        """Let ``stream`` go on after ``event``; the host does not wait."""

    def finish(self) -> None:
        """The host waits for all copies."""


class CudaCopier(Copier):
    """On a stream of its own."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """After what is computed now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def computing(self) -> Any:
        """The stream that computes now."""
        return torch.cuda.current_stream(self._device)

    def wait(self, event: Any, stream: Any) -> None:
        """Let ``stream`` go on after ``event``."""
        stream.wait_event(event)

    def finish(self) -> None:
        """The host waits for all copies."""
        self._stream.synchronize()


class HostMemory:
    """A store in the host's memory. ``device`` is where tensors come from."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.copier = copier or (CudaCopier(device) if is_cuda else Copier())
        self.pool = BufferPool(pinned=is_cuda)
        self._leaving: deque[tuple[torch.Tensor, int, Offloaded, Any]] = deque()
        self._order: list[weakref.ref[Offloaded]] = []
        #: The stream that asked last for what was moved; entries may be dropped on threads that have another.
        self.consumer: Any = None
        #: Bytes that went to the host since the start.
        self.moved_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers in the host's memory."""
        return self.pool.total_bytes

    def choose(self, tensor: torch.Tensor) -> HostMemory | None:
        """Everything that lies on the device."""
        return self if tensor.device.type == self.device.type else None

    def device_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Nothing stays."""
        return 0

    def put(self, flat: torch.Tensor) -> Offloaded:
        """Begin to copy it to the host."""
        size = flat.numel() * flat.element_size()
        buffer = self.pool.take(size)
        entry = self._entry(flat, buffer, size)
        self.moved_bytes += size
        entry.left = self.copier.copy(buffer[:size], flat.view(torch.uint8))
        if self.copier.is_asynchronous:
            self._leaving.append((flat, flat._version, entry, self.copier.computing()))
            while len(self._leaving) > IN_FLIGHT:
                self._let_go()
        entry.stored()
        self._remember(entry)
        return entry

    def _entry(self, flat: torch.Tensor, buffer: torch.Tensor, size: int) -> Offloaded:
        return Offloaded(self, flat, buffer, size)

    def _let_go(self) -> None:
        """Of the oldest tensor under way: its memory is free for the computing stream after the copy."""
        flat, version, entry, stream = self._leaving.popleft()
        self.copier.wait(entry.left, stream)
        if flat._version != version:  # changed while the copy may have been reading it
            entry.torn = True

    def _remember(self, entry: Offloaded) -> None:
        if len(self._order) > 64 and all(reference() is None for reference in self._order[:64]):
            self._order = [reference for reference in self._order if reference() is not None]
            for position, reference in enumerate(self._order):
                living = reference()
                if living is not None:
                    living.position = position
        entry.position = len(self._order)
        self._order.append(weakref.ref(entry))

    def before(self, entry: Offloaded, count: int) -> list[Offloaded]:
        """Up to ``count`` living entries that were packed just before this one: backward wants them next."""
        found: list[Offloaded] = []
        for reference in reversed(self._order[max(0, entry.position - 4 * count) : entry.position]):
            living = reference()
            if living is not None:
                found.append(living)
                if len(found) == count:
                    break
        return found

    def fetch(self, entry: Offloaded) -> torch.Tensor:
        """The tensor on the device. Fetched ahead if an earlier call did so; starts those that come next."""
        while self._leaving:
            self._let_go()
        following = self.before(entry, AHEAD)
        entry.prepare()
        for each in following:
            each.prepare()
        flat, event = entry.arriving or self._start(entry)
        entry.arriving = None
        if self.copier.is_asynchronous:
            self.consumer = self.copier.computing()
            for each in following:
                if each.arriving is None and each.is_ready():
                    each.arriving = self._start(each)
            self.copier.wait(event, self.consumer)
        if entry.torn:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                "while it was copied to the host (offload.activations)"
            )
        return flat

    def _start(self, entry: Offloaded) -> tuple[torch.Tensor, Any]:
        # On the computing stream's memory: freed after its use there, it is used again in order.
        flat = torch.empty(entry.elements, dtype=entry.dtype, device=entry.device)
        entry.used = self.copier.copy(flat.view(torch.uint8), entry.host_bytes())
        return flat, entry.used

    def close(self) -> None:
        """Let go of everything that is under way."""
        self.copier.finish()
        self._leaving.clear()
        self._order.clear()


class Offloaded:
    """One flat tensor in the host's memory."""

    def __init__(self, store: HostMemory, flat: torch.Tensor, buffer: torch.Tensor, size: int) -> None:
        self._store = store
        self._buffer: torch.Tensor | None = buffer
        self._size = size
        self.dtype = flat.dtype
        self.device = flat.device
        self.elements = flat.numel()
        self.device_bytes = 0
        self.position = 0
        self.left: Any = None  # event: the copy to the host is done
        self.used: Any = None  # event: the latest copy from the host is done
        self.arriving: tuple[torch.Tensor, Any] | None = None
        self.torn = False

    def get(self) -> torch.Tensor:
        """On its device again."""
        return self._store.fetch(self)

    def stored(self) -> None:
        """The copy to the host was issued."""

    def prepare(self) -> None:
        """Backward will soon ask for it."""

    def is_ready(self) -> bool:
        """Whether its bytes are in the host's memory, so that fetching does not wait."""
        return True

    def host_bytes(self) -> torch.Tensor:
        """Its bytes in the host's memory, (size,) uint8."""
        assert self._buffer is not None
        return self._buffer[: self._size]

    def release(self) -> None:
        """Give the buffer back."""
        if self._buffer is not None:
            self._store.pool.give_back(self._buffer, self.used)
            self._buffer = None

    def __del__(self) -> None:
        if self.arriving is not None and self.arriving[1] is not None:
            # Fetched for nobody: the copy must end before the computing stream uses that memory again.
            self._store.copier.wait(self.arriving[1], self._store.consumer)
        self.release()
