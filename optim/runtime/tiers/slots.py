"""What the optimizer holds, parameter by parameter, and where each part of it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trine.optim.runtime.plain_tensors import local
from trine.optim.runtime.tiers.files import Region
from trine.optim.runtime.tiers.spans import Length

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Slot", "flat", "is_dense", "is_moment", "moments_of", "raw_step", "slots_of", "with_strides_of"]


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of the optimizer. Its moments all lie on one tier."""

    name: str
    group: int
    place: int  # in its group
    held: nn.Parameter
    #: State that has the parameter's shape: key → type. Known before the first step.
    moments: dict[str, torch.dtype]
    divisible: bool
    tier: str = "device"  # of the moments: device, cpu, nvme
    #: Key → its place in the file.
    regions: dict[str, Region] = field(default_factory=dict)
    #: The parameter's own place in the file, where it lies there between uses.
    parameter: Region | None = None
    #: What a master copy is rounded into.
    target: torch.Tensor | None = None

    @property
    def length(self) -> Length:
        """For the tiles."""
        values = local(self.held)
        return Length(values.numel(), values.element_size(), self.divisible)

    @property
    def state_bytes(self) -> int:
        """Of all moments."""
        return sum(local(self.held).numel() * dtype.itemsize for dtype in self.moments.values())


def slots_of(assembly: Assembly) -> list[Slot]:
    """Every trained parameter in the optimizer's groups, in their order."""
    names = {id(parameter): name for name, parameter in assembly.parameters.items()}
    known: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
    found = []
    for index, group in enumerate(assembly.optimizer.param_groups):
        for place, held in enumerate(group["params"]):
            if not held.requires_grad:
                continue
            values = local(held)
            moments = _existing(assembly.optimizer, held)
            if moments is None:
                key = (index, values.dtype)
                if key not in known:
                    known[key] = moments_of(assembly.optimizer, group, values.dtype)
                moments = known[key]
            name = names.get(id(held), f"group {index} parameter {place}")
            found.append(Slot(name, index, place, held, dict(moments), is_dense(values)))
    return found


def _existing(optimizer: torch.optim.Optimizer, held: nn.Parameter) -> dict[str, torch.dtype] | None:
    """Of an optimizer that has stepped, or makes its state when it is made, as Adagrad does."""
    state = optimizer.state.get(held)
    if not state:
        return None
    return {key: value.dtype for key, value in state.items() if is_moment(value, held)}


def moments_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Key → type of the state that this optimizer makes with this group's settings, by one step on a parameter of nought."""
    probe = torch.zeros(64, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    settings = {**group, "params": [probe]}
    if isinstance(settings.get("lr"), torch.Tensor):
        settings["lr"] = settings["lr"].detach().cpu()
    groups = optimizer.param_groups
    optimizer.param_groups = [settings]
    try:
        raw_step(optimizer)()
    finally:
        optimizer.param_groups = groups
        state = optimizer.state.pop(probe, {})
    return {key: value.dtype for key, value in state.items() if is_moment(value, probe)}


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Its step without the hooks and counters that PyTorch puts round it (``Optimizer.profile_hook_step``)."""
    step = type(optimizer).step
    inner = getattr(step, "__wrapped__", step)
    return lambda: inner(optimizer)


def is_moment(value: Any, parameter: torch.Tensor) -> bool:
    """State of the parameter's shape; a step count is a number of its own."""
    return isinstance(value, torch.Tensor) and parameter.dim() > 0 and value.shape == parameter.shape


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in one piece of memory, each once, in whatever order of dimensions."""
    if tensor.dim() == 0:
        return False  # passed whole: its moments cannot be told from its numbers
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor, slot: Slot, start: int, end: int) -> torch.Tensor:
    """Elements [start, end) in the order of memory, a view; the tensor whole where it cannot be cut."""
    values = tensor.detach()
    if not slot.divisible:
        return values
    return values.as_strided((end - start,), (1,), values.storage_offset() + start)


def with_strides_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Laid out in memory as the parameter is; itself where it is so."""
    if tensor.stride() == parameter.stride() or tensor.numel() <= 1:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
