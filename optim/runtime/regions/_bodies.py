"""What each region computes, as plain PyTorch: the reference that every implementation is tested against.

Under an outer ``torch.compile`` these are what is traced, so that the compiler fuses them with their neighbours.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["ACTIVATIONS", "bias_dropout_residual", "gated", "gelu", "layer_norm", "rms_norm", "rotary"]

#: What a gated feed-forward may apply to its gate (Shazeer 2020, GLU Variants Improve Transformer).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Ba et al. 2016, over the last dimension."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Zhang and Sennrich 2019, over the last dimension, in at least fp32; scaled by ``offset + weight``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (
            normed.to(x.dtype) if weight is None else (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
        )
    normed = normed.to(x.dtype)
    return normed if weight is None else normed * weight


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) · up."""
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Hendrycks and Gimpel 2016."""
    return functional.gelu(x, approximate=approximate)


def bias_dropout_residual(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, training: bool
) -> torch.Tensor:
    """residual + dropout(x + bias), as Megatron-LM fuses it."""
    if bias is not None:
        x = x + bias
    return residual + functional.dropout(x, p, training)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Su et al. 2021, in the form that rotates halves (GPT-NeoX, Llama)."""
    return _rotated(query, cosine, sine), _rotated(key, cosine, sine)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine
