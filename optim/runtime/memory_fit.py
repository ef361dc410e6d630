"""How large a micro-batch fits: the memory of small ones is measured, a line is laid through it, the rest is arithmetic.

What a micro-batch needs above what lives between steps is ``fixed + per_sample × samples``: gradients and workspaces
do not grow with the batch, activations do. Both are measured on this model with this data, because no formula knows
a model's kernels, its checkpointing or its compiler.

Measuring leaves no trace: random numbers, gradients and buffers (the running statistics of batch norm) are put back.
What a module keeps in plain Python attributes, and what a loss function does to the outside, cannot be.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trine.optim.runtime.plain_tensors import local
from trine.optim.runtime.random_streams import random_streams, restore_random_streams

__all__ = [
    "MARGIN",
    "Line",
    "available_host_bytes",
    "bytes_of",
    "capacity_bytes",
    "line_through",
    "measured_bytes",
    "untouched",
]

#: Of what is free, the share to plan with: allocators round up and fragment, and batches differ.
MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of a micro-batch: ``fixed + per_sample × samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: int) -> float:
        """Bytes that so many samples need."""
        return self.fixed + self.per_sample * samples

    def largest(self, capacity: float, most: int) -> int:
        """The most samples, up to ``most``, that fit into ``capacity`` bytes; 0 where not even one does."""
        if self.at(most) <= capacity:
            return most
        if self.per_sample <= 0:
            return 0
        return max(0, min(most, math.floor((capacity - self.fixed) / self.per_sample)))


def line_through(points: Iterable[tuple[int, int]]) -> Line:
    """Through the two largest of (samples, bytes): near the size that is wanted, the peak's own phase rules.

    One point alone is taken as proportional, which overstates larger ones. A line never falls: noise that makes more
    samples cheaper counts as no growth, and a negative fixed part as none.
    """
    known = sorted(dict(points).items())
    if len(known) == 1:
        return Line(0.0, known[0][1] / known[0][0])
    (small, low), (large, high) = known[-2:]
    slope = max(0.0, (high - low) / (large - small))
    fixed = high - slope * large
    return Line(fixed, slope) if fixed >= 0 else Line(0.0, high / large)


def measured_bytes(device: torch.device, run: Callable[[], Any]) -> int:
    """Most bytes alive at once during ``run()``, above what was alive before it.

    On CUDA from the caching allocator (this resets its peak statistics); on the CPU, whose allocator keeps none, from
    the profiler's memory events, which see compiled code and recomputation too. While another profiler runs on the CPU,
    what autograd saves for backward is counted instead: a lower figure, without temporaries.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    if torch._C._autograd._profiler_enabled():
        return _saved_bytes(run)
    with _quiet_profiler() as profiler:
        run()
    alive = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def capacity_bytes(device: torch.device, local_ranks: int, stated: int | None, resident: int) -> float:
    """Bytes that a step may add to what is alive now. ``stated``: what the device may hold in all, instead of what it has.

    ``resident`` are the bytes of parameters, gradients, buffers and optimizer state, for the CPU, where nobody counts
    what is allocated. Ranks on one machine share its memory.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        if stated is not None:
            return float(stated - allocated)
        free, _ = torch.cuda.mem_get_info(device)
        return MARGIN * (free + torch.cuda.memory_reserved(device) - allocated)
    if stated is not None:
        return float(stated - resident)
    return MARGIN * available_host_bytes() / local_ranks


def available_host_bytes() -> int:
    """Memory that this process may still take: the machine's, or what its control group leaves."""
    found = [_available_of_machine()]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control groups, or the older kind: the machine's figure stands
    return max(0, min(found))


def _available_of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2  # no such file outside Linux


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of these tensors on this rank (a sharded one counts its shard); what is no tensor counts nothing."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            part = local(tensor)
            total += part.numel() * part.element_size()
    return total


# --- leaving no trace --------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(
    model: torch.nn.Module, parameters: Iterable[torch.Tensor], device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Forward and backward inside leave random numbers, gradients and buffers as they were, and DDP's replicas alone.

    Inside there are gradients of nought to add to, as every micro-batch but a step's first finds them. Afterwards the list
    that it gives holds the buffers that had changed.
    """
    held = list({id(p): p for p in (*model.parameters(), *parameters)}.values())
    gradients = [parameter.grad for parameter in held]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    streams = random_streams(device)
    # DDP broadcasts buffers in the first forward after a synchronised one; a measurement is no such forward.
    broadcasts = getattr(model, "require_forward_param_sync", None)
    if broadcasts is not None:
        model.require_forward_param_sync = False  # type: ignore[assignment]
    changed: list[torch.Tensor] = []
    try:
        yield changed
    finally:
        if broadcasts is not None:
            model.require_forward_param_sync = broadcasts
        restore_random_streams(device, streams)
        with torch.no_grad():
            for buffer, copy in buffers:
                if not torch.equal(buffer, copy):  # batch norm's kernel does not count versions
                    buffer.copy_(copy)
                    changed.append(buffer)
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient


# --- counting on the CPU -----------------------------------------------------------------------


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[Any]:
    """PyTorch's profiler with memory events; Kineto would write lines to standard error."""
    quiet = "KINETO_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:
            yield profiler
    finally:
        if quiet:
            os.environ.pop("KINETO_LOG_LEVEL", None)


def _saved_bytes(run: Callable[[], Any]) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())
