"""One kernel for the whole optimizer step: ``"optimizer"`` in ``compute.fuse``.

The live optimizer is switched in place, trained or not: its state, its parameter groups and every
scheduler that holds it stay as they are. PyTorch's fused Adam, AdamW, SGD and Adagrad update all of
a group's parameters in one pass over memory instead of a dozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "implementation_of", "refusal"]

KEYS = ("compute.fuse",)
ORDER = 20
QUANTITY = "optimizer time"
NUMERICS = "the same update rounded in another order: parameters within 1e-6"

_LATER = ("bias_dropout_residual", "mlp", "norm", "rotary", "cross_entropy")


def refusal(config: Config) -> str | None:
    """The fused regions of the model itself come later; compile fuses them meanwhile."""
    for name in config.compute.fuse:
        if name in _LATER:
            return (
                f'compute.fuse: this version fuses the "optimizer" alone, not "{name}": take it out; '
                'compute.compile = "blocks" fuses such operators'
            )
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` for an optimizer or parameters that have no fused kernel."""
    if "optimizer" not in config.compute.fuse:
        return
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    optimizer = facts.optimizer
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in known:
        listed = ", ".join(kind.__name__ for kind in known)
        raise UsageError(
            f'compute.fuse: {type(optimizer).__name__} has no fused kernel ({listed} have): take "optimizer" out'
        )
    devices = _get_fused_kernels_supported_devices()
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError(
                'compute.fuse: a differentiable optimizer cannot be fused: take "optimizer" out, or '
                "differentiable=True"
            )
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.device.type not in devices:
                raise UsageError(
                    f"compute.fuse: fused kernels take floating-point parameters on {', '.join(devices)}, and one is "
                    f'{parameter.dtype} on {parameter.device}: take "optimizer" out'
                )


def apply(assembly: Assembly) -> None:
    """Switch the optimizer where it stands."""
    if "optimizer" not in assembly.config.compute.fuse:
        return
    import torch

    optimizer = assembly.optimizer
    before = implementation_of(optimizer)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        # The fused kernel reads the step on the parameters' own device, as a float32 tensor.
        if step is not None and isinstance(parameter, torch.Tensor):
            state["step"] = torch.as_tensor(step, dtype=torch.float32).to(parameter.device)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as the constructor sets it
    assembly.effects.append(Effect(KEYS[0], f"{type(optimizer).__name__} {before}", "fused"))


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
