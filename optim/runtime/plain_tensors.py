"""Which tensors are nothing but tensors: no subclass with a meaning of its own."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["PLAIN", "is_plain"]

#: Exact types. A prediction of memory adds fake tensors, which stand for plain ones.
PLAIN: set[type] = {torch.Tensor, nn.Parameter}


def is_plain(tensor: object) -> bool:
    """Of exactly such a type."""
    return type(tensor) in PLAIN
