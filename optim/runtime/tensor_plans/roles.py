"""What each module of a model does under tensor parallelism, by name: the plan, before any of it is carried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = [
    "HEADS",
    "KEY_HEADS",
    "Attention",
    "Block",
    "Column",
    "Experts",
    "FeedForward",
    "Plan",
    "is_linear",
    "is_transposed",
    "widths",
]

#: What modules, or their configurations, call their numbers of heads, and of heads of keys and values.
HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "key_heads", "kv_heads")


@dataclass(frozen=True, slots=True)
class Column:
    """A linear layer of which each rank has some of the outputs. ``sections``: what lies side by side in them."""

    name: str
    module: nn.Module
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """A module that projects to heads and back: a rank has some of the heads."""

    name: str
    module: nn.Module
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, nn.Module], ...]
    heads: int
    key_heads: int
    #: Norms of single heads inside it, which see the rank's own heads alone.
    norms: tuple[tuple[str, nn.Module], ...] = ()


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Matrices up and down. ``entry``: the module that is given their input, or the norm whose output that is."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, nn.Module], ...]
    entry: tuple[str, nn.Module] | None
    #: Whether ``entry`` is the norm before them, since they stand in the block itself.
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: the module, its router, and the module that holds the experts' matrices, (experts, out, in) each."""

    name: str
    module: nn.Module
    experts_name: str
    experts: nn.Module
    #: Of each of the experts' parameters: the dimension to cut, and what lies side by side in it.
    cuts: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """One of the model's repeated blocks."""

    name: str
    module: nn.Module
    attentions: tuple[Attention, ...]
    feed_forwards: tuple[FeedForward, ...]
    mixtures: tuple[Experts, ...]
    norms: tuple[tuple[str, nn.Module], ...]
    #: Modules with parameters that stay whole on every rank.
    whole: tuple[tuple[str, nn.Module], ...] = ()


@dataclass(slots=True)
class Plan:
    """Of a whole model."""

    blocks: list[Block] = field(default_factory=list)
    #: The table of token embeddings and the head, both cut by the vocabulary; ``None``: whole on every rank.
    embedding: tuple[str, nn.Module] | None = None
    head: tuple[str, nn.Module] | None = None
    #: What a plan of the user's says of modules outside of blocks, or of single ones inside.
    columns: list[Column] = field(default_factory=list)
    rows: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding or of the head; nought where neither is cut."""
        found = self.head or self.embedding
        weight: Any = None if found is None else found[1].weight
        return 0 if weight is None else int(weight.shape[0])


def is_linear(module: nn.Module) -> bool:
    """PyTorch's linear layer, or GPT-2's, whose weight lies the other way around (Transformers' ``Conv1D``)."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (in, out)."""
    weight: Any = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and weight is not None
        and weight.dim() == 2
    )


def widths(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)
