"""Adopting a live optimizer: its groups, state and schedulers stay while the parameters under it are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = [
    "first_names",
    "named_parameters",
    "plain_name",
    "replace_parameters",
    "retire",
    "unwrapped",
    "without_inserted",
]

#: Parts of a name that wrappers put in, wherever they stand. DDP's ``module`` stands first alone.
_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
#: How the parts begin that stages of a pipeline put in.
_OF_STAGES = "_pipeline_"


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → trained parameter, without the prefixes of wrappers; tied parameters stand once, under their first name."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer → the first name of the same tensor, both without the prefixes of wrappers."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        plain = plain_name(name)
        found[plain] = first.setdefault(id(tensor), plain)
    return found


def plain_name(name: str) -> str:
    """A parameter's name as the innermost model has it."""
    parts = name.split(".")
    while len(parts) > 1 and (parts[0] == "module" or _is_inserted(parts[0])):
        del parts[0]
    return without_inserted(".".join(parts))


def without_inserted(name: str) -> str:
    """A module's name without the parts that wrappers put in; a ``module`` in it is the program's own."""
    return ".".join(part for part in name.split(".") if not _is_inserted(part))


def _is_inserted(part: str) -> bool:
    return part in _INSERTED or part.startswith(_OF_STAGES)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, or the model itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def retire(wrapper: DistributedDataParallel, successor: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The module inside; the wrapper gives up its hooks, since it no longer averages.

    Called, it goes to ``successor()``, or refuses and says what to call instead.
    """
    wrapper.reducer._remove_autograd_hooks()

    def forward(*arguments: Any, **named: Any) -> Any:
        if successor is not None:
            return successor()(*arguments, **named)
        raise UsageError(
            "this DistributedDataParallel was replaced by trine.optimize and no longer averages gradients: "
            "call engine(batch), or engine.model"
        )

    wrapper.forward = forward  # type: ignore[method-assign]
    return unwrapped(wrapper)


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
