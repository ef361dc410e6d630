"""What is known of a model, its optimizer and the process group before anything is changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.layout import arranged
from trine.optim.techniques._assembly import Facts
from trine.optim.topology import topology_of
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["facts_of", "require_trainable"]

logger = logging.getLogger("trine")


def facts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config | None = None) -> Facts:
    """Raises ``UsageError`` for a launcher's environment that contradicts itself, and for degrees that do not fit."""
    from torch import distributed

    grouped = distributed.is_available() and distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)
    return Facts(
        device=next(iter(model.parameters())).device,
        topology=topology_of(rank, ranks),
        layout=arranged(config or Config(), rank, ranks),
        backend=distributed.get_backend() if grouped else None,
        model=model,
        optimizer=optimizer,
    )


def require_trainable(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` for what no configuration can train: no parameters, several devices, other parameters."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"trine.optimize takes a torch.nn.Module first, not a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"trine.optimize takes a torch optimizer second, not a {type(optimizer).__name__}")
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"all parameters of {type(model).__name__} are frozen: let one at least require gradients"
        )
    lazy = [name for name, each in model.named_parameters() if torch.nn.parameter.is_lazy(each)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} has no shape yet: call the model on a batch, which makes its lazy modules, and make the optimizer "
            "then"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise UsageError(
            f"{on_meta[0]} is on the meta device, where nothing has values: model.to_empty(device=...) and initialise it "
            "first"
        )
    given_up = [
        name for name, each in model.named_parameters() if each.numel() > 1 and not any(each.stride())
    ]
    if given_up:  # one element, repeated: what a pipeline leaves of other ranks' stages
        raise UsageError(
            f"{given_up[0]} has one value for all its elements, as a pipeline leaves what another rank holds: give "
            "trine.optimize a model that was made anew, with its optimizer"
        )
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model lies on {listed}: this version trains a model that is on one device")
    _require_same_parameters(model, optimizer)


def _require_same_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer over other parameters than the model's trains nothing, silently."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if trained and not any(id(p) in held for _, p in trained):
        raise UsageError(
            "the optimizer holds none of the model's parameters, so it would train nothing: make it from "
            "model.parameters() after the model has its final form, and give trine.optimize each pair once"
        )
    left = [name for name, p in trained if id(p) not in held]
    if left:
        logger.warning(
            "%d parameters are in no group of the optimizer, %s among them: the engine will not change them, and a second "
            "optimizer would find their gradients neither unscaled nor weighed by tokens",
            len(left),
            left[0],
        )
