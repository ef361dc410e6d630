"""Buffers for copies of activations, on the model's device, kept for the next step.

What a forward's own operators allocate cannot be steered; what techniques copy can: tensors that come back from the host
or the disk, tensors stored in fewer bits, and those made wide again. On a CPU each of them would be memory that the
system maps, clears and unmaps once a step. On CUDA the caching allocator keeps memory by itself: little is to be
gained there but buffers of steady sizes where those of other tensors vary.

A buffer is handed out as a tensor over a storage of its own, which holds the buffer. It is free again when nothing holds
that storage any more, whoever held it: autograd, a hook, a retained graph, a view. Nobody gives anything back, so nothing
that lives is ever handed out twice.

Streams: a buffer is used again in the order in which the host frees it. That is the order of the computing stream, which
copies beside it wait for (:class:`trine.optim.runtime.host_memory.CudaCopier`).
"""

from __future__ import annotations

import threading

import torch
from torch.utils import dlpack

__all__ = ["TensorPool", "empty_flat"]

#: All buffers together, as a multiple of what was in use at once: sizes have their turns within a step.
MOST_TIMES = 4
_LEAST_BYTES = 512


class TensorPool:
    """Flat tensors on one device. Safe to use from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, list[_Buffer]] = {}  # by size; the size that was asked for last comes last
        self._lock = threading.Lock()
        self._most_used = 0  # bytes in use at once, when a buffer was made
        #: Bytes of all buffers, in use or not.
        self.total_bytes = 0
        #: Buffers that were made since the start.
        self.made = 0

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """(elements,) of ``dtype``, uninitialised, over memory that no living tensor has."""
        size = elements * dtype.itemsize
        with self._lock:  # until it is lent: it would look free to another thread
            flat = self._free(_rounded(size)).lent(size)
        return flat.view(dtype)

    def _free(self, size: int) -> _Buffer:
        same = self._buffers.pop(size, [])
        self._buffers[size] = same
        found = next((buffer for buffer in same if not buffer.is_lent), None)
        if found is None:
            self._make_room(size)
            found = _Buffer(size, self._device)
            same.append(found)
            self.total_bytes += size
            self.made += 1
        return found

    def _make_room(self, size: int) -> None:
        """Batches of other lengths leave buffers that fit none: those of sizes not asked for longest go first."""
        idle = {key: [b for b in buffers if not b.is_lent] for key, buffers in self._buffers.items()}
        used = self.total_bytes + size - sum(key * len(buffers) for key, buffers in idle.items())
        self._most_used = max(self._most_used, used)
        for key, buffers in idle.items():
            while buffers and self.total_bytes + size > MOST_TIMES * self._most_used:
                self._buffers[key].remove(buffers.pop())
                self.total_bytes -= key


class _Buffer:
    """Bytes, and whether a tensor has been made over them that still lives."""

    __slots__ = ("_alone", "_bytes", "_storage")

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()
        self._alone = self._holders()

    def _holders(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    @property
    def is_lent(self) -> bool:
        """Whether anything but this holds the memory."""
        return self._holders() > self._alone

    def lent(self, size: int) -> torch.Tensor:
        """A tensor with a storage of its own over the first ``size`` bytes."""
        capsule = dlpack.to_dlpack(self._bytes[:size])  # type: ignore[attr-defined]
        return dlpack.from_dlpack(capsule)


def empty_flat(
    pool: TensorPool | None, elements: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(elements,) of ``dtype``, from the pool where there is one."""
    if pool is None:
        return torch.empty(elements, dtype=dtype, device=device)
    return pool.empty(elements, dtype)


def _rounded(size: int) -> int:
    """Up to the next of eight steps between powers of two: tensors that differ by little share a buffer."""
    step = max(_LEAST_BYTES, 1 << max(0, size.bit_length() - 4))
    return max(-(-size // step) * step, step)
