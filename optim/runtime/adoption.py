"""Adopting a live optimizer: its groups, state and schedulers stay while the parameters under it are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["named_parameters", "plain_name", "replace_parameters"]

#: What wrappers put in front of a parameter's name.
_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → trained parameter, without the prefixes of wrappers; tied parameters stand once, under their first name."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def plain_name(name: str) -> str:
    """A parameter's name as the innermost model has it."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def replace_parameters(
    assembly: Assembly,
    replaced: Mapping[torch.Tensor, nn.Parameter],
    convert: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Point the assembly's optimizer and names at new parameters, and carry the optimizer's state over.

    ``replaced`` maps what the optimizer holds now to what it shall hold; ``convert(state tensor, new parameter)`` makes
    state of the parameter's shape (moments) fit the new one (shard it, change its precision). State of other shapes,
    such as the step count, is kept. An optimizer made before ``fully_shard`` would otherwise train nothing, silently.
    """
    optimizer = assembly.optimizer
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        new = replaced.get(parameter) if isinstance(parameter, torch.Tensor) else None
        optimizer.state[parameter if new is None else new] = (
            values
            if new is None
            else {key: _converted(value, parameter, new, convert) for key, value in values.items()}
        )
    assembly.parameters = {name: replaced.get(p, p) for name, p in assembly.parameters.items()}


def _converted(value: Any, old: torch.Tensor, new: nn.Parameter, convert: Any) -> Any:
    is_moment = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == old.shape
    return convert(value, new) if is_moment else value
