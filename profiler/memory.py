"""Memory readings: cheap ones at every step, and now and then what parameters, gradients and optimizer hold."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["MemoryReader", "bytes_of_gradients", "bytes_of_optimizer", "bytes_of_tensors"]

Reading = tuple[str, float]

#: At most this often, however short the steps: a reading costs some 20 µs.
_HOST_PERIOD_NS = 40_000_000
_HOST_PEAK_PERIOD_NS = 1_000_000_000
_DEVICE_PERIOD_NS = 50_000_000

#: Of the caching allocator's statistics: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory_stats.html
_DEVICE_METRICS = (
    ("memory/allocated_bytes", ("allocated_bytes", "all", "current")),
    ("memory/peak_bytes", ("allocated_bytes", "all", "peak")),
    ("memory/reserved_bytes", ("reserved_bytes", "all", "current")),
    ("memory/reserved_peak_bytes", ("reserved_bytes", "all", "peak")),
    ("memory/inactive_split_bytes", ("inactive_split_bytes", "all", "current")),
    ("memory/allocation_retries", ("num_alloc_retries",)),
    ("memory/allocator_out_of_memory", ("num_ooms",)),
)


class MemoryReader:
    """Reads this process's memory, and one device's allocator where there is a device. Never synchronises."""

    def __init__(self, device_type: str | None = None, device_index: int = 0) -> None:
        self._device_type = device_type
        self._device_index = device_index
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = -1
        if sys.platform.startswith("linux"):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._host_due = self._host_peak_due = 0
        self._device_due = 0

    def read(self) -> list[Reading]:
        """What is due: (metric, value) pairs; an empty list between two periods."""
        now = time.perf_counter_ns()
        readings: list[Reading] = []
        if now >= self._host_due:
            self._host_due = now + _HOST_PERIOD_NS
            readings += self._host(now)
        if self._device_type is not None and now >= self._device_due:
            self._device_due = now + _DEVICE_PERIOD_NS
            readings += self._device()
        return readings

    def close(self) -> None:
        """Give the file back."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    def _host(self, now: int) -> list[Reading]:
        readings: list[Reading] = []
        if self._statm >= 0:
            pages = int(os.pread(self._statm, 128, 0).split()[1])
            readings.append(("memory/resident_bytes", float(pages * self._page_bytes)))
        if now >= self._host_peak_due:
            self._host_peak_due = now + _HOST_PEAK_PERIOD_NS
            readings.append(("memory/resident_peak_bytes", self._host_peak()))
        return readings

    def _host_peak(self) -> float:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Kibibytes on Linux, bytes on macOS (getrusage(2) of each).
        return float(peak if sys.platform == "darwin" else peak * 1024)

    def _device(self) -> list[Reading]:
        statistics = _device_statistics(self._device_type, self._device_index)
        readings = []
        for metric, path in _DEVICE_METRICS:
            value: Any = statistics
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                readings.append((metric, float(value)))
        return readings


def _device_statistics(device_type: str | None, index: int) -> dict[str, Any]:
    """Nested allocator statistics. The raw call costs a fifth of the public one, which flattens and sorts."""
    if device_type == "cuda":
        return dict(torch._C._cuda_memoryStats(index))
    flat = torch.accelerator.memory_stats(index)
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        place = nested
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def bytes_of_tensors(tensors: Iterable[Any]) -> int:
    """Bytes that this rank holds of the tensors: of a DTensor its own shard; a tensor that occurs twice counts once."""
    seen: set[int] = set()
    total = 0
    for tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        local = getattr(tensor, "_local_tensor", tensor)
        total += local.numel() * local.element_size()
    return total


def bytes_of_gradients(parameters: Iterable[Any]) -> int:
    """Bytes of the gradients that exist now."""
    return bytes_of_tensors(p.grad for p in parameters if p.grad is not None)


def bytes_of_optimizer(optimizer: Any) -> int:
    """Bytes of an optimizer's state tensors on this rank."""
    tensors = (
        value
        for state in list(optimizer.state.values())
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return bytes_of_tensors(tensors)
