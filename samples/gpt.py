"""A small decoder-only transformer, as people first write it.

Pre-norm blocks, learned positions, GELU feed-forward, tied embedding and output head: the
architecture of GPT-2 (Radford et al. 2019). Attention can be chosen while it trains: ``manual``
writes out softmax(QKᵀ/√d)V with a mask, which stores the sequence × sequence matrix, and ``sdpa``
calls PyTorch's fused kernel. Both compute the same function. Rows may hold several documents (``positions`` and
``documents``): attention then ends at their borders, also by ``varlen`` and ``flex`` on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trine.optim.runtime.documents import Documents
from trine.optim.runtime.packed_attention import Visible, attend, visible_of

__all__ = ["GPT", "Attention", "Block", "GPTConfig", "loss_of"]

ATTENTIONS = ("manual", "sdpa")
#: Of packed rows alone.
PACKED_ATTENTIONS = ("varlen", "flex")
#: Targets without a loss, as torch.nn.functional.cross_entropy has it.
IGNORED = -100


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

    attentions = (*ATTENTIONS, *PACKED_ATTENTIONS)

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
        """Choose ``manual`` or ``sdpa``, or for packed rows ``varlen`` or ``flex``, from the next call on."""
        if implementation not in self.attentions:
            raise ValueError(f"attention {implementation!r} is none of {self.attentions}")
        self.implementation = implementation

    def forward(self, x: torch.Tensor, visible: Visible | None = None) -> torch.Tensor:
        """Of (batch, sequence, hidden). ``visible``: what tokens may see in packed rows; else all before them."""
        batch, sequence, hidden = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if visible is not None and self.implementation != "manual":
            mixed = attend(query, key, value, visible, dropout)
        elif self.implementation != "manual":
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout
            )
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(hidden // self.heads)
            mask = self.mask[:sequence, :sequence] if visible is None else visible
            scores = scores.masked_fill(~mask, float("-inf"))  # type: ignore[operator]
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

    def forward(self, x: torch.Tensor, visible: Visible | None = None) -> torch.Tensor:
        """Of (batch, sequence, hidden); ``visible`` as for :class:`Attention`."""
        x = x + self.dropout(self.attention(self.norm1(x), visible))
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

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Of (batch, sequence), int64; at most the configured sequence long.

        Packed rows come with the ``positions`` of tokens in their documents, (batch, sequence), and with the
        ``documents``' borders; a row may then be longer than the configured sequence.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        visible = None if documents is None else visible_of(documents, self._implementation())
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x, visible)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _implementation(self) -> str:
        return next(module.implementation for module in self.modules() if isinstance(module, Attention))


def loss_of(model: nn.Module, batch: Any) -> Any:
    """Mean cross-entropy of the next token, in nats.

    ``batch``: ids and targets, both (batch, sequence). Or a mapping, padded or packed, whose rows hold different numbers
    of tokens, for ``(mean, tokens)``: ``input_ids`` and ``labels``, the same ids with -100 where there is no loss; and
    ``positions`` and ``documents`` where rows are packed.
    """
    if isinstance(batch, Mapping):
        return _loss_of_documents(model, batch)
    ids, targets = batch
    logits = model(ids).flatten(0, 1)
    if logits.element_size() < 4:  # the loss of many classes needs more than bf16's eight bits
        logits = logits.float()
    return functional.cross_entropy(logits, targets.flatten())


def _loss_of_documents(model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over all tokens that have a next one, and how many they are; nought where there is none."""
    packing = {name: batch[name] for name in ("positions", "documents") if name in batch}
    logits = model(batch["input_ids"], **packing).flatten(0, 1)
    if logits.element_size() < 4:
        logits = logits.float()
    targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    count = (targets != IGNORED).sum()
    total = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total / count.clamp(min=1), count
