"""Transformers' models under context parallelism, through its registry of attention functions."""

from __future__ import annotations

from typing import Any

import torch

from trine.optim.runtime.context_attention import current
from trine.record.errors import UsageError

__all__ = ["NAME", "is_of_transformers", "loss_arguments", "register"]

#: What the attention is called in a model's configuration.
NAME = "trine_context"


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether its attention is chosen by Transformers' registry."""
    return callable(getattr(model, "set_attn_implementation", None)) and hasattr(model, "config")


def register() -> None:
    """Make the attention known; as often as one likes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def loss_arguments(shifted: torch.Tensor, valid: torch.Tensor, ranks: int) -> dict[str, Any]:
    """What makes a model's own loss that of the whole sequence, in the mean over ``ranks``.

    ``shifted`` are this rank's part of the next tokens' labels, ``valid`` how many the whole sequence has.
    """
    return {"shift_labels": shifted, "num_items_in_batch": valid / ranks}


def _mask(*arguments: Any, **named: Any) -> Any:
    """None while sequences lie in parts: the attention itself knows what is causal."""
    if current() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*arguments, **named)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    attending = current()
    if attending is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        named.update(dropout=dropout, scaling=scaling, is_causal=is_causal)
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **named
        )
        return result
    for unknown in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if named.get(unknown) is not None:
            raise UsageError(
                f"parallel.context: attention of {type(module).__name__} has {unknown}, which is not computed over parts of a "
                "sequence: configure the model without it, or drop the key"
            )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    mixed = attending.attend(
        query, key, value, dropout, causal, scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed.transpose(1, 2).contiguous(), None
