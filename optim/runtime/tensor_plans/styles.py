"""What modules do with their inputs and outputs: PyTorch's tensor-parallel styles over parameters that are cut already.

Between the layers of a block tensors are plain, and mean one of two things: the same on all ranks (``Replicate``), or with
``parallel.sequence`` this rank's part of the sequence (``Shard(1)``). A region that is cut (attention, feed-forward) has
one entry, where its input is gathered or only marked, so that all its layers share one exchange in backward; and one
exit, its row-wise layer, whose sums are all-reduced or reduce-scattered (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "Columns",
    "Entry",
    "ExpertsInside",
    "HeadNorm",
    "Mixture",
    "NormBefore",
    "Rows",
    "SequenceNorm",
    "first_of",
    "fresh",
    "moved",
    "with_first",
]


class Columns(ColwiseParallel):
    """A layer of which a rank has some outputs; its parameters are DTensors already."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            None,
            partial(_enter_columns, self.input_layouts[0]),
            partial(_leave, self.output_layouts, self.use_local_output),
        )


class Rows(RowwiseParallel):
    """A layer of which a rank has some inputs; or an embedding of which it has some rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        desired: tuple[Placement, ...] = (Replicate() if isinstance(module, nn.Embedding) else Shard(-1),)
        return distribute_module(
            module,
            device_mesh,
            None,
            partial(self._prepare_input_fn, self.input_layouts, desired),
            partial(_leave, self.output_layouts, self.use_local_output),
        )


def _enter_columns(plain: Placement, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return _entered(inputs[0], mesh, plain)


def _leave(
    layouts: tuple[Placement, ...], is_local: bool, module: nn.Module, outputs: Any, mesh: DeviceMesh
) -> Any:
    """As PyTorch's styles, but that plain tensors are there: theirs are waited for at the next operator, which a compiled
    region or a kernel of somebody's own does not know.
    """
    if outputs.placements != layouts:
        outputs = outputs.redistribute(placements=layouts)
    return outputs.to_local() if is_local else outputs


class SequenceNorm(SequenceParallel):
    """A norm over this rank's part of the sequence; plain in and out."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=1, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            None,
            partial(self._prepare_input_fn, self.sequence_sharding),
            partial(self._prepare_output_fn, self.use_local_output),
        )


class HeadNorm(SequenceNorm):
    """A norm of single heads, over the heads that this rank has: (batch, sequence, heads, size).

    To DTensor they are parts of a whole; which dimension is named does not matter to the numbers, and there is always a
    first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequence_sharding = (Shard(0),)


class NormBefore(ParallelStyle):
    """A norm whose output several layers of the block itself take: the entry of a region without a module of its own."""

    def __init__(self, plain: Placement) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, inputs, output: _entered(output, device_mesh, self.plain))
        return module


class Entry(ParallelStyle):
    """A module whose first argument enters the region: a DTensor, whole on every rank."""

    def __init__(self, plain: Placement) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        change = with_first(module, lambda x: _entered(x, device_mesh, self.plain))
        module.register_forward_pre_hook(change, with_kwargs=True)
        return module


class Mixture(ParallelStyle):
    """A mixture of experts under ``parallel.sequence``: whole rows inside, for its router must see each token once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = with_first(module, lambda x: moved(x, device_mesh, Shard(1), Replicate()))
        module.register_forward_pre_hook(enter, with_kwargs=True)

        def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
            return first_of(output, lambda x: moved(x, device_mesh, Replicate(), Shard(1)))

        module.register_forward_hook(leave)
        return module


class ExpertsInside(ParallelStyle):
    """Experts that have some of each expert's inner features: plain parameters while they compute."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self.keys = tuple(keys)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        held: dict[str, nn.Parameter] = {}

        def enter(_: nn.Module, arguments: Any, named: Any) -> Any:
            for key in self.keys:
                parameter = module._parameters.pop(key)
                if isinstance(parameter, DTensor):
                    held[key] = parameter
                    vars(module)[key] = parameter.to_local()
                else:  # left over from a call that failed
                    module._parameters[key] = parameter
            spread = partial(_spread, mesh=device_mesh)
            return tuple(map(spread, arguments)), {name: spread(value) for name, value in named.items()}

        def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
            for key, parameter in held.items():
                del vars(module)[key]
                module._parameters[key] = parameter
            held.clear()
            if output is not None:  # None: it failed
                return first_of(output, lambda x: moved(x, device_mesh, Partial(), Replicate()))
            return None

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)
        return module


# --- parts -------------------------------------------------------------------------------------


def moved(x: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    """A plain tensor that means ``before``, as one that means ``after``; gradients go the way back."""
    if before == after:
        return x
    return DTensor.from_local(x, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()


class _Fresh(torch.autograd.Function):
    """The same memory, and no view to autograd."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def fresh(x: Any) -> Any:
    """What leaves a module that FSDP2 may wrap. Its hook on an output is lost to what the program does in place to a view.

    For results of collectives, which nothing has saved for backward.
    """
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor) or not x._is_view():
        return x
    result: torch.Tensor = _Fresh.apply(x)  # type: ignore[no-untyped-call]
    return result


def _entered(x: torch.Tensor, mesh: DeviceMesh, plain: Placement) -> torch.Tensor:
    entered = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [plain], run_check=False)
    if entered.placements == (Replicate(),):
        return entered  # to redistribute it all the same would sum the gradients of each layer by itself
    return entered.redistribute(placements=[Replicate()])


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    """The same numbers; their gradients are sums over ranks, each of which has a part of what they flow into."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def first_of(output: Any, change: Callable[[Any], Any]) -> Any:
    """A module's output with the first of its tensors changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def with_first(module: nn.Module, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A hook before forward that changes the first argument, however it is passed."""
    names = list(inspect.signature(module.forward).parameters)
    first = names[0] if names else ""

    def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), named
        if first in named:
            return arguments, {**named, first: change(named[first])}
        return arguments, named

    return hook
