"""A module whose activations are recomputed in backward: its ``forward`` is replaced where it stands.

Names in the state dictionary, hooks and the module's class stay as they are, so that it can still be compiled, sharded
and copied. The recomputation is PyTorch's own, ``torch.utils.checkpoint`` without reentrant autograd (Chen et al. 2016,
"Training deep nets with sublinear memory cost"), made safe where it is silent by itself:

- arguments given by name travel as positions: the device's random state is saved for positional tensors alone, so
  dropout in a module that is called by names would be drawn anew;
- running statistics of batch norms are updated by the original forward alone, not once more by the recomputation;
- other buffers that a module changes as it runs are refused by name, since recomputation would change them again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trine.optim.runtime.selective import contexts_that_keep, refusing_changed_results
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.recompute_plan import Plan

__all__ = [
    "Region",
    "checkpoint_in_place",
    "current_region",
    "keeps_inputs_exact",
    "moves_now",
    "moving",
    "normalisations",
]

_BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Running(threading.local):
    """What runs on this thread: the regions it is in, whether a region's inputs are being saved, and what is moved."""

    def __init__(self) -> None:
        self.regions: list[str] = []
        self.saves_inputs = False
        self.moves: bool | None = None


_running = _Running()


@dataclass(eq=False)
class Region:
    """One checkpointed module. Copied and pickled with it."""

    name: str
    module: nn.Module
    #: Names of operators whose results are kept (:mod:`trine.optim.runtime.selective`); empty: none.
    operators: tuple[str, ...] = ()
    #: False: this module runs as it would by itself.
    active: bool = True
    #: Whether what is saved for it moves off the device; ``None``: whatever the store does.
    moves: bool | None = None
    #: Measures what the module saves, and decides over ``active`` and ``moves``.
    plan: Plan | None = None
    #: Whether gradients of inputs and of weights are computed by several backwards, as in zero-bubble pipelines: what was
    #: recomputed for the first is kept for the others. PyTorch by itself would recompute once for each layer.
    splits_backward: bool = False
    #: Whether the first forward has been looked at for buffers that it changes.
    looked_at: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the plan: it belongs to the engine, not to a copy of the model."""
        return {**self.__dict__, "plan": None}


def checkpoint_in_place(region: Region) -> None:
    """Replace the module's ``forward`` on the instance. It pickles and copies with the module."""
    forward = region.module.forward
    replaced = functools.partial(_forward, forward, region)
    functools.update_wrapper(replaced, forward)  # its signature and name, for those who ask
    region.module.forward = replaced


def current_region() -> str | None:
    """The name of the innermost checkpointed module that runs on this thread, original or recomputed."""
    return _running.regions[-1] if _running.regions else None


def keeps_inputs_exact() -> bool:
    """Whether what autograd saves now is the input of a checkpointed module.

    It is recomputed from, so a rounded copy would change branches, routing and every activation after it.
    """
    return _running.saves_inputs


def moves_now() -> bool | None:
    """Whether what autograd saves now is to leave the device; ``None`` where no block's plan says."""
    return _running.moves


@contextmanager
def moving(wanted: bool | None) -> Iterator[None]:
    """Whether what is saved meanwhile, on this thread, is to leave the device."""
    before, _running.moves = _running.moves, wanted
    try:
        yield
    finally:
        _running.moves = before


def normalisations(module: nn.Module) -> list[nn.Module]:
    """Batch (and instance) norms within that track running statistics."""
    return [
        each
        for each in module.modules()
        if isinstance(each, nn.modules.batchnorm._NormBase) and each.track_running_stats
    ]


