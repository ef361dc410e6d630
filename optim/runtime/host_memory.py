"""Saved activations in the host's memory, and from there back before backward needs them.

On CUDA the buffers are pinned and copies run on a stream of their own, next to the computation. Memory is given out on
the host's timeline, which runs ahead of the device: a tensor that waits for its copy is held until a few later ones have
been packed, then the computing stream is made to wait for the copy and the tensor is let go. The host itself never
waits. In backward, unpacking a tensor starts the copies of those that were packed before it.

On a CPU the same code copies within memory: nothing is gained, and everything can be tested.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from trine.optim.runtime.activation_schedule import Link
from trine.optim.runtime.buffer_pool import BufferPool
from trine.optim.runtime.checkpointed import moves_now
from trine.optim.runtime.tensor_pool import TensorPool, empty_flat

__all__ = ["ByPlan", "Copier", "HostMemory", "Line", "Offloaded", "Timed"]

_Result = TypeVar("_Result")

#: Tensors whose copies may be under way while the forward goes on. More hide longer copies and hold more memory.
IN_FLIGHT = 4
#: Tensors that are fetched ahead of the one that backward asks for.
AHEAD = 3
#: Times that a link is measured; the fastest counts.
PROBES = 3


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
        self._lines: dict[Any, Line] = {}
        #: Where tensors that come back get their memory; ``None``: from the allocator.
        self.returning: TensorPool | None = None
        #: The line that packed tensors join: what backward gives back in the opposite order. One for each micro-batch of
        #: a pipeline's stage, whose backwards come in the schedule's order.
        self.line: Any = None
        #: A line → the one whose backward comes after its; ``None``: there is one line alone.
        self.following: Callable[[Any], Any] | None = None
        #: Bytes on the device that may be under way at once, each way; ``None``: so many tensors instead.
        self.window_bytes: int | None = None
        self._leaving_bytes = 0
        self._arriving_bytes = 0
        #: The stream that asked last for what was moved; entries may be dropped on threads that have another.
        self.consumer: Any = None
        #: Nanoseconds that copies to the host have kept the computing thread.
        self.blocked_ns = 0
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
        start = time.perf_counter_ns()
        entry.left = self.copier.copy(buffer[:size], flat.view(torch.uint8))
        self.blocked_ns += time.perf_counter_ns() - start
        if self.copier.is_asynchronous:
            self._leaving.append((flat, flat._version, entry, self.copier.computing()))
            self._leaving_bytes += size
            while self._too_many_leave():
                self._let_go()
        entry.stored()
        self._remember(entry)
        return entry

    def _entry(self, flat: torch.Tensor, buffer: torch.Tensor, size: int) -> Offloaded:
        return Offloaded(self, flat, buffer, size)

    @property
    def device_bytes_under_way(self) -> int:
        """On the device, for a moment: what is leaving, and what was fetched ahead."""
        return self._leaving_bytes + self._arriving_bytes

    def _too_many_leave(self) -> bool:
        if self.window_bytes is None:
            return len(self._leaving) > IN_FLIGHT
        return len(self._leaving) > 1 and self._leaving_bytes > self.window_bytes

    def _let_go(self) -> None:
        """Of the oldest tensor under way: its memory is free for the computing stream after the copy."""
        flat, version, entry, stream = self._leaving.popleft()
        self._leaving_bytes -= flat.numel() * flat.element_size()
        self.copier.wait(entry.left, stream)
        if flat._version != version:  # changed while the copy may have been reading it
            entry.torn = True

    def _remember(self, entry: Offloaded) -> None:
        entry.line = self._lines.setdefault(self.line, Line(self.line))
        entry.line.append(entry)

    def before(self, entry: Offloaded) -> list[Offloaded]:
        """Living entries that backward wants next: those packed before this one, then those of the line that follows.

        As many as may be fetched ahead.
        """
        found: list[Offloaded] = []
        ahead = 0
        for living in self._coming(entry):
            ahead += living.bytes
            if len(found) >= AHEAD if self.window_bytes is None else ahead > self.window_bytes:
                break
            found.append(living)
        return found

    def _coming(self, entry: Offloaded) -> Iterator[Offloaded]:
        line = entry.line
        yield from line.before(entry.position)
        following = None if self.following is None else self.following(line.name)
        if following is not None and following in self._lines:
            yield from self._lines[following].before(None)

    def fetch(self, entry: Offloaded) -> torch.Tensor:
        """The tensor on the device. Fetched ahead if an earlier call did so; starts those that come next."""
        self._drain()
        following = self.before(entry)
        entry.prepare()
        for each in following:
            each.prepare()
        flat, event = self._arrived(entry) or self._start(entry)
        if self.copier.is_asynchronous:
            self.consumer = self.copier.computing()
            for each in following:
                if each.arriving is None and each.is_ready():
                    each.arriving = self._start(each)
                    self._arriving_bytes += each.bytes
            self.copier.wait(event, self.consumer)
        if entry.torn:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                "while it was copied to the host (offload.activations)"
            )
        return flat

    def _arrived(self, entry: Offloaded) -> tuple[torch.Tensor, Any] | None:
        arriving, entry.arriving = entry.arriving, None
        if arriving is not None:
            self._arriving_bytes -= entry.bytes
        return arriving

    def forgotten(self, entry: Offloaded) -> None:
        """It was fetched ahead for nobody: the copy must end before the computing stream uses that memory again."""
        arriving = self._arrived(entry)
        if arriving is not None and arriving[1] is not None:
            self.copier.wait(arriving[1], self.consumer)

    def _start(self, entry: Offloaded) -> tuple[torch.Tensor, Any]:
        # On the computing stream's memory: freed after its use there, it is used again in order.
        flat = empty_flat(self.returning, entry.elements, entry.dtype, entry.device)
        entry.used = self.copier.copy(flat.view(torch.uint8), entry.host_bytes())
        return flat, entry.used

    def measured_link(self, size: int) -> Link:
        """What moving a byte costs, by moving a tensor of ``size`` bytes to and fro. Waits for the device.

        Beside the computation on CUDA; on a CPU nothing is beside it, and all of it is the computing thread's own time.
        """
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        timed = Timed(self.device)
        entry = self.put(flat)  # the buffer is made, and pinned
        self._drain()
        entry.get()
        del entry
        tries = [timed.of(lambda: self._put_and_wait(flat)) for _ in range(PROBES)]
        out_ns = min(took for _, took in tries)
        back_ns = min(timed.of(each.get)[1] for each, _ in tries)
        if self.copier.is_asynchronous:
            return Link(0.0, out_ns / size, back_ns / size, self.window_bytes or 0, self.window_bytes or 0)
        return Link((out_ns + back_ns) / 2 / size, 0.0, 0.0, 0, 0)

    def _put_and_wait(self, flat: torch.Tensor) -> Offloaded:
        entry = self.put(flat)
        self._drain()
        return entry

    def _drain(self) -> None:
        while self._leaving:
            self._let_go()

    def windows(self, largest: int, block: int) -> list[int]:
        """Sizes of :attr:`window_bytes` worth trying, for tensors of up to ``largest`` and blocks of ``block`` bytes."""
        if not self.copier.is_asynchronous:
            return [0]
        return sorted({2 * largest, max(2 * largest, block), max(2 * largest, 2 * block)})

    def close(self) -> None:
        """Let go of everything that is under way."""
        self.copier.finish()
        self._leaving.clear()
        self._lines.clear()


class ByPlan:
    """A store of what blocks' plans move; what stays is held as it is, and so is what belongs to no block."""

    def __init__(self, inner: HostMemory) -> None:
        self._inner = inner

    def choose(self, tensor: torch.Tensor) -> HostMemory | None:
        """The inner store for what is to be moved."""
        return self._inner.choose(tensor) if moves_now() else None

    def device_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Nothing of what is moved."""
        return 0 if moves_now() else elements * dtype.itemsize

    def put(self, flat: torch.Tensor) -> Offloaded:
        """As the inner store does; only what was chosen comes here."""
        return self._inner.put(flat)


class Timed:
    """Wall-clock nanoseconds of device work, waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def of(self, work: Callable[[], _Result]) -> tuple[_Result, int]:
        """What it returns, and how long it took."""
        self._wait()
        start = time.perf_counter_ns()
        result = work()
        self._wait()
        return result, time.perf_counter_ns() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Line:
    """Entries in the order in which they were packed, as long as they live."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self._entries: list[weakref.ref[Offloaded]] = []

    def append(self, entry: Offloaded) -> None:
        """At the end; entries that are gone make way now and then."""
        if len(self._entries) > 64 and all(reference() is None for reference in self._entries[:64]):
            self._entries = [reference for reference in self._entries if reference() is not None]
            for position, reference in enumerate(self._entries):
                living = reference()
                if living is not None:
                    living.position = position
        entry.position = len(self._entries)
        self._entries.append(weakref.ref(entry))

    def before(self, position: int | None) -> Iterator[Offloaded]:
        """Those that live, from the one before ``position`` to the first; from the last where it is ``None``."""
        for number in range((len(self._entries) if position is None else position) - 1, -1, -1):
            living = self._entries[number]()
            if living is not None:
                yield living


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
        self.line: Line
        self.left: Any = None  # event: the copy to the host is done
        self.used: Any = None  # event: the latest copy from the host is done
        self.arriving: tuple[torch.Tensor, Any] | None = None
        self.torn = False

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return self._size

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
        if self.arriving is not None:
            self._store.forgotten(self)
        self.release()
