"""Losses over logits that are cut by the vocabulary (``parallel.loss``): no rank ever has all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trine.optim.runtime.tensor_plans.styles import fresh

__all__ = ["over_vocabulary", "plain_loss", "plain_outputs"]

_depth = 0


@contextmanager
def over_vocabulary() -> Iterator[None]:
    """PyTorch's ``loss_parallel``, which may be entered twice, and is left when an exception passes through."""
    global _depth
    context = loss_parallel() if _depth == 0 else None
    if context is not None:
        context.__enter__()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if context is not None:
            context.__exit__(None, None, None)


def plain_loss(value: Any) -> Any:
    """A loss that all ranks have, without its placement."""
    return fresh(value.full_tensor()) if isinstance(value, DTensor) else value


def plain_outputs(model: nn.Module) -> Any:
    """Have ``model`` give its loss as a plain tensor: what it returns, or what its ``loss`` is. The hook's handle."""

    def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, DTensor) and output.dim() == 0:
            return plain_loss(output)
        if isinstance(getattr(output, "loss", None), DTensor):  # Transformers' outputs
            output["loss"] = plain_loss(output["loss"])
        return output

    return model.register_forward_hook(leave)