def _forward(forward: Callable[..., Any], region: Region, *arguments: Any, **named: Any) -> Any:
    """What the module's ``forward`` has become."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    if (
        torch.compiler.is_compiling()
    ):  # the compiler recomputes by itself; nothing to measure or to name in there
        return (
            _recomputed(forward, region, arguments, named) if region.active else forward(*arguments, **named)
        )
    plan = region.plan
    if plan is not None:
        plan.meet(region, arguments, named)
    with moving(region.moves):
        return _run(forward, region, arguments, named)


def _run(
    forward: Callable[..., Any], region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    checked: AbstractContextManager[Any] = nullcontext()
    if not region.looked_at and (region.active or region.plan is not None):
        region.looked_at = True
        checked = _refusing_changes(region)
    with checked:
        if region.active:
            return _saving_inputs(forward, region, arguments, named)
        if region.plan is None:
            return forward(*arguments, **named)
        with region.plan.watching(region, arguments, named):
            return forward(*arguments, **named)


@contextmanager
def _refusing_changes(region: Region) -> Iterator[None]:
    """Of what a recomputation would change once more, or finds changed."""
    with _refusing_changed_buffers(region), refusing_changed_results(region.name):
        yield


def _saving_inputs(
    forward: Callable[..., Any], region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    before = _running.saves_inputs
    _running.saves_inputs = True
    try:
        return _recomputed(functools.partial(_named, forward, region), region, arguments, named)
    finally:
        _running.saves_inputs = before


def _named(forward: Callable[..., Any], region: Region, *arguments: Any, **named: Any) -> Any:
    """Run with the region's name known; both the original and the recomputation pass here."""
    before = _running.saves_inputs
    _running.saves_inputs = False
    _running.regions.append(region.name)
    try:
        with ExitStack() as stack:
            if region.splits_backward and torch._C._current_graph_task_id() == -1:
                stack.enter_context(_recomputing_once())
            if region.plan is not None:
                stack.enter_context(region.plan.watching(region, arguments, named))
            return forward(*arguments, **named)
    finally:
        _running.regions.pop()
        _running.saves_inputs = before


@contextmanager
def _recomputing_once() -> Iterator[None]:
    """What a backward was given of a recomputation stays for other backwards over the same graph, as long as that lives.

    ``torch.utils.checkpoint.GraphExecGroup`` shares a recomputation among backwards that have no saved tensor in common;
    those of a layer's input and of its weights have.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: _Once(pack(tensor)), lambda once: once.get(unpack)
    ):
        yield


class _Once:
    """A saved tensor of a recomputed module."""

    __slots__ = ("_packed", "_tensor")

    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self._tensor: torch.Tensor | None = None

    def get(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Recomputed at the first call."""
        if self._tensor is None:
            self._tensor = unpack(self._packed)
        return self._tensor


def _recomputed(
    forward: Callable[..., Any], region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    names = tuple(named)
    count = len(arguments)

    def run(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    options: dict[str, Any] = {}
    statistics = () if torch.compiler.is_compiling() else tuple(normalisations(region.module))
    if region.operators and not statistics:
        options["context_fn"] = functools.partial(contexts_that_keep, region.operators)
    elif statistics:
        options["context_fn"] = functools.partial(_contexts, region.operators, statistics)
    return checkpoint(run, *arguments, *named.values(), use_reentrant=False, **options)


def _contexts(
    operators: tuple[str, ...], statistics: tuple[nn.Module, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the original forward and around its recomputation."""
    original, again = contexts_that_keep(operators) if operators else (nullcontext(), nullcontext())
    return original, _StatisticsStay(statistics, again)


class _StatisticsStay:
    """Lets batch norms update copies of their running statistics, while ``inner`` is entered too."""

    def __init__(self, modules: tuple[nn.Module, ...], inner: AbstractContextManager[Any]) -> None:
        self._modules = modules
        self._inner = inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for module in self._modules:
            for name in _BATCH_STATISTICS:
                buffer = module._buffers.get(name)
                if buffer is not None:
                    self._stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.clone()
        self._stack.enter_context(self._inner)

    def __exit__(self, *raised: object) -> None:
        self._stack.close()


@contextmanager
def _refusing_changed_buffers(region: Region) -> Iterator[None]:
    """Raise ``UsageError`` where the region's forward changes a buffer other than a batch norm's statistics."""
    known = {id(module) for module in normalisations(region.module)}
    before = {
        (prefix, name): (buffer, buffer._version)
        for prefix, module in region.module.named_modules()
        if id(module) not in known
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    yield
    for (prefix, name), (buffer, version) in before.items():
        module = region.module.get_submodule(prefix)
        if module._buffers.get(name) is not buffer or version != getattr(buffer, "_version", None):
            path = ".".join(part for part in (region.name, prefix, name) if part)
            raise UsageError(
                f"checkpointing: {region.name} changes its buffer {path} as it runs, and recomputation would change "
                "it once more: leave that module out by naming the others in checkpointing.modules"
            )
