"""Models of any size for ``trine fit``: what they are trained with, without any data.

trine fit trine.samples.sizing:gpt layers=32 hidden=4096 heads=32 sequence=2048 batch=1 --ranks 64 --set zero.stage=3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trine.samples.gpt import GPT, GPTConfig, loss_of

__all__ = ["gpt"]


def gpt(
    batch: int = 1, dtype: str = "float32", vocab: int = 50257, attention: str = "sdpa", **shape: Any
) -> tuple[torch.nn.Module, Callable[[Any, Any], Any], Any]:
    """The sample transformer, its loss, and ``batch`` rows of token ids a rank.

    ``shape``: layers, hidden, heads, sequence, dropout and the rest of
    :class:`trine.samples.gpt.GPTConfig`; ``dtype`` is what its parameters are stored in.
    """
    config = GPTConfig(vocab=vocab, attention=attention, **shape)
    model = GPT(config).to(getattr(torch, dtype))
    ids = torch.zeros(batch, config.sequence, dtype=torch.int64)
    return model, loss_of, (ids, ids.clone())
