"""All that a run is made of, by name: what a checkpoint holds, whatever way the run is sharded.

    model/NAME            parameters and persistent buffers
    masters/NAME          what the optimizer holds for a parameter, where that is a copy of it
    optimizer/NAME/KEY    the optimizer's state

Names are those of the model that was given, the first where tensors are tied, so that wrappers, sharding, stages and the
order of groups do not matter. Tensors are the live ones, a rank's shards where they are DTensors, and a rank has those
that it holds. The small rest is common to all ranks, or a rank's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.plain_tensors import local
from trine.optim.runtime.random_streams import random_streams, restore_random_streams
from trine.optim.techniques._assembly import Reordered
from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly, Stateful

__all__ = [
    "buffer_names",
    "common_state",
    "first_name",
    "masters_of",
    "match_twins",
    "model_tensors",
    "names_by_group",
    "optimizer_slots",
    "own_state",
    "ranks_own",
    "reordered_state",
    "require_same_groups",
    "restore_common_state",
    "restore_own_state",
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

#: What modules keep beside parameters and buffers (``Module.get_extra_state``).
_EXTRA = "_extra_state"


# --- tensors -----------------------------------------------------------------------------------


def model_tensors(model: nn.Module, first_names: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
    """``model/NAME`` → parameters and persistent buffers; tied ones once, under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():  # FSDP2 frees gathered parameters for this
        if isinstance(value, torch.Tensor) and id(value) not in seen and not name.endswith(_EXTRA):
            seen.add(id(value))
            plain = plain_name(name)
            found.setdefault(f"model/{(first_names or {}).get(plain, plain)}", value.detach())
    return found


def buffer_names(assembly: Assembly) -> list[str]:
    """``model/NAME`` of the buffers: what of the model ranks may hold alike and with other values."""
    named = assembly.model.named_buffers(remove_duplicate=False)
    return [f"model/{first_name(assembly, name)}" for name, _ in named]


def match_twins(assembly: Assembly) -> None:
    """Where a rank holds a tied parameter twice, give the second the values and the state of the first, which was read."""
    first: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in assembly.model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA):
                one = first.setdefault(first_name(assembly, name), value)
                if one is not value:
                    local(value.detach()).copy_(local(one.detach()))
        held: dict[str, nn.Parameter] = {}
        state = assembly.optimizer.state
        for name, parameter in optimizer_slots(assembly):
            one_held = held.setdefault(name, parameter)
            if one_held is parameter:
                continue
            local(parameter.detach()).copy_(local(one_held.detach()))
            for key, value in state.get(one_held, {}).items():
                if key in state[parameter] and isinstance(value, torch.Tensor):
                    local(state[parameter][key]).copy_(local(value))


def masters_of(assembly: Assembly) -> dict[str, torch.Tensor]:
    """``masters/NAME`` → what the optimizer holds in storage of its own, such as an fp32 copy of a bf16 parameter."""
    own: dict[str, set[int]] = {}
    for name, p in assembly.model.named_parameters():
        own.setdefault(first_name(assembly, name), set()).add(local(p).untyped_storage().data_ptr())
    found: dict[str, torch.Tensor] = {}
    for name, held in assembly.parameters.items():
        if local(held).untyped_storage().data_ptr() not in own.get(first_name(assembly, name), ()):
            found.setdefault(f"masters/{first_name(assembly, name)}", held.detach())
    return found


def first_name(assembly: Assembly, name: str) -> str:
    """The name that the model which was given has for it, the first where several are tied."""
    plain = plain_name(name)
    return assembly.first_names.get(plain, plain)


def optimizer_slots(assembly: Assembly) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, what the optimizer holds for it) of every parameter in its groups, frozen ones too.

    A rank that has two stages may hold a tied parameter twice, under one name.
    """
    names = {id(p): first_name(assembly, name) for name, p in assembly.model.named_parameters()}
    names.update((id(p), first_name(assembly, name)) for name, p in assembly.parameters.items())
    for index, group in enumerate(assembly.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group {index} parameter {place}"), parameter


def names_by_group(assembly: Assembly) -> list[list[str]]:
    """Of each group of this rank's optimizer."""
    names = iter(name for name, _ in optimizer_slots(assembly))
    return [[next(names) for _ in group["params"]] for group in assembly.optimizer.param_groups]


