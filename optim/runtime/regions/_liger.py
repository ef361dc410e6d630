"""Liger's Triton kernels (the extra ``liger``) for the regions that have one, on CUDA: chosen here alone.

Hsu et al. 2024, https://github.com/linkedin/Liger-Kernel. They compute in fp32 inside, so double precision keeps
PyTorch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

__all__ = ["kernel_for", "liger"]


@functools.lru_cache(maxsize=1)
def liger() -> ModuleType | None:
    """Liger's functions; ``None`` where it is not installed, or not for this PyTorch."""
    try:
        return import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None


def kernel_for(region: str, x: torch.Tensor) -> Callable[..., Any] | None:
    """Liger's kernel for ``region`` on such a tensor, taking what the region's body takes; ``None``: use another."""
    if x.device.type != "cuda" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return _KERNELS.get(region) if liger() is not None else None


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Any:
    casting = "gemma" if offset else "llama"
    return _functions().liger_rms_norm(x, weight, eps, offset=offset, casting_mode=casting, in_place=False)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    return _functions().liger_layer_norm(x, weight, bias, eps)


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> Any:
    name = "liger_swiglu" if activation == "silu" else "liger_geglu"
    return getattr(_functions(), name)(gate, up)


def _rotary(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Any:
    # Its kernel rotates where the tensors lie, so they must be the callers' no more.
    return _functions().liger_rope(query.clone(), key.clone(), _by_sample(cosine), _by_sample(sine))


def _by_sample(table: torch.Tensor) -> torch.Tensor:
    return table[None] if table.dim() == 2 else table.squeeze(1) if table.dim() == 4 else table


def _linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None, ignored: int
) -> Any:
    return _functions().liger_fused_linear_cross_entropy(
        hidden, weight, targets, bias, ignore_index=ignored, accum_dtype=torch.float32
    )


def _functions() -> Any:
    return liger()


_KERNELS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "gated": _gated,
    "rotary": _rotary,
    "linear_cross_entropy": _linear_cross_entropy,
}
