"""From a plain model and optimizer to an optimised training run.

    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    for batch in engine.steps(loader):
        loss = engine.train_step(batch)

The engine adopts what it is given, trained or not, and refuses a configuration that it cannot apply
before it changes anything. Loops that want their own body use ``engine(batch)``,
``engine.backward(loss)`` and ``engine.step()``. What it does is told to whoever listens on
:mod:`trine.record.events`, so that a profiler sees exact steps and phases.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trine.optim._facts import facts_of, require_trainable
from trine.optim._override import current_override
from trine.optim.batches import pieces_of, size_of, to_device, tokens_of
from trine.optim.config import Config
from trine.optim.techniques import Assembly, Effect, require_applicable, techniques
from trine.record.errors import UsageError
from trine.record.events import emit, emit_metric

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "optimize"]

logger = logging.getLogger("trine")

#: ``loss_fn(model, batch)``: the mean loss, or the mean loss and the number of tokens it is the mean of.
LossFunction = Callable[[Any, Any], Any]


def optimize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    loss_fn: LossFunction | None = None,
    clip_norm: float | None = None,
    scheduler: Any = None,
    nonfinite: Literal["raise", "skip", "allow"] = "raise",
) -> Engine:
    """Apply ``config`` to a live model and optimizer and return the engine that trains them.

    ``config`` is a :class:`Config`, the path of a TOML file, or nested tables. ``loss_fn(model, batch)`` gives the mean
    loss, or ``(mean loss, token count)``; with counts, micro-batches *and* ranks weigh by their tokens, which costs one
    8-byte all-reduce a step. ``clip_norm`` clips the gradients' norm, and ``scheduler.step()`` is called, at each
    optimizer step. In a process group every rank must call it alike.

    ``nonfinite``: a step whose gradients are NaN or infinite, or in which no token was valid, raises ``TrainingError``
    on all ranks with the first parameter at fault (``"raise"``), is left out (``"skip"``, which reads every gradient),
    or is not looked at (``"allow"``). Under fp16 steps that overflow are always left out, as loss scaling means it.

    Raises ``UsageError``, with the key's name and the way out, for what this version, this machine or this model cannot
    do; model and optimizer are untouched then.
    """
    config = _config(config)
    override = current_override()
    if override is not None:
        config = override.configuration(config)
    require_applicable(config)
    require_trainable(model, optimizer)
    if nonfinite not in ("raise", "skip", "allow"):
        raise UsageError(f'nonfinite = {nonfinite!r}: it takes "raise", "skip" or "allow"')
    facts = facts_of(model, optimizer)
    for technique in techniques():
        technique.check(config, facts)
    from trine.optim.runtime.adoption import named_parameters

    assembly = Assembly(model, optimizer, config, facts, named_parameters(model))
    for technique in techniques():
        technique.apply(assembly)
    for finish in assembly.finish:
        finish(assembly)
    if override is not None:
        override.attach(assembly)
    for effect in assembly.effects:
        if facts.rank == 0:
            logger.info("%s", effect)
    return Engine(assembly, loss_fn, clip_norm, scheduler, nonfinite)


class Engine:
    """Trains one model by one configuration. Made by :func:`optimize`."""

    def __init__(
        self,
        assembly: Assembly,
        loss_fn: LossFunction | None,
        clip_norm: float | None,
        scheduler: Any,
        nonfinite: Literal["raise", "skip", "allow"] = "raise",
    ) -> None:
        from trine.optim.runtime.update import Update

        self.config = assembly.config
        self.effects: tuple[Effect, ...] = tuple(assembly.effects)
        self._assembly = assembly
        self._facts = assembly.facts
        self._loss_fn = loss_fn
        self._update = Update(assembly, clip_norm, scheduler, nonfinite)
        self._index = 0  # of the step
        self._micro = 0  # micro-batches since the last optimizer step
        self._last_is_near = False  # the loader has no further batch
        self._step_open = False  # by engine.steps; else train_step opens its own
        self._described = False
        self._loss: torch.Tensor | None = None  # of the step that is running
        self._close = weakref.finalize(self, _close_all, assembly.closers)

    @property
    def model(self) -> torch.nn.Module:
        """The model that trains, wrapped as the configuration needs it."""
        return self._assembly.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given, or what had to replace it."""
        return self._assembly.optimizer

    @property
    def step_index(self) -> int:
        """Steps that have ended."""
        return self._index

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name, as in the model that was given → what the optimizer holds for it: itself, a shard, a master copy."""
        return dict(self._assembly.parameters)

    def close(self) -> None:
        """Stop the engine's threads and remove its files; happens by itself when the process ends."""
        self._close()

    # --- loops of the user's own ---------------------------------------------------------------

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The model's forward, under this configuration. Tensors are moved to the model's device."""
        self._synchronise(self._is_last_micro())
        arguments = to_device(arguments, self._facts.device)
        named = to_device(named, self._facts.device)
        emit("phase", name="forward")
        with self._contexts():
            return self.model(*arguments, **named)

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        """Add this micro-batch's gradients. ``count``: tokens that ``loss`` is the mean of, to weigh it by."""
        emit("phase", name="backward")
        self._update.backward(loss, 1.0 if count is None else float(count), count is not None)

    def step(self) -> bool:
        """After each micro-batch: steps the optimizer at the last one, and says whether it did."""
        self._micro += 1
        if self._micro < self._assembly.accumulation and not self._last_is_near:
            return False
        return self._optimizer_step()

    # --- whole steps ---------------------------------------------------------------------------

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, each a step: remade with the configuration's workers, moved by train_step."""
        for remake in self._assembly.loaders:
            loader = remake(loader)
        iterator = iter(loader)
        left = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]
        while True:
            self._begin_step()
            emit("phase", name="data")
            try:
                batch = next(iterator)
            except StopIteration:
                emit("step_cancel", index=self._index)
                break
            if left is not None:
                left -= 1
                self._last_is_near = left == 0
            self._step_open = True
            size = (size_of(batch), tokens_of(batch))
            try:
                yield batch
            finally:  # also when the loop is left early: the step ends there
                self._close_step(*size)
        if self._micro:
            logger.warning(
                "the loader ended after %d of %d micro-batches: their gradients were left for the next step",
                self._micro,
                self._assembly.accumulation,
            )
        self._last_is_near = False

    def train_step(self, batch: Any) -> torch.Tensor:
        """Forward, backward, accumulation and optimizer on one batch; the mean loss, detached, on the device.

        With ``accumulation.steps`` the batch is cut along its first dimension. Raises ``UsageError`` without a
        ``loss_fn``, and for a batch that cannot be cut.
        """
        if self._loss_fn is None:
            raise UsageError(
                "engine.train_step needs loss_fn: pass loss_fn=… to trine.optimize, or use engine(batch), "
                "engine.backward(loss) and engine.step()"
            )
        own_step = not self._step_open
        if own_step:
            self._begin_step()
        emit("phase", name="copy")
        batch = to_device(batch, self._facts.device)
        cut = self._assembly.cut
        pieces = pieces_of(batch, self._assembly.accumulation) if cut is None else cut(batch)
        for position, piece in enumerate(pieces):
            self._synchronise(position == len(pieces) - 1)
            emit("phase", name="forward")
            with self._contexts():
                result = self._loss_fn(self.model, piece)
            loss, weight, counted = self._weighed(result, piece, len(pieces))
            emit("phase", name="backward")
            self._update.backward(loss, weight, counted)
        self._optimizer_step()
        mean = self._update.loss
        self._loss = mean
        if own_step:
            self._close_step(size_of(batch), tokens_of(batch))
        return mean

    # --- parts ---------------------------------------------------------------------------------

    def _contexts(self) -> ExitStack:
        stack = ExitStack()
        for context in self._assembly.contexts:
            stack.enter_context(context())
        return stack

    def _is_last_micro(self) -> bool:
        return self._micro + 1 >= self._assembly.accumulation or self._last_is_near

    def _synchronise(self, wanted: bool) -> None:
        if self._assembly.synchronise is not None:
            self._assembly.synchronise(wanted)

    def _weighed(self, result: Any, piece: Any, pieces: int) -> tuple[torch.Tensor, Any, bool]:
        """The mean loss, what it weighs, and whether that is a token count: else its samples, else one."""
        if isinstance(result, tuple):
            return result[0], result[1], True
        return result, 1.0 if pieces == 1 else float(size_of(piece) or 1), False

    def _optimizer_step(self) -> bool:
        emit("phase", name="optimizer")
        self._micro = 0
        return self._update.step()

    def _begin_step(self) -> None:
        emit("step_begin", index=self._index)
        if not self._described:
            self._described = emit(
                "configuration",
                configuration=self.config.to_dict(),
                effects=[str(effect) for effect in self.effects],
            )

    def _close_step(self, samples: int | None, tokens: int | None) -> None:
        self._step_open = False
        for name, value in self._assembly.metrics.items():
            emit_metric(name, value)
        emit("step_end", index=self._index, samples=samples, tokens=tokens, loss=self._loss)
        self._index += 1
        self._loss = None
        for after in self._assembly.after_step:
            after()


def _config(given: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return Config.from_dict(given)
    return Config.from_toml(given)


def _close_all(closers: list[Callable[[], None]]) -> None:
    for close in reversed(closers):
        close()
