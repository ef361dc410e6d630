"""What a checkpoint is read into: whether it fits, and the optimizer's state, which a new optimizer has none of yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trine.optim.runtime.local_steps import placed
from trine.optim.runtime.training_state import model_tensors, optimizer_slots
from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = [
    "Rounded",
    "Slot",
    "Slots",
    "empty_slots",
    "put_masters",
    "put_slots",
    "require_fitting",
    "require_no_others",
    "rounded",
    "tell_of_rounding",
]

logger = logging.getLogger("trine")


class Slot(NamedTuple):
    """One tensor of the optimizer's state."""

    parameter: torch.Tensor
    key: str
    value: torch.Tensor


#: Name → its type in the checkpoint, and the model's.
Rounded = dict[str, tuple[str, str]]

#: Those of one name: a rank that has two stages may hold a tied parameter twice. The first is read into.
Slots = list[Slot]


def _shape(described: Any) -> tuple[int, ...]:
    return tuple(described.size if isinstance(described, TensorStorageMetadata) else described.shape)


def _dtype(described: Any) -> torch.dtype:
    if isinstance(described, TensorStorageMetadata):
        return described.properties.dtype
    found: torch.dtype = described.dtype
    return found


def require_fitting(source: object, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Raise ``UnreadableInput`` where names or shapes that this rank wants are not in the checkpoint."""
    missing = [key for key in wanted if key not in saved]
    if missing:
        raise UnreadableInput(f"{source} is of another model: it has no {missing[0].partition('/')[2]}")
    for key, target in wanted.items():
        if _shape(saved[key]) != tuple(target.shape):
            raise UnreadableInput(
                f"{source} is of another model: {key.partition('/')[2]} is {_shape(saved[key])} there and "
                f"{tuple(target.shape)} here"
            )


def rounded(wanted: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> Rounded:
    """Those of ``wanted`` whose type does not hold every value that the checkpoint's does."""
    types = ((key, _dtype(saved[key]), target.dtype) for key, target in wanted.items())
    return {
        key.partition("/")[2]: (str(there).removeprefix("torch."), str(here).removeprefix("torch."))
        for key, there, here in types
        if here.is_floating_point and not _holds(here, there)
    }


def _holds(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether a floating-point type has every value of another type.

    ``torch.promote_types`` cannot say: it refuses float8, and gives fp16 for int64 beside it.
    """
    if here == there or there == torch.bool:
        return True
    if there.is_complex:
        return False
    try:
        ours = torch.finfo(here)
        if not there.is_floating_point:
            most = float(torch.iinfo(there).max)
            return most * ours.eps <= 2.0 and most <= ours.max
        theirs = torch.finfo(there)
        smallest = [each.smallest_normal * each.eps for each in (ours, theirs)]
    except (NotImplementedError, TypeError):  # types of which PyTorch does not tell how many digits they have
        return False
    return ours.eps <= theirs.eps and ours.max >= theirs.max and smallest[0] <= smallest[1]


def tell_of_rounding(source: object, found: Rounded) -> None:
    """A warning in one line, where anything is rounded; for one of the ranks that have the tensors to give."""
    if found:
        name, (there, here) = next(iter(found.items()))
        logger.warning(
            "%s: %d tensors are rounded to the model's type (%s: %s there, %s here)",
            source,
            len(found),
            name,
            there,
            here,
        )


def require_no_others(source: object, wanted: set[str], saved: Mapping[str, Any]) -> None:
    """Raise ``UnreadableInput`` where the checkpoint's model has a tensor that no rank wants."""
    extra = [key for key in saved if key.startswith("model/") and key not in wanted]
    if extra:
        raise UnreadableInput(f"{source} is of another model: this one has no {extra[0].partition('/')[2]}")


def empty_slots(assembly: Assembly, saved: Mapping[str, Any]) -> dict[str, Slots]:
    """Name in the checkpoint → what its state is read into, for the parameters that this rank has.

    Made from what the checkpoint holds: only a step of the optimizer's own would make some. State that lies in slower
    memory is read into its place there.
    """
    held: dict[str, list[torch.Tensor]] = {}
    group_of: dict[int, dict[str, Any]] = {}
    for group in assembly.optimizer.param_groups:
        group_of.update((id(parameter), group) for parameter in group["params"])
    for name, parameter in optimizer_slots(assembly):
        held.setdefault(name, []).append(parameter)
    found: dict[str, Slots] = {}
    for full, described in saved.items():
        if full.startswith("optimizer/"):
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            follows = f"model/{name}" in saved and _dtype(saved[f"model/{name}"]) == _dtype(described)
            slots = [
                Slot(p, key, _empty(assembly, p, key, described, group_of[id(p)], follows))
                for p in held.get(name, ())
            ]
            if slots:  # else it is on another rank
                found[full] = slots
    return found


def _empty(
    assembly: Assembly,
    parameter: torch.Tensor,
    key: str,
    described: Any,
    group: Mapping[str, Any],
    follows: bool,
) -> torch.Tensor:
    """``follows``: it is of the type of its parameter there, so that it is here, where that may be another."""
    shape, dtype = _shape(described), _dtype(described)
    home = None if assembly.home_of is None else assembly.home_of(parameter, key)
    if home is not None:
        return placed(home, parameter) if isinstance(parameter, DTensor) else home
    if shape == tuple(parameter.shape) and shape:
        kept = not follows or not dtype.is_floating_point
        return torch.empty_like(parameter, dtype=dtype if kept else parameter.dtype, requires_grad=False)
    # As torch.optim.Optimizer has it: the step count lies on the device only for kernels that read it there.
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def put_slots(assembly: Assembly, slots: Mapping[str, Slots]) -> None:
    """Give the optimizer its state, in place of what it has."""
    assembly.optimizer.state.clear()
    for each in slots.values():
        for slot in each:
            assembly.optimizer.state[slot.parameter][slot.key] = slot.value


def put_masters(assembly: Assembly, masters: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Masters that the checkpoint does not have are the parameters themselves, in the masters' precision."""
    values = model_tensors(assembly.model, assembly.first_names)
    with torch.no_grad():
        for key, master in masters.items():
            if key not in saved:
                master.copy_(values[f"model/{key.removeprefix('masters/')}"])
