"""Gradients of what every rank has whole: where each saw a part of the activations, they are sums over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial

from trine.optim.runtime.local_steps import placed
from trine.optim.runtime.plain_tensors import local

__all__ = ["complete"]


def complete(modules: list[nn.Module]) -> None:
    """Give each gradient the placement of its parameter: one all-reduce for all that are partial sums, by group and dtype.

    Under FSDP2 there is nothing left to do: it completes gradients before it averages them.
    """
    partial: dict[tuple[Any, torch.dtype], list[nn.Parameter]] = {}
    for module in modules:
        for parameter in module.parameters():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements == parameter.placements:
                continue
            mesh = gradient.device_mesh
            if (
                mesh.ndim == 1
                and gradient.placements == (Partial(),)
                and parameter.placements[0].is_replicate()
            ):
                partial.setdefault((mesh.get_group(), gradient.dtype), []).append(parameter)
            else:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (group, _), parameters in partial.items():
        _sum(parameters, group)


def _sum(parameters: list[nn.Parameter], group: distributed.ProcessGroup) -> None:
    parts = [local(parameter.grad).reshape(-1) for parameter in parameters if parameter.grad is not None]
    flat = torch.cat(parts)
    distributed.all_reduce(flat, group=group)
    for parameter, part in zip(parameters, torch.split(flat, [len(each) for each in parts]), strict=True):
        parameter.grad = placed(part.view(parameter.shape), parameter)
