"""A small decoder-only transformer, as people first write it.

Pre-norm blocks, learned positions, GELU feed-forward, tied embedding and output head: the
architecture of GPT-2 (Radford et al. 2019). Attention can be chosen while it trains: ``manual``
writes out softmax(QKᵀ/√d)V with a mask, which stores the sequence × sequence matrix, and ``sdpa``
calls PyTorch's fused kernel. Both compute the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "Attention", "Block", "GPTConfig", "loss_of"]

ATTENTIONS = ("manual", "sdpa")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. Raises ``ValueError`` where heads do not divide hidden."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    vocab: int = 256
    sequence: int = 384
    dropout: float = 0.0
    attention: str = "manual"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention {self.attention!r} is none of {ATTENTIONS}")


class Attention(nn.Module):
    """Causal self-attention, (batch, sequence, hidden) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.implementation = config.attention
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        mask = torch.ones(config.sequence, config.sequence, dtype=torch.bool).tril()
        self.mask: torch.Tensor
        self.register_buffer("mask", mask, persistent=False)

    def set_attention(self, implementation: str) -> None:
        """Choose ``manual`` or ``sdpa`` from the next call on."""
        if implementation not in ATTENTIONS:
            raise ValueError(f"attention {implementation!r} is none of {ATTENTIONS}")
        self.implementation = implementation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, sequence, hidden)."""
        batch, sequence, hidden = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if self.implementation == "sdpa":
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout
            )
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(hidden // self.heads)
            scores = scores.masked_fill(~self.mask[:sequence, :sequence], float("-inf"))
            mixed = functional.dropout(scores.softmax(-1), dropout, self.training) @ value
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return result


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, sequence, hidden)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return result


class GPT(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Of (batch, sequence), int64; at most the configured sequence long."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats. ``batch``: ids and targets, both (batch, sequence)."""
    ids, targets = batch
    logits = model(ids).flatten(0, 1)
    if logits.element_size() < 4:  # the loss of many classes needs more than bf16's eight bits
        logits = logits.float()
    return functional.cross_entropy(logits, targets.flatten())
