"""Find a script's models and loaders among everything that lives in its process."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["holds", "loader_of", "outermost_modules"]


def outermost_modules(optimizers: list[Any]) -> list[Any]:
    """Modules that hold parameters of these optimizers (of any trainable parameter when there are none) and are
    in no other module: DistributedDataParallel rather than what it wraps."""
    wanted = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    # type(), not isinstance: some objects pretend to a class by importing half a library.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    found = []
    for module in modules:
        if id(module) not in inner and holds(module, wanted):
            found.append(module)
    return found


def holds(module: Any, wanted: set[int]) -> bool:
    """Whether a module has a parameter of these ids; a trainable one when there are none."""
    try:
        return any(id(p) in wanted if wanted else p.requires_grad for p in module.parameters())
    except (AttributeError, RuntimeError):  # half built, or already half gone
        return False


def loader_of(sampler: Any) -> Any:
    """The ``DataLoader`` whose batches this sampler orders."""
    for thing in gc.get_objects():
        if issubclass(type(thing), DataLoader) and thing._index_sampler is sampler:
            return thing
    return None
