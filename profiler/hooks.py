"""Where the phases come from: hooks in PyTorch, put in place for one session and taken out after it.

* forward: pre- and post-hooks on the models that were given;
* backward: ``torch.autograd.backward``, which ``Tensor.backward`` calls;
* optimizer: the global step hooks of ``torch.optim``, and ``GradScaler.step``, which may skip the optimizer;
* data: ``DataLoader`` iteration where the loop does not say which loader feeds it;
* checkpoints: ``torch.save`` and ``torch.distributed.checkpoint``'s, and evaluation (:mod:`trine.profiler.regions`).

Hooks stay valid whatever happens to them: a model is copied and pickled with them, and its pickle needs no Trine to
be read; without a session, in another thread, or in a forked worker they do nothing; and ``torch.compile`` sees an
empty function, because a traced clock would be wrong and could break the graph.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .after_import import call_after_import
from .guard import Guard
from .marks import Marker
from .phases import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER
from .regions import Regions, saving, turning

__all__ = ["Hooks", "Watcher"]


class Watcher(Protocol):
    """What a session tells its hooks, and hears from them."""

    marker: Marker
    exposes_backward: bool
    watches_loaders: bool
    regions: Regions
    guard: Guard

    def saw_forward(self) -> None:
        """The first forward of a part, with gradients."""

    def saw_backward(self) -> None:
        """Backward was called."""

    def saw_optimizer(self, optimizer: Any) -> None:
        """An optimizer has stepped, or was skipped because gradients overflowed."""

    def saw_loader(self, iterator: Any) -> None:
        """A ``DataLoader`` was asked for a batch."""

    def saw_batch(self, iterator: Any, batch: Any) -> None:
        """It gave one."""

    def saw_exhausted(self, iterator: Any) -> None:
        """It had no further one."""


_CHECKPOINT = "torch.distributed.checkpoint"

_watcher: Watcher | None = None
_fork_handler_installed = False


def _here() -> Watcher | None:
    """The watcher, when its part is open and this is its thread."""
    watcher = _watcher
    if watcher is None or watcher.marker.thread != get_ident():
        return None
    return watcher


def _regions_here() -> Regions | None:
    watcher = _here()
    return None if watcher is None else watcher.regions


def _nothing() -> None:
    """What there is to do where there is nothing to do."""


class _ModuleHook:
    """A hook that lives in a user's module. In a pickle (``torch.save(model)``) an empty function of the standard
    library stands in for it: the checkpoint must load where Trine is not installed."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _before_forward(module: Any, arguments: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watcher = _here()
    if watcher is not None:
        with_gradients = torch.is_grad_enabled()
        watcher.marker.enter(FORWARD if with_gradients else EVALUATION)
        watcher.regions.before_forward(module, with_gradients)
        if with_gradients:
            watcher.saw_forward()


