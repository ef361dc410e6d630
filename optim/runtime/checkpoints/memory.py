"""A run's state in memory: for a few steps that are to be undone, or for a program's own way of keeping it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from trine.optim.runtime.checkpoints.slots import (
    empty_slots,
    put_masters,
    put_slots,
    require_fitting,
    require_no_others,
    rounded,
    tell_of_rounding,
)
from trine.optim.runtime.training_state import (
    common_state,
    masters_of,
    match_twins,
    model_tensors,
    names_by_group,
    own_state,
    ranks_own,
    require_same_groups,
    restore_common_state,
    restore_own_state,
    state_tensors,
)
from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["restore", "snapshot"]


def snapshot(assembly: Assembly, scheduler: Any, step: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors`` (live, by name; DTensors where sharded), what is ``common``, this rank's ``own``, and ``step``."""
    return {
        "tensors": state_tensors(assembly),
        "common": common_state(assembly, scheduler, names_by_group(assembly), [ranks_own(assembly)]),
        "own": {**own_state(assembly), "data": dict(data)},
        "step": step,
    }


def restore(state: Mapping[str, Any], assembly: Assembly, scheduler: Any) -> tuple[int, Mapping[str, Any]]:
    """Copy a :func:`snapshot` back, into a run of the same sharding; its step, and where the data stood.

    Raises ``UnreadableInput`` where names, shapes or sharding do not fit.
    """
    saved: Mapping[str, torch.Tensor] = state["tensors"]
    masters = masters_of(assembly)
    wanted = model_tensors(assembly.model, assembly.first_names)
    wanted.update((key, value) for key, value in masters.items() if key in saved)
    require_fitting("the state", wanted, saved)
    require_no_others("the state", set(wanted), saved)
    require_same_groups(assembly, names_by_group(assembly), state["common"])
    slots, told = empty_slots(assembly, saved), rounded(wanted, saved)
    wanted.update((full, each[0].value) for full, each in slots.items())
    for key, target in wanted.items():
        if isinstance(target, DTensor) != isinstance(saved[key], DTensor):
            raise UnreadableInput(
                f"{key} is sharded on one side alone: use engine.save and engine.load to reshard"
            )
    # Ranks of other stages, and of other experts, have tensors of their own; all others have the same.
    if assembly.facts.layout.place("replicate", "shard", "context", "tensor") == 0:
        tell_of_rounding("the state", told)
    with torch.no_grad():
        for key, target in wanted.items():
            target.copy_(saved[key])
    put_masters(assembly, masters, saved)
    put_slots(assembly, slots)
    match_twins(assembly)
    for take_over in assembly.filled:
        take_over()
    restore_common_state(assembly, scheduler, state["common"])
    restore_own_state(assembly, state["own"])
    return int(state["step"]), state["own"]["data"]
