"""Experts of a live model over ranks: each rank keeps its share of the stacked weights, and tokens travel.

A module of experts is told by its structure: parameters that are all stacked along a first dimension of ``num_experts``,
and a ``forward(hidden_states, top_k_index, top_k_weights)`` of tokens with the experts that were picked for them. The
samples have it, and so have Transformers' mixtures from version 5 on (Mixtral, Qwen-MoE, OLMoE, DeepSeek and others).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard

from trine.optim.runtime.adoption import plain_name, replace_parameters
from trine.optim.runtime.experts.exchange import Traffic, exchanged, rooted
from trine.optim.runtime.experts.load import Load

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trine.optim.techniques._assembly import Assembly

__all__ = ["Spread", "experts_of", "spread_experts"]

#: What the forward of a module of experts takes, as Transformers has it.
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]

#: Its name from PyTorch 2.13 on, and before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name → module of experts, in the model's order."""
    return {plain_name(name): module for name, module in model.named_modules() if _is_experts(module)}


def _is_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or len(own) != len(list(module.parameters())):
        return False
    if any(parameter.dim() < 2 or parameter.shape[0] != count for parameter in own):
        return False
    return list(inspect.signature(module.forward).parameters) == _ARGUMENTS


def spread_experts(assembly: Assembly, mesh: DeviceMesh, found: dict[str, nn.Module]) -> list[Spread]:
    """Cut each module's weights over ``mesh``, with the live optimizer's state, and send tokens where they are."""
    replaced: dict[torch.Tensor, nn.Parameter] = {}
    traffic, load = Traffic(), Load()
    spreads = []
    for name, module in found.items():
        for key, parameter in list(module.named_parameters(recurse=False)):
            own = nn.Parameter(_part(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
            replaced[parameter] = own
            setattr(module, key, own)
        spreads.append(Spread(name, module, mesh, traffic, load))
        assembly.spread[module] = "expert"
    replace_parameters(assembly, replaced, lambda value, parameter: _part(value, mesh))
    return spreads


def _part(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's experts of what every rank has whole; a copy, since a view would keep the whole alive."""
    share = whole.shape[0] // mesh.size()
    start = mesh.get_local_rank() * share
    local = whole[start : start + share].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


class Spread:
    """One module of experts, over the ranks of a mesh of one dimension: takes the place of its ``forward``."""

    def __init__(self, name: str, module: nn.Module, mesh: DeviceMesh, traffic: Traffic, load: Load) -> None:
        self.name = name
        self.traffic = traffic
        self.load = load
        self._module = module
        self._group = mesh.get_group()
        self._ranks, self._place = mesh.size(), mesh.get_local_rank()
        self._experts = cast(int, module.num_experts)
        self._own = self._experts // self._ranks
        self._compute = module.forward
        module.num_experts = self._own  # type: ignore[assignment]  # what its own forward counts by
        module.forward = self.forward

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the module's own: tokens (n, hidden), their picks and weights (n, k); to (n, hidden). Collective.

        How many tokens go where must be known on the host before they can leave: one wait for the device a layer, as
        every dropless all-to-all of this kind has it.
        """
        picked = top_k_index.flatten()
        order = picked.argsort(stable=True)  # by expert, and so by rank
        counts = self._counts(picked)
        table = counts.cpu()
        if torch.is_grad_enabled():
            self.load.add(self.name, table, self._ranks)
        sent = table[self._place].view(self._ranks, self._own).sum(1).tolist()
        first = self._place * self._own
        mine = table[:, first : first + self._own]
        received = mine.sum(1).tolist()
        rows = hidden_states[order // top_k_index.shape[1]]
        # Weights sum gradients over the tokens of all ranks, where data parallelism wants their mean: they see gradients
        # divided by the ranks, and the tokens' own are made whole again on their way back.
        arrived = exchanged(rows, sent, received, self._group, self.traffic, float(self._ranks))
        computed = self._computed(arrived, counts[:, first : first + self._own])
        back = exchanged(computed, received, sent, self._group, self.traffic, 1.0 / self._ranks)
        by_token = back[order.argsort()].view(*top_k_index.shape, -1)
        return (by_token * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _counts(self, picked: torch.Tensor) -> torch.Tensor:
        """(ranks, experts): how often each rank's tokens picked each expert."""
        own = picked.bincount(minlength=self._experts)
        counts = own.new_empty((self._ranks * self._experts,))
        _all_gather(counts, own, group=self._group)
        return counts.view(self._ranks, self._experts)

    def _computed(self, arrived: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of the rows that came; ``counts`` (ranks, own experts) of them by sender."""
        with _local_parameters(self._module) as parameters:
            if not len(arrived):
                return rooted(arrived, parameters)
            experts = torch.arange(self._own, device=arrived.device).repeat(self._ranks)
            index = experts.repeat_interleave(counts.flatten(), output_size=len(arrived))
            weights = arrived.new_ones((len(arrived), 1))
            result: torch.Tensor = self._compute(arrived, index.unsqueeze(-1), weights)
            return result.to(arrived.dtype)


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The module sees this rank's part of each parameter as a plain tensor, with its gradient."""
    held: dict[str, Any] = dict(module._parameters)
    local: dict[str, torch.Tensor] = {
        name: parameter.to_local() for name, parameter in held.items() if isinstance(parameter, DTensor)
    }
    module.__dict__.update(local)  # found before parameters are
    try:
        yield list(local.values())
    finally:
        for name in local:
            del module.__dict__[name]
