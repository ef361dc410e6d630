"""A look at what a stage takes past the cut without a gradient, as masks and detached gates: no witness shows that.

What stands in for other stages' modules gives zeros. Where a stage's output is another one once it gives noise, the zeros are
not only of the right shape, they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trine.optim.runtime.autocast_cache import without_cached_casts
from trine.optim.runtime.pipelining.placeholders import Placeholder
from trine.optim.runtime.random_streams import random_streams, restore_random_streams

__all__ = ["output_of", "used"]

#: How far outputs of equal inputs may be apart, of the largest value: kernels on devices sum in any order.
_FAR = {torch.float64: 1e-9, torch.float32: 1e-4}
_FAR_IN_OTHERS = 3e-2


def used(
    model: nn.Module, stood_in: Sequence[Placeholder], run: Callable[[], torch.Tensor], device: torch.device
) -> list[str]:
    """Names of those whose values ``run()``, a forward of ``model``, depends on. Buffers and random numbers stay."""
    if not stood_in:
        return []
    with torch.no_grad(), without_cached_casts():
        expected = _run(model, run, device)
        with _noisy(stood_in):
            if _same(expected, _run(model, run, device)):
                return []
        found = []
        for each in stood_in:
            with _noisy([each]):
                if not _same(expected, _run(model, run, device)):
                    found.append(each.name)
    return found or [each.name for each in stood_in]


def _run(model: nn.Module, run: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    streams = random_streams(device)
    try:
        with _copied_buffers(model):
            return run().detach()
    finally:
        restore_random_streams(device, streams)


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Others of the same values in the buffers' places: a backward that saved them would see them written."""
    kept = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    copies = {
        id(buffer): buffer.detach().clone()
        for _, buffers in kept
        for buffer in buffers.values()
        if buffer is not None
    }
    try:
        for module, buffers in kept:
            module._buffers.update({name: copies.get(id(buffer)) for name, buffer in buffers.items()})
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


@contextmanager
def _noisy(placeholders: Sequence[Placeholder]) -> Iterator[None]:
    for each in placeholders:
        each.begin_noise()
    try:
        yield
    finally:
        for each in placeholders:
            each.end_noise()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    far = _FAR.get(one.dtype, _FAR_IN_OTHERS) * float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=far, equal_nan=True)


def output_of(returned: Any) -> torch.Tensor | None:
    """What a loss is made of: the loss or the logits in an output, or its first tensor of floating-point numbers."""
    if isinstance(returned, Mapping):
        for key in ("loss", "logits"):
            found = returned.get(key)
            if isinstance(found, torch.Tensor):
                return found
    for leaf in tree_leaves(returned):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None
