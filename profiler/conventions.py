"""Model FLOPs of a transformer by the conventions that people quote, so that figures can be compared.

With T tokens a step on this rank, N parameters that are multiplied by (embedding look-ups left out, a tied
output head counted), L layers, H heads of size Q, K key-value heads, hidden size h, feed-forward size f, sequence s,
vocabulary V:

============ ==============================================================================================
``palm``      T · (6N + 12·L·H·Q·s). Attention in full (Chowdhery et al., PaLM, 2022, appendix B).
``megatron``  3 · T · (L · layer + 2·h·V) with layer = 4·h·Q·(H + K) + 2·H·Q·s + 2·m·h·f: attention counted half,
              for the causal mask; m is 2, or 3 for a gated feed-forward (Megatron-LM, ``num_floating_point_operations``).
``narayanan`` 72 · T · L · h² · (1 + s/6h + V/12Lh): equation 3 of Narayanan et al., SC 2021, without recomputation.
``6n``        6 · N · T (Kaplan et al., 2020).
============ ==============================================================================================

They differ by a tenth and more on the same run; a utilisation without its convention says little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["convention_flops"]


def convention_flops(
    shape: Mapping[str, int | None],
    parameters_without_embedding: int | None,
    tokens: int | None,
) -> dict[str, float]:
    """FLOPs a step by convention, for each convention whose inputs are all known.

    ``shape`` has the keys of ``metadata["model"]["shape"]`` (layers, hidden, heads, head_size, kv_heads, ffn, vocab,
    sequence), ``None`` where unknown; ``tokens`` are those of one step on one rank that holds the whole model.
    """
    found: dict[str, float] = {}
    if not tokens:
        return found
    count = parameters_without_embedding
    layers, hidden, heads = shape.get("layers"), shape.get("hidden"), shape.get("heads")
    sequence, vocab = shape.get("sequence"), shape.get("vocab")
    size = shape.get("head_size") or (hidden // heads if hidden and heads else None)
    if count and _is_transformer(shape):
        found["6n"] = 6.0 * count * tokens
    if count and layers and heads and size and sequence:
        found["palm"] = tokens * (6.0 * count + 12.0 * layers * heads * size * sequence)
    if layers and hidden and heads and size and sequence and vocab:
        attention = 4.0 * hidden * size * (heads + (shape.get("kv_heads") or heads))
        attention += 2.0 * heads * size * sequence
        feed_forward = _feed_forward_weights(shape, count)
        if feed_forward is not None:
            layer = attention + 2.0 * feed_forward
            found["megatron"] = 3.0 * tokens * (layers * layer + 2.0 * hidden * vocab)
    if layers and hidden and sequence and vocab:
        share = 1.0 + sequence / (6.0 * hidden) + vocab / (12.0 * layers * hidden)
        found["narayanan"] = 72.0 * tokens * layers * hidden**2 * share
    return found


def _is_transformer(shape: Mapping[str, Any]) -> bool:
    return bool(shape.get("layers") and shape.get("heads"))


def _feed_forward_weights(shape: Mapping[str, int | None], count: int | None) -> float | None:
    """Weights of one layer's feed-forward: m·h·f; ``None`` where two or three matrices cannot be told apart.

    How many matrices there are, and their size where the configuration is silent, follows from the parameters that
    attention and the output head leave over. Mixtures of experts fit neither and get no figure.
    """
    layers, hidden, vocab = shape.get("layers"), shape.get("hidden"), shape.get("vocab")
    heads = shape.get("heads")
    if not (layers and hidden and vocab and heads and count):
        return None
    size = shape.get("head_size") or hidden // heads
    attention = 2 * hidden * size * (heads + (shape.get("kv_heads") or heads))
    left = (count - hidden * vocab) / layers - attention
    if left <= 0:
        return None
    ffn = shape.get("ffn")
    if ffn is None:
        # Norms and biases are within a few percent of this.
        return left
    matrices = left / (hidden * ffn)
    nearest = round(matrices)
    return float(nearest * hidden * ffn) if nearest in (2, 3) and abs(matrices - nearest) < 0.2 else None
