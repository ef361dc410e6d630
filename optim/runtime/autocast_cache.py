"""Forwards without gradients in the middle of a training step's autocast, which must leave nothing behind there.

Autocast keeps the cast of a weight until its outermost region ends. A cast that was made without gradients would be taken by the
forward that is trained on: the weight would get none, and a recomputation that casts again would not match.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["without_cached_casts"]


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """Casts are made anew, and not kept."""
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)
