"""Updates and norms of shards without DTensor's bookkeeping, which costs the host a tenth of a millisecond an operator.

An optimizer that updates element by element does the same to a shard as to the whole, so PyTorch's own optimizers see
this rank's plain tensors while they step; before and after, groups and state hold DTensors, as everybody else expects.
Other optimizers keep DTensors, whose operators mean the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["clip_gradients", "placed", "step_on_shards"]

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


def step_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Let the optimizer step on plain shards from now on; false for one that is not PyTorch's own."""
    if type(optimizer) not in _BY_ELEMENT:
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


def clip_gradients(parameters: Sequence[torch.Tensor], most: float) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` in the 2-norm, over shards: the norm is the whole gradient's.

    One all-reduce of one number over the shard group. Gradients are all DTensors of one mesh, or all plain.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    if len(sharded) < len(gradients) or not sharded:
        torch.nn.utils.clip_grad_norm_(parameters, most)
        return
    mesh = sharded[0].device_mesh
    everywhere = [g._local_tensor for g in sharded if isinstance(g.placements[-1], Replicate)]
    parts = [g._local_tensor for g in sharded if not isinstance(g.placements[-1], Replicate)]
    square = _norm(parts, sharded[0]).square()
    distributed.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    total = (square + _norm(everywhere, sharded[0]).square()).sqrt()
    # PyTorch's clip_grads_with_norm_: no branch on the value, which would wait for a device.
    torch._foreach_mul_([g._local_tensor for g in sharded], torch.clamp(most / (total + 1e-6), max=1.0))


def _norm(tensors: list[torch.Tensor], like: DTensor) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=like.dtype, device=like._local_tensor.device)
    return torch.nn.utils.get_total_norm(tensors)