def _after_forward(module: Any, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watcher = _here()
    if watcher is not None:
        watcher.marker.leave()
        watcher.regions.after_forward()


def _before_optimizer(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watcher = _here()
    if watcher is not None:
        watcher.marker.enter(OPTIMIZER)


def _after_optimizer(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watcher = _here()
    if watcher is not None:
        watcher.marker.leave()
        watcher.saw_optimizer(optimizer)


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*arguments, **keywords)
        watcher = _here()
        if watcher is None:
            return original(*arguments, **keywords)
        watcher.marker.enter(BACKWARD)
        handle = _expose(watcher, arguments) if watcher.exposes_backward else None
        try:
            return original(*arguments, **keywords)
        finally:
            if handle is not None:
                handle.remove()
            watcher.marker.leave()
            watcher.saw_backward()

    return backward


def _expose(watcher: Watcher, arguments: Sequence[Any]) -> Any:
    """Mark, on the device, where backward's own work ends and its wait for collectives begins.

    The first hook that runs queues a callback ahead of those of DistributedDataParallel, which wait for its buckets
    (final callbacks run in order, after the streams have joined: torch/csrc/autograd/engine.cpp).
    """
    root = arguments[0] if arguments else None
    root = root[0] if isinstance(root, (tuple, list)) and root else root
    if not isinstance(root, torch.Tensor) or not root.requires_grad or root.device.type == "cpu":
        return None

    def queue(gradient: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(watcher.marker.expose)

    return root.register_hook(queue)  # type: ignore[no-untyped-call]


def _wrap_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        watcher = _here()
        if watcher is None:
            return original(scaler, optimizer, *arguments, **keywords)
        watcher.marker.enter(OPTIMIZER)
        try:
            return original(scaler, optimizer, *arguments, **keywords)
        finally:
            watcher.marker.leave()
            watcher.saw_optimizer(optimizer)

    return step


def _wrap_loader_next(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def following(iterator: Any) -> Any:
        watcher = _here()
        if watcher is None or not watcher.watches_loaders:
            return original(iterator)
        watcher.saw_loader(iterator)
        watcher.marker.enter(DATA)
        exhausted = False
        try:
            batch = original(iterator)
        except StopIteration:
            exhausted = True
            raise
        finally:
            watcher.marker.leave()
            if exhausted:
                watcher.saw_exhausted(iterator)
        watcher.saw_batch(iterator, batch)
        return batch

    return following


class Hooks:
    """Puts the hooks in place and takes them out. One at a time in a process."""

    def __init__(self, watcher: Watcher, models: Sequence[Any]) -> None:
        self._watcher = watcher
        self._models = models
        self._handles: list[Any] = []
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._forget_import: Callable[[], None] = _nothing

    def install(self) -> None:
        """Raises ``RuntimeError`` when another session has its hooks in place."""
        global _watcher
        if _watcher is not None:
            raise RuntimeError("another session is watching this process")
        _install_fork_handler()
        for model in self._models:
            self.watch(model)
        self._handles.append(register_optimizer_step_pre_hook(_before_optimizer))
        self._handles.append(register_optimizer_step_post_hook(_after_optimizer))
        self._patch(torch.autograd, "backward", _wrap_backward(torch.autograd.backward))
        scaler = torch.amp.grad_scaler.GradScaler
        self._patch(scaler, "step", _wrap_scaler_step(scaler.step))
        self._patch(_BaseDataLoaderIter, "__next__", _wrap_loader_next(_BaseDataLoaderIter.__next__))
        guard = self._watcher.guard
        module = torch.nn.Module
        self._patch(module, "eval", turning(module.eval, _regions_here, _nothing, self._await_training))
        guard.run("checkpoints", self._time_saving, "torch", ("save",))
        self._forget_import = call_after_import(
            _CHECKPOINT, functools.partial(guard.run, "checkpoints", self._time_checkpoints)
        )
        _watcher = self._watcher

    def _await_training(self) -> None:
        """``Module.train`` is watched from ``eval()`` to its next call alone: it calls itself for each module inside, and
        many loops call it in every step."""
        module = torch.nn.Module
        if not any(name == "train" for _, name, _, _ in self._patches):
            self._patch(module, "train", turning(module.train, _regions_here, self._await_no_more, _nothing))

    def _await_no_more(self) -> None:
        self._take_back([patch for patch in self._patches if patch[1] == "train"])
        self._patches = [patch for patch in self._patches if patch[1] != "train"]

    def _time_checkpoints(self) -> None:
        """``torch.distributed.checkpoint`` has been imported, which a script may do only when it saves."""
        self._time_saving(_CHECKPOINT, ("save", "async_save"))

    def _time_saving(self, package: str, names: Sequence[str]) -> None:
        """Only where the package shows them: in the module that defines them stay the originals, under which whoever
        imported one before is pickled."""
        owner = sys.modules[package]
        for name in names:
            if hasattr(owner, name):
                self._patch(owner, name, saving(getattr(owner, name), package, name, _regions_here))

    def watch(self, model: Any) -> None:
        """Hook the forward of one more model."""
        self._handles.append(model.register_forward_pre_hook(_ModuleHook(_before_forward)))
        self._handles.append(model.register_forward_hook(_ModuleHook(_after_forward), always_call=True))

    def remove(self) -> None:
        """Take all out. What others have wrapped since stays wrapped; our part in it does nothing any more."""
        global _watcher
        if _watcher is self._watcher:
            _watcher = None
        self._forget_import()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._take_back(self._patches)
        self._patches = []

    def _take_back(self, patches: Sequence[tuple[Any, str, Any, Any]]) -> None:
        for owner, name, original, ours in reversed(patches):
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

    def _patch(self, owner: Any, name: str, ours: Any) -> None:
        self._patches.append((owner, name, getattr(owner, name), ours))
        setattr(owner, name, ours)


def _install_fork_handler() -> None:
    """A forked child (a loader's worker) has our hooks but not our thread: there they must do nothing."""
    global _fork_handler_installed
    if not _fork_handler_installed and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
        _fork_handler_installed = True


def _forget() -> None:
    global _watcher
    _watcher = None
