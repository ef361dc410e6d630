"""Which tensors are nothing but tensors: no subclass with a meaning of its own. And the plain part of those that are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["PLAIN", "is_plain", "local"]

#: Exact types. A prediction of memory adds fake tensors, which stand for plain ones.
PLAIN: set[type] = {torch.Tensor, nn.Parameter}


def is_plain(tensor: object) -> bool:
    """Of exactly such a type."""
    return type(tensor) in PLAIN


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that is sharded; any other tensor itself."""
    part: torch.Tensor = tensor
    if hasattr(tensor, "to_local"):
        # Where there is nothing to differentiate, as of gradients, autograd would cost the host tens of microseconds.
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.requires_grad):
            part = tensor.to_local()
    return part
