"""Models with learned numbers and buffers between cut matrices, on a tensor group; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optim_cases import batches
from refusals import refusal_of
from tensor_cases import logits_loss


def model_of(kind: str) -> Any:
    """``kind``: slope or activation (learned, between the feed-forward's matrices), scale (of the residual), mean (a buffer
    that each forward in training writes), anything else: none of these."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = [part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            return self.proj(mixed.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.activation = nn.PReLU() if kind == "activation" else nn.GELU()
            self.slope = nn.Parameter(torch.ones(1)) if kind == "slope" else 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.activation(self.up(x) * self.slope))

    class Block(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.before, self.attention = nn.LayerNorm(16), Attention()
            self.between, self.mlp = nn.LayerNorm(16), FeedForward()
            self.scale = nn.Parameter(torch.full((16,), 0.5)) if kind == "scale" else 1.0
            if kind == "mean":
                self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.before(x)) * self.scale
            if kind == "mean":
                if torch.is_grad_enabled():
                    self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
                x = x - self.mean
            return x + self.mlp(self.between(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Net().double()


def trained(rank: int, kind: str, changes: Mapping[str, Any]) -> tuple[str, float]:
    """What training was refused with, and how far its losses are from the plain loop's, relative."""
    import torch

    import trine

    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=logits_loss)
    losses: list[float] = []
    said = refusal_of(
        lambda: losses.extend(float(engine.train_step(batch)) for batch in batches(4, 4)), "", engine
    )
    if said:
        return said, 0.0
    plain = _plain(kind)
    return "", max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))


def _plain(kind: str) -> list[float]:
    import torch

    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(4, 4):
        loss = logits_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
