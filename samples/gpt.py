"""A small decoder-only transformer, as people first write it.

Pre-norm blocks, learned positions, GELU feed-forward, tied embedding and output head: the
architecture of GPT-2 (Radford et al. 2019); or, by three options, RMS norms, a gated feed-forward and rotary positions
as Llama has them (Touvron et al. 2023). Attention can be chosen while it trains: ``manual``
writes out softmax(QKᵀ/√d)V with a mask, which stores the sequence × sequence matrix, and ``sdpa``
calls PyTorch's fused kernel. Both compute the same function. Rows may hold several documents (``positions`` and
``documents``): attention then ends at their borders, also by ``varlen`` and ``flex`` on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trine.optim.runtime import regions
from trine.optim.runtime.documents import Documents
from trine.optim.runtime.packed_attention import Visible, attend, visible_of

__all__ = ["GPT", "Attention", "Block", "GPTConfig", "loss_of", "norm_of"]

ATTENTIONS = ("manual", "sdpa")
#: Of packed rows alone.
PACKED_ATTENTIONS = ("varlen", "flex")
#: GPT-2's parts first, then Llama's.
NORMS = ("layer", "rms")
FEED_FORWARDS = ("gelu", "swiglu")
POSITIONS = ("learned", "rotary")
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
    norm: str = "layer"
    mlp: str = "gelu"
    positions: str = "learned"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        choices = {"attention": ATTENTIONS, "norm": NORMS, "mlp": FEED_FORWARDS, "positions": POSITIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {known}")
        if self.positions == "rotary" and self.hidden // self.heads % 2:
            raise ValueError(f"rotary positions turn pairs, and a head of {self.hidden // self.heads} is odd")


#: Cosines and sines of rotary positions.
Tables = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention, (batch, sequence, hidden) to the same."""

    attentions = (*ATTENTIONS, *PACKED_ATTENTIONS)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        #: Of this rank, where they are spread over several: how many there are is read off the projection's width.
        self.heads = config.heads
        self.head_size = config.hidden // config.heads
        self.dropout = config.dropout
        self.implementation = config.attention
        self.fusable = {"rotary": "rotary"} if config.positions == "rotary" else {}
        self.fused: frozenset[str] = frozenset()
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

    def set_fused(self, names: Iterable[str]) -> None:
        """Compute these of ``fusable`` as one region from the next call on, and no others."""
        self.fused = frozenset(self.fusable) & set(names)

    def forward(
        self, x: torch.Tensor, visible: Visible | None = None, tables: Tables | None = None
    ) -> torch.Tensor:
        """Of (batch, sequence, hidden). ``visible``: what tokens may see in packed rows; else all before them."""
        batch, sequence, _ = x.shape
        split = self.qkv(x).view(batch, sequence, 3, -1, self.head_size)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if tables is not None:
            rotate = regions.rotary if "rotary" in self.fused else regions.bodies.rotary
            query, key = rotate(query, key, *(table.to(query.dtype) for table in tables))
        dropout = self.dropout if self.training else 0.0
        if visible is not None and self.implementation != "manual":
            mixed = attend(query, key, value, visible, dropout)
        elif self.implementation != "manual":
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout
            )
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_size)
            mask = self.mask[:sequence, :sequence] if visible is None else visible
            scores = scores.masked_fill(~mask, float("-inf"))  # type: ignore[operator]
            mixed = functional.dropout(scores.softmax(-1), dropout, self.training) @ value
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return result


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fused: frozenset[str] = frozenset()
        self.norm1 = norm_of(config)
        self.attention = Attention(config)
        self.norm2 = norm_of(config)
        self.gated = config.mlp == "swiglu"
        self.fusable = {
            "bias_dropout_residual": "bias_dropout_residual",
            "mlp": "gated" if self.gated else "gelu",
        }
        if self.gated:  # three matrices of 8/3 hold as many weights as two of 4
            inner = -(-8 * config.hidden // 3 // 16) * 16
            self.gate = nn.Linear(config.hidden, inner, bias=False)
        else:
            inner = 4 * config.hidden
        self.up = nn.Linear(config.hidden, inner, bias=not self.gated)
        self.down = nn.Linear(inner, config.hidden, bias=not self.gated)
        self.dropout = nn.Dropout(config.dropout)

    def set_fused(self, names: Iterable[str]) -> None:
        """Compute these of ``fusable`` as one region from the next call on, and no others."""
        self.fused = frozenset(self.fusable) & set(names)

    def forward(
        self, x: torch.Tensor, visible: Visible | None = None, tables: Tables | None = None
    ) -> torch.Tensor:
        """Of (batch, sequence, hidden); ``visible`` and ``tables`` as for :class:`Attention`."""
        x = self._added(x, self.attention(self.norm1(x), visible, tables))
        return self._added(x, self._fed_forward(self.norm2(x)))

    def _added(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if "bias_dropout_residual" in self.fused:
            return regions.bias_dropout_residual(x, None, residual, self.dropout.p, self.training)
        result: torch.Tensor = residual + self.dropout(x)
        return result

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = "mlp" in self.fused
        if self.gated:
            inner = (regions.gated if fused else regions.bodies.gated)(self.gate(x), self.up(x))
        else:
            inner = (regions.gelu if fused else functional.gelu)(self.up(x))
        result: torch.Tensor = self.down(inner)
        return result


def norm_of(config: GPTConfig) -> nn.Module:
    """The kind of normalisation that the configuration names."""
    return nn.RMSNorm(config.hidden, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(config.hidden)


class GPT(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocab), or with targets to their loss."""

    fusable: ClassVar[dict[str, str]] = {"cross_entropy": "linear_cross_entropy"}
    #: What a layer is made by, from the configuration.
    layer: ClassVar[Any] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.fused: frozenset[str] = frozenset()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.norm = norm_of(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def set_fused(self, names: Iterable[str]) -> None:
        """Compute these of ``fusable`` as one region from the next call on, and no others."""
        self.fused = frozenset(self.fusable) & set(names)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
        targets: torch.Tensor | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Of (batch, sequence), int64; at most the configured sequence long.

        Packed rows come with the ``positions`` of tokens in their documents, (batch, sequence), and with the
        ``documents``' borders; a row may then be longer than the configured sequence. With ``targets``, (batch,
        sequence), the result is their cross-entropy, a mean or a ``"sum"`` over those that are not -100: the loss is
        the model's to compute, because only inside it is the head's weight whole when it is sharded, and only there can
        ``cross_entropy`` be fused with it.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        visible = None if documents is None else visible_of(documents, self._implementation())
        x, tables = self.tokens(ids), None
        if self.config.positions == "learned":
            x = x + self.positions(positions)
        else:
            size = self.config.hidden // self.config.heads
            tables = regions.rotary_tables(positions, size, dtype=x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, visible, tables)
        x = self.norm(x)
        if targets is not None and "cross_entropy" in self.fused:
            return regions.linear_cross_entropy(x, self.head.weight, targets, reduction=reduction)
        logits: torch.Tensor = self.head(x)
        if targets is None:
            return logits
        logits = logits.flatten(0, 1)
        if logits.element_size() < 4:  # the loss of many classes needs more than bf16's eight bits
            logits = logits.float()
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)

    def _implementation(self) -> str:
        return next(module.implementation for module in self.modules() if isinstance(module, Attention))


def loss_of(model: nn.Module, batch: Any) -> Any:
    """Mean cross-entropy of the next token, in nats.

    ``batch``: ids and targets, both (batch, sequence). Or a mapping, padded or packed, whose rows hold different numbers
    of tokens, for ``(mean, tokens)``: ``input_ids`` and ``labels``, the same ids with -100 where there is no loss, or
    ``ids`` and ``targets``, the next ids; and ``positions`` and ``documents`` where rows are packed.
    """
    if isinstance(batch, Mapping):
        return _loss_of_documents(model, batch)
    ids, targets = batch
    return model(ids, targets=targets)


def _loss_of_documents(model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over all tokens that have a next one, and how many they are; nought where there is none."""
    packing = {name: batch[name] for name in ("positions", "documents") if name in batch}
    if "targets" in batch:
        ids, targets = batch["ids"], batch["targets"]
    else:
        ids, targets = batch["input_ids"], functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    count = (targets != IGNORED).sum()
    total = model(ids, targets=targets, reduction="sum", **packing)
    return total / count.clamp(min=1), count
