"""Updates and norms of shards without DTensor's bookkeeping, which costs the host a tenth of a millisecond an operator.

An optimizer that updates element by element does the same to a shard as to the whole, so PyTorch's own optimizers see
this rank's plain tensors while they step; before and after, groups and state hold DTensors, as everybody else expects.
Other optimizers keep DTensors, whose operators mean the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from trine.optim.runtime.plain_tensors import local

__all__ = ["clip_gradients", "placed", "step_on_shards", "steps_by_element"]

#: Their update of an element depends on nothing but that element (torch/optim/*.py).
_BY_ELEMENT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


#: What the optimizer holds, its stand-in while it steps, and its state before.
_Swap = tuple[DTensor, nn.Parameter, dict[str, Any]]


def placed(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """A DTensor of this rank's part, placed as ``like`` is. As FSDP2 makes its own, without autograd."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[attr-defined,no-untyped-call]


def steps_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update of a part of a parameter is known to be that part of the whole's."""
    return type(optimizer) in _BY_ELEMENT


def step_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Let the optimizer step on plain shards from now on; false for one that is not PyTorch's own."""
    if not steps_by_element(optimizer):
        return False
    swapped: list[_Swap] = []

    def before(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        if swapped:  # the step before this one raised
            after(optimizer, arguments, named)
        for group in optimizer.param_groups:
            group["params"] = [_enter(optimizer, p, swapped) for p in group["params"]]

    def after(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        whole = {id(plain): held for held, plain, _ in swapped}
        for group in optimizer.param_groups:
            group["params"] = [whole.get(id(p), p) for p in group["params"]]
        for held, plain, earlier in swapped:
            state = optimizer.state.pop(plain, None)
            if state:
                optimizer.state[held] = {
                    key: _placed_state(value, plain, held, earlier.get(key)) for key, value in state.items()
                }
        swapped.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return True


def _enter(optimizer: torch.optim.Optimizer, held: Any, swapped: list[_Swap]) -> Any:
    if not isinstance(held, DTensor):
        return held
    plain = nn.Parameter(held._local_tensor, requires_grad=held.requires_grad)
    if isinstance(held.grad, DTensor):
        plain.grad = held.grad._local_tensor
    state = optimizer.state.pop(held, None)
    if state:
        optimizer.state[plain] = {
            key: value._local_tensor if isinstance(value, DTensor) else value for key, value in state.items()
        }
    swapped.append((held, plain, state or {}))
    return plain


def _placed_state(value: Any, plain: torch.Tensor, held: DTensor, earlier: Any) -> Any:
    if isinstance(earlier, DTensor) and earlier._local_tensor is value:  # updated in place
        return earlier
    moment = isinstance(value, torch.Tensor) and plain.dim() and value.shape == plain.shape
    return placed(value, held) if moment else value


def clip_gradients(
    parameters: Sequence[torch.Tensor],
    most: float,
    stages: distributed.ProcessGroup | None = None,
    elsewhere: Collection[int] = (),
) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` in the 2-norm, over shards: the norm is the whole gradient's.

    Gradients may be DTensors of several meshes, and plain. Each kind of sharding costs one all-reduce of one number for
    each dimension that it is sharded over, and the ``stages`` of a pipeline one more. ``elsewhere``: ids of parameters
    that another stage counts.
    """
    with_gradients = [p for p in parameters if p.grad is not None]
    if not with_gradients and stages is None:
        return
    parts = [local(p.grad) for p in with_gradients]
    like = parts[0] if parts else torch.zeros((), dtype=torch.float32)
    total = _square([], like)
    for groups, held in _by_sharding(with_gradients, parts, elsewhere):
        square = _square(held, like)
        if groups and square.device.type == "cpu":  # the host's memory, which a device's group may not reach
            square = square.to(distributed.distributed_c10d._get_object_coll_device(groups[0]))
        for group in groups:
            distributed.all_reduce(square, group=group)
        total = total + square.to(like.device)
    if stages is not None:
        # One type and device on all stages, whatever their gradients have: a stage may hold other types, or none at all.
        total = total.to(distributed.distributed_c10d._get_object_coll_device(stages), torch.float64)
        distributed.all_reduce(total, group=stages)
        total = total.to(like.device)
    # PyTorch's clip_grads_with_norm_: no branch on the value, which would wait for a device.
    factor = torch.clamp(most / (total.sqrt() + 1e-6), max=1.0)
    for dtype in {part.dtype for part in parts}:
        torch._foreach_mul_([part for part in parts if part.dtype == dtype], factor.to(dtype))


def _by_sharding(
    parameters: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], elsewhere: Collection[int]
) -> list[tuple[list[Any], list[torch.Tensor]]]:
    """For each kind of sharding its groups and the parts of gradients that lie so."""
    dimensions: dict[tuple[str, ...], tuple[str, ...]] = {}
    kinds: dict[tuple[str, ...], tuple[list[Any], list[torch.Tensor]]] = {}
    for parameter, part in zip(parameters, parts, strict=True):
        groups = _sharded_over(parameter.grad)
        names = tuple(group.group_name for group in groups)
        _, held = kinds.setdefault(names, (groups, []))
        dimensions[names] = _dimensions(parameter.grad)
        if id(parameter) not in elsewhere:
            held.append(part)
    # One order on all ranks, by dimensions: names of groups sort differently on others, which would then wait for each
    # other in turn, and add in another order.
    return [kinds[names] for names in sorted(kinds, key=lambda names: dimensions[names])]


def _sharded_over(gradient: Any) -> list[Any]:
    """The groups over which the gradient's parts lie."""
    if not isinstance(gradient, DTensor):
        return []
    mesh = gradient.device_mesh
    return [
        mesh.get_group(at) for at, each in enumerate(gradient.placements) if not isinstance(each, Replicate)
    ]


def _dimensions(gradient: Any) -> tuple[str, ...]:
    """What they are called, which is the same on all ranks."""
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names or tuple(map(str, range(gradient.device_mesh.ndim)))
    return tuple(
        n for n, each in zip(names, gradient.placements, strict=True) if not isinstance(each, Replicate)
    )


def _square(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    # Never in half precision: in fp16 the square of a norm above 256 is infinite, and clipping would zero every gradient.
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not tensors:
        return torch.zeros((), dtype=dtype, device=like.device)
    return torch.nn.utils.get_total_norm(tensors).to(dtype).square()