def state_tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that this rank has a part of, by the names above."""
    found = model_tensors(assembly.model, assembly.first_names)
    found.update(masters_of(assembly))
    for name, parameter in optimizer_slots(assembly):
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(f"optimizer/{name}/{key}", value.detach())
    return found


def reordered_state(assembly: Assembly, tensors: Mapping[str, torch.Tensor]) -> dict[str, Reordered]:
    """Name of a tensor of the state → its parameter's order; moments are ordered as their parameter is."""
    if not assembly.reordered:
        return {}
    shapes = {first_name(assembly, name): tuple(held.shape) for name, held in assembly.parameters.items()}
    orders = {first_name(assembly, name): order for name, order in assembly.reordered.items()}
    found: dict[str, Reordered] = {}
    for full, tensor in tensors.items():
        kind, _, name = full.partition("/")
        name = name.rpartition("/")[0] if kind == "optimizer" else name
        order = orders.get(name)
        if order is not None and tuple(tensor.shape) == shapes.get(name, tuple(tensor.shape)):
            found[full] = order
    return found


# --- what is small -----------------------------------------------------------------------------


def ranks_own(assembly: Assembly) -> dict[str, Any]:
    """Plain numbers of the optimizer's state, and what modules keep beside tensors, of what this rank has; often nothing."""
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in optimizer_slots(assembly):
        values = assembly.optimizer.state.get(parameter, {})
        plain = {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
        if plain:
            numbers[name] = plain
    extra = {
        plain_name(name): value
        for name, value in assembly.model.state_dict(keep_vars=True).items()
        if name.endswith(_EXTRA)
    }
    return {"numbers": numbers, "extra": extra} if numbers or extra else {}


def common_state(
    assembly: Assembly, scheduler: Any, names: list[list[str]], loose: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Groups with the ``names`` in them on any rank, scheduler, and ``loose``: what ranks have of :func:`ranks_own`."""
    groups = assembly.optimizer.param_groups
    found: dict[str, Any] = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "names": names,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "numbers": {},
        "extra": {},
    }
    for each in loose:
        found["numbers"].update(each.get("numbers", {}))
        found["extra"].update(each.get("extra", {}))
    return found


def own_state(assembly: Assembly) -> dict[str, Any]:
    """Random streams, and what techniques keep on this rank."""
    return {
        "random": random_streams(assembly.facts.device),
        "techniques": {name: each.state_dict() for name, each in _own(assembly).items()},
    }


def _own(assembly: Assembly) -> dict[str, Stateful]:
    return {name: each for name, each in assembly.state.items() if name not in _BY_NAME}


def restore_common_state(assembly: Assembly, scheduler: Any, state: Mapping[str, Any]) -> None:
    """Take back what is common to all ranks."""
    for group, saved in zip(assembly.optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key not in _OF_THE_RUN})
    for name, parameter in optimizer_slots(assembly):
        if name in state["numbers"]:
            assembly.optimizer.state[parameter].update(state["numbers"][name])
    if state.get("extra"):
        modules = {plain_name(f"{name}.{_EXTRA}"): module for name, module in assembly.model.named_modules()}
        for name, value in state["extra"].items():
            if name in modules:
                modules[name].set_extra_state(value)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    elif scheduler is not None:
        logger.warning("the checkpoint has no scheduler's state: the scheduler stays as it is")


def restore_own_state(
    assembly: Assembly,
    state: Mapping[str, Any],
    states: Callable[[], list[Mapping[str, Any]]] | None = None,
) -> None:
    """Take back ``state``, this rank's own. ``states``: of all ranks that saved, where other ranks go on.

    Then random streams go on from those of a rank that saw the same part of the data, and techniques are given all
    states; those that cannot use them start anew, which is said.
    """
    kept = state["techniques"]
    every: list[Mapping[str, Any]] | None = None
    lost = []
    for name, each in _own(assembly).items():
        if name not in kept:
            logger.warning("the checkpoint holds nothing of %s, which starts anew", name)
        elif states is None:
            each.load_state_dict(kept[name])
        elif hasattr(each, "load_resharded"):
            every = states() if every is None else every
            each.load_resharded(
                [one["techniques"][name] for one in every], assembly.facts.rank, assembly.facts.ranks
            )
        else:
            lost.append(name)
    if states is not None and assembly.facts.rank == 0:
        said = f"; {', '.join(lost)} starts anew" if lost else ""
        logger.warning(
            "the checkpoint is of other ranks, whose random streams go on here: other numbers are drawn%s",
            said,
        )
    restore_random_streams(assembly.facts.device, state["random"])


# --- of this run? ------------------------------------------------------------------------------


def require_same_groups(assembly: Assembly, ours: Sequence[Sequence[str]], state: Mapping[str, Any]) -> None:
    """Raise ``UnreadableInput`` where groups, with the names ``ours`` on any rank, hold others than those that were saved."""
    saved = state["names"]
    if [set(names) for names in ours] != [set(names) for names in saved]:
        raise UnreadableInput(
            f"the checkpoint's optimizer has groups of {[len(each) for each in saved]} parameters, this one "
            f"{[len(each) for each in ours]}, or others: make the groups as they were when it was saved"
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
