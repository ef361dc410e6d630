"""Parameters that several stages use, as a head that is tied to the embedding: each stage has a copy, of equal bits.

Their gradients are summed over the copies before anything else is done with them (Megatron-LM's way: Shoeybi et al. 2019,
Narayanan et al. 2021), so that all copies take the same steps. A copy on another rank than the first is not counted again
in norms, and not saved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from trine.optim.runtime.plain_tensors import local

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["Copy", "Tie", "Ties", "group_of_places"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Where a copy stands: looked up at each use, since sharding puts another parameter there."""

    module: nn.Module
    attribute: str

    def parameter(self) -> nn.Parameter:
        """What stands there now."""
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter: its copies on this rank, and the ranks that hold others (``None``: all are here)."""

    name: str
    copies: tuple[Copy, ...]
    group: distributed.ProcessGroup | None


class Ties:
    """Sums the gradients of all ties of a rank; one all-reduce for each group and dtype."""

    def __init__(self, ties: Sequence[Tie]) -> None:
        self._ties = list(ties)

    def collect(self) -> None:
        """To be called once a step, by every rank of the pipeline. A tie that no stage used keeps no gradient."""
        sums: dict[tuple[Any, torch.dtype], list[tuple[Tie, torch.Tensor | None]]] = {}
        for tie in self._ties:
            own = _sum([copy.parameter() for copy in tie.copies])
            dtype = local(tie.copies[0].parameter()).dtype
            sums.setdefault((tie.group, dtype), []).append((tie, own))
        for (group, dtype), members in sums.items():
            _share(members, group, dtype)


def _sum(parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    return torch.stack(gradients).sum(0)


def _share(
    members: Sequence[tuple[Tie, torch.Tensor | None]],
    group: distributed.ProcessGroup | None,
    dtype: torch.dtype,
) -> None:
    wholes = [local(tie.copies[0].parameter()) for tie, _ in members]
    if group is None:
        for tie, own in members:
            _put(tie, own)
        return
    count = sum(whole.numel() for whole in wholes)
    flat = torch.zeros(count + len(members), dtype=dtype, device=wholes[0].device)
    parts = torch.split(flat[:count], [whole.numel() for whole in wholes])
    for place, ((_, own), part) in enumerate(zip(members, parts, strict=True)):
        if own is not None:
            part.copy_(own.reshape(-1))
            flat[count + place] = 1.0
    distributed.all_reduce(flat, group=group)
    lacking = any(own is None for _, own in members)  # a device is waited for only then
    used = flat[count:].tolist() if lacking else [1.0] * len(members)
    for (tie, _), part, whole, times in zip(members, parts, wholes, used, strict=True):
        _put(tie, part.view(whole.shape) if times else None)


def _put(tie: Tie, total: torch.Tensor | None) -> None:
    """The sum into each copy's gradient, in its own form."""
    if total is None:
        return
    for copy in tie.copies:
        parameter = copy.parameter()
        if parameter.grad is None:
            parameter.grad = _like(total, parameter)
        elif local(parameter.grad) is not total:
            local(parameter.grad).copy_(total)


def _like(total: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not hasattr(parameter, "device_mesh"):
        return total.clone()
    from trine.optim.runtime.local_steps import placed

    return placed(total.clone(), parameter)


_groups: dict[tuple[int, int, tuple[int, ...]], tuple[Any, distributed.ProcessGroup]] = {}


def group_of_places(facts: Facts, places: tuple[int, ...]) -> distributed.ProcessGroup | None:
    """The ranks at these places of this rank's pipeline; ``None`` where this rank stands at none of them, or alone.

    Collective over all ranks, which must ask for the same places in the same order.
    """
    if len(places) < 2:
        return None
    world, pipelines = distributed.group.WORLD, facts.ranks // facts.layout.pipeline
    key = (id(world), pipelines, places)
    if key not in _groups:
        made = [
            distributed.new_group([place * pipelines + rest for place in places]) for rest in range(pipelines)
        ]
        own = made[facts.rank % pipelines]
        _groups[key] = (world, own)  # the world is kept so that its id is not given to another
    return _groups[key][1] if facts.layout.place("pipeline") in places else None
