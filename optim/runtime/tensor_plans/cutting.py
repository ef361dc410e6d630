"""Parameters become DTensors over the tensor dimension, and the live optimizer's state with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trine.optim.runtime.adoption import plain_name, replace_parameters
from trine.optim.runtime.tensor_plans.interleaving import Interleaved
from trine.optim.runtime.tensor_plans.roles import Column, Plan, is_transposed
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Cut", "adopt", "bytes_of", "cuts_of", "order_of", "require_owners"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter: ``dim`` is what is cut, ``None`` where every rank has it whole."""

    name: str
    module: nn.Module
    key: str
    dim: int | None
    sections: tuple[int, ...] = ()

    @property
    def parameter(self) -> nn.Parameter:
        """As the module has it now."""
        found = self.module._parameters[self.key]
        assert found is not None
        return found


def cuts_of(plan: Plan, sequence: bool) -> list[Cut]:
    """Every parameter that ``plan`` makes a DTensor of. ``sequence``: norms too, whose gradients are sums over ranks."""
    found: list[Cut] = []
    columns, rows = list(plan.columns), list(plan.rows)
    for block in plan.blocks:
        for attention in block.attentions:
            columns += attention.columns
            rows += attention.rows
            found += [cut for name, norm in attention.norms for cut in _whole(name, norm)]
        for forward in block.feed_forwards:
            columns += forward.columns
            rows += forward.rows
        for mixture in block.mixtures:
            for key, (dim, sections) in mixture.cuts.items():
                found.append(Cut(mixture.experts_name, mixture.experts, key, dim, sections))
        if sequence:
            found += [cut for name, norm in block.norms for cut in _whole(name, norm)]
    for column in columns:
        found += _of_column(column)
    for name, module in rows:
        found += _of_row(name, module)
    for pair in (plan.embedding, plan.head):
        if pair is not None:
            found += [Cut(pair[0], pair[1], key, 0) for key in _keys(*pair)]
    return found


def _keys(name: str, module: nn.Module) -> list[str]:
    held = [key for key, parameter in module._parameters.items() if parameter is not None]
    if set(held) - {"weight", "bias"}:
        raise UsageError(
            f"parallel.tensor: {name} is a {type(module).__name__} with {', '.join(held)}, which is no plain linear layer: "
            'keep it whole with "replicate" in parallel.plan, or drop parallel.tensor'
        )
    return held


def _whole(name: str, module: nn.Module) -> list[Cut]:
    return [Cut(name, module, key, None) for key in _keys(name, module)]


def _of_column(column: Column) -> list[Cut]:
    dim = 1 if is_transposed(column.module) else 0
    return [
        Cut(column.name, column.module, key, dim if key == "weight" else 0, column.sections)
        for key in _keys(column.name, column.module)
    ]


def _of_row(name: str, module: nn.Module) -> list[Cut]:
    dim = 0 if is_transposed(module) else 1
    return [Cut(name, module, key, dim if key == "weight" else None) for key in _keys(name, module)]


def require_owners(model: nn.Module, cuts: Sequence[Cut]) -> None:
    """Raise ``UsageError`` for a parameter that is shared with a module that would not see it cut alike."""
    how: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    places = {(id(cut.module), cut.key) for cut in cuts}
    for cut in cuts:
        same = how.setdefault(id(cut.parameter), (cut.dim, cut.sections))
        if same != (cut.dim, cut.sections):
            raise UsageError(
                f"parallel.tensor: {cut.name}.{cut.key} is shared with a module that would cut it otherwise: keep both whole "
                'with "replicate" in parallel.plan'
            )
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in how and (id(module), key) not in places:
                raise UsageError(
                    f"parallel.tensor: {name}.{key} is shared with a matrix that is cut, and has no known place itself: keep "
                    'both whole with "replicate" in parallel.plan'
                )


def adopt(assembly: Assembly, cuts: Sequence[Cut], mesh: DeviceMesh) -> None:
    """Replace the parameters in modules, optimizer and names, and note which rows were put into another order.

    Every rank must hold the same values. A parameter that stands in several modules stays one.
    """
    replaced: dict[torch.Tensor, nn.Parameter] = {}
    of_new: dict[int, Cut] = {}
    names = {id(p): plain_name(name) for stage in assembly.stages for name, p in stage.named_parameters()}
    for cut in cuts:
        old = cut.parameter
        new = replaced.get(old)
        if new is None:
            new = nn.Parameter(_placed(old.detach(), cut, mesh), requires_grad=old.requires_grad)
            replaced[old] = new
            of_new[id(new)] = cut
            order = order_of(cut, mesh)
            if order is not None:
                assembly.reordered[names[id(old)]] = order.reordered
        cut.module._parameters[cut.key] = new

    def convert(value: torch.Tensor, new: nn.Parameter) -> torch.Tensor:
        return _placed(value, of_new[id(new)], mesh)

    replace_parameters(assembly, replaced, convert)


def order_of(cut: Cut, mesh: DeviceMesh) -> Interleaved | None:
    """How the rows of one that holds several matrices lie over ``mesh``; ``None`` where they stay as they are."""
    if len(cut.sections) < 2 or cut.dim is None:
        return None
    return Interleaved(cut.dim, cut.sections, mesh.size())


def _placed(value: torch.Tensor, cut: Cut, mesh: DeviceMesh) -> DTensor:
    """This rank's part of what every rank has whole, in storage of its own."""
    if cut.dim is None:
        return DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False)
    order = order_of(cut, mesh)
    local = value if order is None else order.permuted(value)
    size = value.shape[cut.dim] // mesh.size()
    local = local.narrow(cut.dim, mesh.get_local_rank() * size, size)
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        [Shard(cut.dim)],
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )


def bytes_of(cuts: Sequence[Cut]) -> Mapping[str, int]:
    """``whole`` and ``cut``: bytes of the parameters that stay and of those that are divided, each counted once."""
    seen: set[int] = set()
    found = {"whole": 0, "cut": 0}
    for cut in cuts:
        parameter = cut.parameter
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found["whole" if cut.dim is None else "cut"] += parameter.numel() * parameter.element_size()
    return found
