"""A look at what every rank of a tensor group has whole, before the first update: its gradients and buffers are the same.

A parameter that is used on a rank's own heads, features or tokens (a learned slope between two cut matrices, a scale of the
residual under ``parallel.sequence``) gets that part's gradient on each rank, though every output is right: no comparison of
forwards shows it. So do buffers that a forward writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trine.optim.runtime.adoption import without_inserted
from trine.optim.runtime.plain_tensors import local
from trine.record.errors import UsageError

__all__ = ["look_at_whole"]

#: How far they may be apart, of their length; ranks compute them alike, so that only kernels that sum in any order differ.
_FAR = {torch.float64: 1e-6, torch.float32: 1e-2}
_FAR_IN_OTHERS = 0.1
#: Gradients so much shorter than the longest may be rounding alone.
_LEAST_SHARE = 1e-3
_READ = 2**16  # elements of each


def look_at_whole(modules: Sequence[nn.Module], mesh: DeviceMesh, by_sequence: bool) -> Callable[[], None]:
    """What is to be called once gradients are complete, before they are used. Collective over ``mesh`` the first time, and
    again until all are finite.

    ``by_sequence``: the sequence is divided, too. The call raises ``UsageError`` on all ranks of the group where they differ.
    """
    state = {"is_done": False}

    def look() -> None:
        if state["is_done"]:
            return
        found = list(_gradients(modules)) + list(_buffers(modules))
        high, low, length = _over_ranks([value for _, value in found], mesh)
        if not torch.isfinite(high).all() or not torch.isfinite(length).all():
            return  # a scaled loss has overflowed
        state["is_done"] = True
        for (name, value), most, least, size in zip(
            found, high.tolist(), low.tolist(), length.tolist(), strict=True
        ):
            far = _FAR_IN_OTHERS if value is None else _FAR.get(value.dtype, _FAR_IN_OTHERS)
            if most - least > far * size:
                raise UsageError(_said(name, by_sequence))

    return look


def _said(name: str, by_sequence: bool) -> str:
    alone = "heads, features or tokens" if by_sequence else "heads or features"
    drop = (
        "parallel.sequence, or parallel.tensor where that is not enough" if by_sequence else "parallel.tensor"
    )
    return (
        f"parallel.tensor: {name} is whole on every rank, and its gradient or value is another on each, since code uses it on the "
        f'rank\'s own {alone} alone: keep the module that uses it whole ("replicate" in parallel.plan), or drop {drop}'
    )


def _gradients(modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for module in modules:
        for name, parameter in module.named_parameters():
            if not _is_divided(parameter):
                gradient = parameter.grad
                yield without_inserted(name), None if gradient is None else local(gradient).detach()


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for module in modules:
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and not isinstance(buffer, DTensor):
                yield without_inserted(name), buffer.detach()


def _is_divided(parameter: nn.Parameter) -> bool:
    """Whether ranks of a tensor group have different parts of it; those of other groups do not matter here."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        "tensor" in name.split("_") and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=False)
    )


def _over_ranks(
    values: Sequence[torch.Tensor | None], mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each: the largest and the least of the ranks' projections, and how long it is at least taken to be. (values,) each."""
    told = torch.zeros(2, len(values), dtype=torch.float64, device=mesh.device_type)
    for place, value in enumerate(values):
        if value is not None and value.numel():
            flat = value.reshape(-1)[:_READ].double()
            pattern = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).sin_()
            told[0, place], told[1, place] = flat.dot(pattern / pattern.norm()), flat.norm()
    told = torch.cat([told, -told[:1]])
    distributed.all_reduce(told, distributed.ReduceOp.MAX, mesh.get_group())
    high, length, low = told[0], told[1], -told[2]
    return high, low, length.clamp_min(_LEAST_SHARE * float(length.max()) if len(values) else 0.0)
