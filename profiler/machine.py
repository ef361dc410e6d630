"""What PyTorch finds on this machine, as plain values: for those who must not import torch themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Accelerator", "accelerators", "torch_facts"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that PyTorch can use, by its index."""

    index: int
    name: str
    memory_bytes: int


def accelerators() -> tuple[Accelerator, ...]:
    """Visible CUDA or ROCm devices, by index; empty where there are none."""
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Accelerator(index, p.name, p.total_memory) for index, p in enumerate(found))


def torch_facts() -> dict[str, str | None]:
    """PyTorch's version, and what it was built for."""
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
