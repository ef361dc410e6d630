"""Models with the structures that fused regions are found by, importable by spawned ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["LlamaLike", "fused_on_ranks"]


class TinyRMSNorm(nn.Module):
    """As Transformers' LlamaRMSNorm, or with an offset as GemmaRMSNorm."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) if offset else 0.5 + torch.rand(width))
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return normed * (self.offset + self.weight)


class SquaredRMSNorm(TinyRMSNorm):
    """Named like the others, and computes something else: must be left alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square()


class GatedFeedForward(nn.Module):
    def __init__(self, width: int, inner: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SparseFeedForward(GatedFeedForward):
    """The same parts, put together otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As Transformers has it."""

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RotaryAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, sequence, self.heads, -1).transpose(1, 2)

        angles = torch.arange(sequence)[:, None] * 10000.0 ** -(
            torch.arange(0, width // self.heads, 2) / (width // self.heads)
        )
        angles = torch.cat((angles, angles), -1)[None].to(x.dtype)
        q, k = apply_rotary_pos_emb(split(self.q_proj(x)), split(self.k_proj(x)), angles.cos(), angles.sin())
        mixed = nn.functional.scaled_dot_product_attention(q, k, split(self.v_proj(x)), is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, width)


class LlamaLike(nn.Module):
    """Two layers as Transformers would write them."""

    def __init__(self, offset: float = 0.0, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(TinyRMSNorm(16, offset) for _ in range(2))
        self.attentions = nn.ModuleList(RotaryAttention(16, 2) for _ in range(2))
        self.mlps = nn.ModuleList(GatedFeedForward(16, 24, activation) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            x = x + mlp(attention(norm(x)))
        return x


def fused_on_ranks(rank: int, changes: dict[str, Any]) -> list[str]:
    """The effects of an engine on every rank."""
    import optim_cases

    _, _, engine = optim_cases.train(changes, steps=1, rank=rank, ranks=2)
    return [str(effect) for effect in engine.effects]
