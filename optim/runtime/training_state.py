"""All that a run is made of, by name: what a checkpoint holds, whatever way the run is sharded.

    model/NAME            parameters and persistent buffers
    masters/NAME          what the optimizer holds for a parameter, where that is a copy of it
    optimizer/NAME/KEY    the optimizer's state

Names are the innermost model's, so that wrappers, sharding and the order of groups do not matter. Tensors are the live
ones, a rank's shards where they are DTensors; ``RankState`` is the small rest.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trine.optim.runtime.adoption import plain_name
from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly, Stateful

__all__ = [
    "local",
    "masters_of",
    "model_tensors",
    "optimizer_slots",
    "rank_state",
    "require_same_groups",
    "restore_rank_state",
    "state_tensors",
]

logger = logging.getLogger("trine")

#: How a group is computed, not what it computes: a resumed run keeps its own.
_OF_THE_RUN = frozenset({"params", "fused", "foreach", "capturable"})

#: What learning-rate schedulers write into a group.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum", "base_lrs"}
)

#: Techniques whose state is among the tensors by name.
_BY_NAME = frozenset({"masters"})


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model/NAME`` → parameters and persistent buffers; tied ones once, under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():  # FSDP2 frees gathered parameters for this
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[f"model/{plain_name(name)}"] = value.detach()
    return found


def masters_of(assembly: Assembly) -> dict[str, torch.Tensor]:
    """``masters/NAME`` → what the optimizer holds in storage of its own, such as an fp32 copy of a bf16 parameter."""
    own = {
        plain_name(name): local(p).untyped_storage().data_ptr()
        for name, p in assembly.model.named_parameters()
    }
    return {
        f"masters/{name}": held.detach()
        for name, held in assembly.parameters.items()
        if local(held).untyped_storage().data_ptr() != own.get(name)
    }


def optimizer_slots(assembly: Assembly) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, what the optimizer holds for it) of every parameter in its groups, frozen ones too."""
    names = {id(p): plain_name(name) for name, p in assembly.model.named_parameters()}
    names.update((id(p), name) for name, p in assembly.parameters.items())
    for index, group in enumerate(assembly.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group {index} parameter {place}"), parameter


def state_tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint holds, by the names above. Every rank has the same names."""
    found = model_tensors(assembly.model)
    found.update(masters_of(assembly))
    for name, parameter in optimizer_slots(assembly):
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{name}/{key}"] = value.detach()
    return found


# --- what is small, and a rank's own -----------------------------------------------------------


def rank_state(assembly: Assembly, scheduler: Any) -> dict[str, Any]:
    """Groups, plain numbers of the optimizer, scheduler, random streams, and what techniques keep on this rank."""
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in optimizer_slots(assembly):
        values = assembly.optimizer.state.get(parameter, {})
        plain = {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
        if plain:
            numbers[name] = plain
    groups = assembly.optimizer.param_groups
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "names": _names_by_group(assembly),
        "numbers": numbers,
        "extra": {
            plain_name(name): value
            for name, value in assembly.model.state_dict(keep_vars=True).items()
            if not isinstance(value, torch.Tensor)
        },
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": _random_streams(assembly.facts.device),
        "techniques": {name: each.state_dict() for name, each in _own(assembly).items()},
    }


def restore_rank_state(
    assembly: Assembly, scheduler: Any, state: Mapping[str, Any], same_ranks: bool
) -> None:
    """Take it back. Random streams and what techniques keep are a rank's own: left alone unless ``same_ranks``."""
    for group, saved in zip(assembly.optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key not in _OF_THE_RUN})
    by_name = dict(optimizer_slots(assembly))
    for name, values in state["numbers"].items():
        assembly.optimizer.state[by_name[name]].update(values)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    elif scheduler is not None:
        logger.warning("the checkpoint has no scheduler's state: the scheduler stays as it is")
    kept = state["techniques"]
    if not same_ranks:
        lost = f", {', '.join(kept)} too" if kept else ""
        logger.warning("the checkpoint is of another number of ranks: random streams start anew%s", lost)
        return
    for name, each in _own(assembly).items():
        if name in kept:
            each.load_state_dict(kept[name])
        else:
            logger.warning("the checkpoint holds nothing of %s, which starts anew", name)
    _restore_random_streams(assembly.facts.device, state["random"])


def _own(assembly: Assembly) -> dict[str, Stateful]:
    return {name: each for name, each in assembly.state.items() if name not in _BY_NAME}


def require_same_groups(assembly: Assembly, state: Mapping[str, Any]) -> None:
    """Raise ``UnreadableInput`` where the optimizer's groups hold other parameters than those that were saved."""
    ours = _names_by_group(assembly)
    if ours != state["names"]:
        raise UnreadableInput(
            f"the checkpoint's optimizer has groups of {[len(each) for each in state['names']]} parameters, this one "
            f"{[len(each) for each in ours]}, or in another order: make the groups as they were when it was saved"
        )
    _require_same_settings(assembly, state["groups"])


def _require_same_settings(assembly: Assembly, groups: list[Mapping[str, Any]]) -> None:
    """Adam's groups have betas, SGD's a momentum. One of them alone is a PyTorch of another age."""
    for ours, saved in zip(assembly.optimizer.param_groups, groups, strict=True):
        missing = [key for key in assembly.optimizer.defaults if key in ours and key not in saved]
        alien = [key for key in saved if key not in ours and key not in _OF_SCHEDULERS]
        if missing and alien:
            raise UnreadableInput(
                f"the checkpoint is of another optimizer: its groups have {alien[0]}, and {missing[0]}, which "
                f"{type(assembly.optimizer).__name__} has, is not there"
            )


def _names_by_group(assembly: Assembly) -> list[list[str]]:
    names = iter(name for name, _ in optimizer_slots(assembly))
    return [[next(names) for _ in group["params"]] for group in assembly.optimizer.param_groups]


def _random_streams(device: torch.device) -> dict[str, Any]:
    streams: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        streams["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return streams


def _restore_random_streams(device: torch.device, streams: Mapping[str, Any]) -> None:
    torch.set_rng_state(streams["torch"].cpu())
    random.setstate(streams["python"])
    if device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"].cpu(), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in streams:
        name, keys, *rest = streams["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
