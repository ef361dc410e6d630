"""The whole optimizer step in few kernels: ``"optimizer"`` in ``compute.fuse``, for :mod:`fused_regions`.

The live optimizer is switched in place, trained or not: its state, its parameter groups and every
scheduler that holds it stay as they are. PyTorch's fused Adam, AdamW, SGD and Adagrad update all of
a group's parameters in one pass over memory instead of a dozen; for the other optimizers, and on devices
without fused kernels, its ``foreach`` implementation makes each operator one call over all parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["apply", "check", "implementation_of"]

_KEY = "compute.fuse"


def check(facts: Facts) -> None:
    """Raise ``UsageError`` for an optimizer or parameters that have neither kernel."""
    import torch

    optimizer = facts.optimizer
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError(
                f'{_KEY}: a differentiable optimizer cannot be fused: take "optimizer" out, or differentiable=True'
            )
        odd = [p for p in group["params"] if not p.is_floating_point()]
        if odd:
            raise UsageError(
                f"{_KEY}: fused kernels take floating-point parameters, and one of {name}'s is {odd[0].dtype}: "
                'take "optimizer" out'
            )
    wanted = _best(optimizer)
    if wanted is None:
        raise UsageError(
            f'{_KEY}: {name} has neither a fused nor a foreach implementation: take "optimizer" out'
        )
    for group in optimizer.param_groups:
        by_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        if wanted == "foreach" and by_tensor:
            raise UsageError(
                f"{_KEY}: {name} has no fused kernel on this device, and its foreach implementation takes no "
                'learning rate as a tensor: give a number, or take "optimizer" out'
            )


def apply(assembly: Assembly) -> None:
    """Switch the optimizer where it stands."""
    import torch

    optimizer = assembly.optimizer
    before, wanted = implementation_of(optimizer), _best(optimizer)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["foreach"] = wanted == "foreach"
        if "fused" in group:
            group["fused"] = wanted == "fused"
    note = ""
    if wanted == "fused":
        for parameter, state in optimizer.state.items():
            step = state.get("step")
            # The fused kernel reads the step on the parameters' own device, as a float32 tensor.
            if step is not None and isinstance(parameter, torch.Tensor):
                state["step"] = torch.as_tensor(step, dtype=torch.float32).to(parameter.device)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as the constructor sets it
    elif assembly.facts.device_type == "cpu":
        note = "no fused kernel; on a CPU each of its calls still loops: expect little"
    assembly.effects.append(Effect(_KEY, f"{type(optimizer).__name__} {before}", str(wanted), note))


def _best(optimizer: torch.optim.Optimizer) -> str | None:
    """``fused`` where PyTorch has such kernels for this optimizer on its parameters' devices, else ``foreach``."""
    import torch

    optim = torch.optim
    kind = type(optimizer)
    kernels = {
        optim.Adam: "_fused_adam_",
        optim.AdamW: "_fused_adamw_",
        optim.SGD: "_fused_sgd_",
        optim.Adagrad: "_fused_adagrad_",  # on CUDA in newer versions only
    }
    kernel = kernels.get(kind)
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if kernel and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", device.upper())
        for device in devices
    ):
        return "fused"
    # A subclass may step by itself and never look; PyTorch's own all read it.
    is_pytorchs = kind.__module__.split(".")[:2] == ["torch", "optim"]
    return "foreach" if is_pytorchs and "foreach" in optimizer.defaults else None


def implementation_of(optimizer: torch.optim.Optimizer) -> str:
    """``fused``, ``foreach`` or ``for-loop``, as PyTorch will decide when none was asked for.

    PyTorch's default is foreach where every parameter lies on a device with foreach kernels, which
    the CPU is not (torch/utils/_foreach_utils.py).
    """
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None:
        return "foreach" if group["foreach"] else "for-loop"
    if "foreach" not in group:
        return "for-loop"
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    devices = {parameter.device.type for each in optimizer.param_groups for parameter in each["params"]}
    return "foreach" if devices <= set(_get_foreach_kernels_supported_devices()) else "for-loop"
