"""How each module of a model is split under a layout: what tensor, sequence and expert parallelism do to it, in words.

Column: by the output's features, row: by the input's (Shoeybi et al. 2019); heads; vocabulary; sequence (Korthikanti 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trine.optim.plan.workload import Workload

__all__ = ["Split", "padded_vocabulary", "splits_of"]

#: A vocabulary is padded so that each rank's part is a multiple of this (Megatron-LM's --make-vocab-size-divisible-by).
_VOCABULARY_UNIT = 128


@dataclass(frozen=True, slots=True)
class Split:
    """A module; ``kind`` is column, row, head, vocabulary, sequence, expert, or whole (each rank has all of it)."""

    module: str
    kind: str
    words: str


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Rows of the table once every tensor rank has an even part."""
    unit = _VOCABULARY_UNIT * tensor
    return math.ceil(vocabulary / unit) * unit


def splits_of(
    workload: Workload, layout: Mapping[str, int | str], *, expert_tensor: bool = False
) -> tuple[Split, ...]:
    """Of every module, in the order of a forward. ``expert_tensor``: the tensor group splits each expert, too."""
    tensor, sequence = int(layout["tensor"]), bool(layout["sequence"])
    found = [
        _vocabulary("embedding", workload, tensor),
        *_attention(workload, tensor),
        *_feed_forward(workload, tensor, int(layout["expert"]), tensor if expert_tensor else 1),
        Split(
            "norms, residuals",
            "sequence",
            f"{workload.sequence // int(layout['context']) // tensor} tokens a rank",
        )
        if sequence and tensor > 1
        else Split("norms, residuals", "whole", "the same on every rank of the group"),
        _vocabulary("head", workload, tensor),
    ]
    if int(layout["context"]) > 1:
        tokens = workload.sequence // int(layout["context"])
        found.append(
            Split("sequence", "sequence", f"{tokens} tokens a rank, keys and values go round the ring")
        )
    return tuple(found)


def _vocabulary(module: str, workload: Workload, tensor: int) -> Split:
    if tensor == 1:
        return Split(module, "whole", f"{workload.vocab} rows")
    padded = padded_vocabulary(workload.vocab, tensor)
    note = f", padded from {workload.vocab} to {padded}" if padded != workload.vocab else ""
    return Split(module, "vocabulary", f"{padded // tensor} rows a rank{note}")


def _attention(workload: Workload, tensor: int) -> list[Split]:
    if tensor == 1:
        return [Split("attention", "whole", f"{workload.heads} heads")]
    keys = workload.kv_heads
    shared = (
        f"{keys // tensor} of keys and values"
        if keys >= tensor
        else f"keys and values repeated on {tensor // keys} ranks"
    )
    heads = f"{workload.heads // tensor} heads a rank, {shared}"
    if workload.latent is not None:
        heads = f"{workload.heads // tensor} heads a rank; the compressed vectors are whole"
    return [
        Split("attention queries, keys, values", "column", f"by heads: {heads}"),
        Split("attention scores", "head", f"{workload.heads // tensor} heads a rank"),
        Split("attention output", "row", f"{workload.heads * workload.head_size // tensor} inputs a rank"),
    ]


def _feed_forward(workload: Workload, tensor: int, expert: int, parts: int) -> list[Split]:
    """``parts``: of each expert."""
    found = []
    if workload.mixture_layers < workload.layers:
        found += _dense("mlp", workload.ffn, tensor, workload.gated)
    if workload.is_mixture:
        each = workload.experts // min(expert, workload.experts)
        kind = "expert" if expert > 1 else "whole" if parts == 1 else "column"
        width = workload.expert_ffn
        own = (
            "whole" if parts == 1 else f"split over tensor ranks, {width // parts} of {width} features a rank"
        )
        found.append(Split("experts", kind, f"{each} of {workload.experts} a rank, each {own}"))
        found.append(Split("router", "whole", "the same on every rank"))
        if workload.shared_experts:
            width = workload.shared_experts * workload.shared_ffn
            found += _dense("shared experts", width, tensor, workload.gated)
    return found


def _dense(name: str, width: int, tensor: int, gated: bool) -> list[Split]:
    if tensor == 1:
        return [Split(name, "whole", f"width {width}")]
    first = f"{name} gate, up" if gated else f"{name} up"
    return [
        Split(first, "column", f"{width // tensor} of {width} features a rank"),
        Split(f"{name} down", "row", f"{width // tensor} of {width} inputs a rank"),
    ]
