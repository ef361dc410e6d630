"""The loop that people write, in one process: what every technique is held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["plain_losses"]


def plain_losses(
    model: Any, optimizer: Any, batches: Iterable[Any], loss_fn: Any, clip: float | None = None
) -> list[float]:
    """The loss of each step. ``loss_fn(model, batch)`` gives it, alone or before others."""
    import torch

    losses = []
    for batch in batches:
        result = loss_fn(model, batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
