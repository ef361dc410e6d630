"""Master weights: the model computes with low-precision parameters, the optimizer updates fp32 ones.

An update is often less than half of bf16's (or fp16's) last bit of a parameter and would be lost; in the fp32 copy it
adds up (Micikevicius et al. 2018, section 3.1). The live optimizer is pointed at the copies, so groups, state and
schedulers stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trine.optim.runtime.adoption import plain_name, replace_parameters
from trine.optim.runtime.plain_tensors import local

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Masters", "lower", "stays_wide"]


def stays_wide(model: nn.Module) -> set[int]:
    """Ids of parameters that keep fp32: batch norms', whose running statistics are fp32 too."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters(recurse=False)
    }


def lower(model: nn.Module, dtype: torch.dtype) -> dict[torch.Tensor, torch.Tensor]:
    """Store the model's floating-point parameters as ``dtype``. Returns trained parameter → its values in fp32.

    Parameters stay the objects that they were. A parameter that is stored as ``dtype`` already gives those values.
    """
    wide = stays_wide(model)
    originals: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in model.parameters():
        if not parameter.is_floating_point() or id(parameter) in wide:
            continue
        if parameter.requires_grad:
            value = parameter.detach()
            originals[parameter] = value.float() if value.dtype != torch.float32 else value
        parameter.data = parameter.data.to(dtype)
    return originals


class Masters:
    """fp32 copies under the live optimizer. Made when DDP and ZeRO have their form, of what the optimizer holds then."""

    def __init__(self, assembly: Assembly, originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._assembly = assembly
        names = {id(parameter): name for name, parameter in assembly.parameters.items()}
        trained = {id(p): plain_name(name) for name, p in assembly.model.named_parameters()}
        whole = {trained[id(parameter)]: values for parameter, values in originals.items()}
        #: What the optimizer held → its master.
        self._masters: dict[torch.Tensor, nn.Parameter] = {}
        for group in assembly.optimizer.param_groups:
            for held in group["params"]:
                if held.is_floating_point() and held.element_size() < 4:
                    self._masters[held] = nn.Parameter(_wide(held, whole.get(names.get(id(held), ""))))
        self._held = {master: held for held, master in self._masters.items()}
        #: Masters whose new values are rounded into the model tile by tile, as their update goes.
        self.by_tiles: set[nn.Parameter] = set()
        self._names = {names[id(held)]: held for held in self._masters if id(held) in names}
        replace_parameters(assembly, self._masters, lambda value, new: value.to(new.dtype))
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # fp32 sums of a step's earlier micro-batches
        assembly.collect.append(self._collect)
        assembly.after_update.append(self._publish)
        assembly.discard.append(self._sums.clear)
        before = assembly.synchronise
        self._reduces = before is not None

        def synchronise(wanted: bool) -> None:
            if before is not None:
                before(wanted)
            self._between(wanted)

        assembly.synchronise = synchronise

    def held_of(self, master: nn.Parameter) -> torch.Tensor | None:
        """What it is the master of; ``None`` for another parameter."""
        return self._held.get(master)

    @property
    def summed_bytes(self) -> int:
        """Of the sums of a step's earlier micro-batches."""
        return sum(total.numel() * total.element_size() for total in self._sums.values())

    @property
    def count(self) -> int:
        """Parameters that have a master."""
        return len(self._masters)

    def _between(self, last: bool) -> None:
        """Before a micro-batch: gradients of those before it add up in fp32, not in the parameters' few bits.

        What ranks average is what lies in the gradient at the last backward, so the sum is put back there then.
        """
        for parameter in self._assembly.model.parameters():
            if parameter.grad is None or parameter.grad.element_size() >= 4:
                continue
            earlier = self._sums.get(parameter)
            gradient = parameter.grad.float()
            self._sums[parameter] = gradient if earlier is None else earlier.add_(gradient)
            parameter.grad = None
        if last and self._reduces:
            for summed, total in self._sums.items():
                summed.grad = total.to(summed.dtype)
            self._sums.clear()

    def _collect(self) -> None:
        """The gradients of what the optimizer held become its masters', in fp32."""
        for held, master in self._masters.items():
            gradient = held.grad
            earlier = self._sums.pop(held, None)
            # Masters may lie in the host's memory.
            wide = None if gradient is None else gradient.to(local(master).device).to(master.dtype)
            if earlier is not None:
                earlier = earlier.to(local(master).device)
                wide = earlier if wide is None else wide.add_(earlier)
            master.grad = wide
            held.grad = None

    def _publish(self, stepped: bool) -> None:
        """Round the masters into what the model computes with."""
        if stepped:
            self._round([held for held, master in self._masters.items() if master not in self.by_tiles])

    def _round(self, every: list[torch.Tensor]) -> None:
        if every:
            with torch.no_grad():
                torch._foreach_copy_(
                    [local(held) for held in every], [local(self._masters[held]) for held in every]
                )

    def state_dict(self) -> dict[str, Any]:
        """Name → master; a model's own state dictionary has them rounded."""
        masters = self._masters
        return {name: masters[held].detach() for name, held in self._names.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back, and round them into the model."""
        with torch.no_grad():
            for name, held in self._names.items():
                self._masters[held].copy_(state[name])
        self._round(list(self._masters))


def _wide(held: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
    """fp32 values of what is held: the original's where there is one, cut as ``held`` is."""
    if original is None:
        return held.detach().float()
    if hasattr(held, "to_local"):
        from trine.optim.runtime.sharding import shard_like

        return shard_like(original, held)  # type: ignore[arg-type]
    return original
