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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trine.optim._agreement import agreed
from trine.optim._facts import facts_of, require_trainable
from trine.optim._failures import EXCHANGING, IDLE, RUNNING, UPDATING, Failing, naming_lost_ranks
from trine.optim._inputs import (
    as_config,
    plain,
    require_count,
    require_iterable,
    require_loss,
    require_own_steps,
    require_settings,
    weighed,
)
from trine.optim._override import current_override, note_engine
from trine.optim._persistence import Persistent
from trine.optim._stages import Staged
from trine.optim.batches import Gathered, size_of, to_device, tokens_of
from trine.optim.config import Config
from trine.optim.memory_limits import require_fit
from trine.optim.techniques import Assembly, Effect, Facts, require_applicable, techniques_of
from trine.record.errors import UsageError
from trine.record.events import emit, emit_metric, is_heard

if TYPE_CHECKING:
    import torch

    from trine.optim.runtime.update import Update

__all__ = ["Engine", "optimize"]

logger = logging.getLogger("trine")

_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()

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
    example: Any = None,
    capacity_bytes: int | Literal["device"] | None = "device",
) -> Engine:
    """Apply ``config`` to a live model and optimizer and return the engine that trains them.

    ``config`` is a :class:`Config`, the path of a TOML file, nested tables, or key paths with their values. ``loss_fn(model, batch)`` gives the mean
    loss, or ``(mean loss, token count)``; with counts, micro-batches *and* ranks weigh by their tokens, which costs one
    8-byte all-reduce a step. ``clip_norm`` clips the gradients' norm, and ``scheduler.step()`` is called, at each
    optimizer step. In a process group every rank must call it alike.

    ``nonfinite``: a step whose gradients are NaN or infinite, or in which no token was valid, raises ``TrainingError``
    on all ranks with the first parameter at fault (``"raise"``), is left out (``"skip"``, which reads every gradient),
    or is not looked at (``"allow"``). Under fp16 steps that overflow are always left out, as loss scaling means it.

    ``example`` is a batch like those to come: a pipeline measures on it what each block costs, and sees what its stages need.
    With it a step's memory is predicted, and refused where it needs more than ``capacity_bytes``: by default all of a CUDA
    device, or ``offload.device_bytes``; ``None`` refuses nothing for its memory.

    Raises ``UsageError``, with the key's name and the way out, for what this version, this machine or this model cannot
    do; model and optimizer are untouched then, unless the message says that the model has been changed.
    """
    given: dict[str, Any] = {}
    with agreed(model, given):
        config, facts = _checked(model, optimizer, config)
        facts = replace(facts, loss_fn=loss_fn, example=example)
        require_settings(optimizer, loss_fn, clip_norm, scheduler, nonfinite)
        require_own_steps(optimizer)
        require_fit(config, facts, capacity_bytes, clip_norm)
        given |= config.changes() | _settings(model, facts, loss_fn, clip_norm, scheduler, nonfinite)
        given.pop("offload.path", None)  # a disk of each rank's own
    from trine.optim.runtime.adoption import first_names, named_parameters
    from trine.optim.runtime.paths import watch_paths
    from trine.optim.runtime.saved_tensors import count_when_heard

    assembly = Assembly(
        model, optimizer, config, facts, named_parameters(model), whole_steps=loss_fn is not None
    )
    assembly.first_names = first_names(model)
    assembly.clip_norm = clip_norm
    try:
        for technique in techniques_of(config):
            technique.apply(assembly)
        count_when_heard(assembly)
        for finish in assembly.finish:
            finish(assembly)
        watch_paths(assembly)
    except BaseException:
        _close_all(assembly.closers)  # no thread, group or switch is left of a run that never began
        raise
    note_engine()
    override = current_override()
    if override is not None:
        override.attach(assembly)
    for effect in assembly.effects:
        if facts.rank == 0:
            logger.info("%s", effect)
    return (assembly.engine or Engine)(assembly, loss_fn, clip_norm, scheduler, nonfinite)


def _checked(model: Any, optimizer: Any, given: Any) -> tuple[Config, Facts]:
    """The configuration to apply, and what is known of where; raises where it cannot be."""
    config = as_config(given)
    override = current_override()
    if override is not None:
        config = override.configuration(config)
    require_applicable(config)
    require_trainable(model, optimizer)
    facts = facts_of(model, optimizer, config)
    for technique in techniques_of(config):
        technique.check(config, facts)
    return config, facts


def _settings(
    model: torch.nn.Module, facts: Facts, loss_fn: Any, clip_norm: Any, scheduler: Any, nonfinite: str
) -> dict[str, Any]:
    """What ranks must be given alike, besides the configuration's keys."""
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return {
        "ranks per node": facts.topology.ranks_per_node,
        "loss_fn": None if loss_fn is None else "a function",
        "clip_norm": None if clip_norm is None else float(clip_norm),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "nonfinite": nonfinite,
        "the model": f"{sum(trained)} trained parameters in {len(trained)} tensors",
        "the optimizer": type(facts.optimizer).__name__,
    }


class Engine(Staged, Persistent, Failing):
    """Trains one model by one configuration. Made by :func:`optimize`."""

    def __init__(
        self,
        assembly: Assembly,
        loss_fn: LossFunction | None,
        clip_norm: float | None,
        scheduler: Any,
        nonfinite: Literal["raise", "skip", "allow"] = "raise",
    ) -> None:
        self.config = assembly.config
        self._assembly = assembly
        self._facts = assembly.facts
        self._loss_fn = loss_fn
        self._update = self._make_update(clip_norm, scheduler, nonfinite)
        self._index = 0  # of the step
        self._micro = 0  # micro-batches since the last optimizer step
        self._last_is_near = False  # the loader has no further batch
        self._step_open = False  # by engine.steps; else train_step opens its own
        self._consumed = False  # the open step's batch has been trained on
        self._stage = IDLE
        self._broken: str | None = None  # why no further step can be taken
        self._same_batches = False  # the ranks that share a batch were seen to
        self._described = -1  # effects that listeners know of
        self._loss: torch.Tensor | None = None  # of the step that is running
        self._keep_state()
        self._close = weakref.finalize(self, _close_all, assembly.closers)

    def _make_update(self, clip_norm: float | None, scheduler: Any, nonfinite: Any) -> Update:
        from trine.optim.runtime.update import Update

        return Update(self._assembly, clip_norm, scheduler, nonfinite)

    @property
    def model(self) -> torch.nn.Module:
        """The model that trains, wrapped as the configuration needs it."""
        return self._assembly.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given, or what had to replace it."""
        return self._assembly.optimizer

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What was changed, and what the first steps showed of it."""
        return tuple(self._assembly.effects)

    @property
    def step_index(self) -> int:
        """Steps that have ended."""
        return self._index

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name, as in the model that was given → what the optimizer holds for it: itself, a shard, a master copy."""
        return dict(self._assembly.parameters)

    def flush(self) -> bool:
        """Apply the update that ``accumulation.delayed`` still holds back, as every rank must; false where there is none.

        Happens by itself when ``engine.steps`` has no further batch, and in :meth:`close`.
        """
        return self._update.flush()

    def close(self) -> None:
        """Finish: apply what is held back, stop the engine's threads, remove its files.

        Threads and files also end by themselves with the process.
        """
        if self._close.alive and self._broken is None:
            self.flush()
        self._close()

    # --- loops of the user's own ---------------------------------------------------------------

    @naming_lost_ranks
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The model's forward, under this configuration. Tensors are moved to the model's device.

        Without gradients (``torch.no_grad``) it is an evaluation, and counts as no micro-batch.
        """
        self._refuse_under_pipeline("engine(batch)")
        if self._training():
            self._require_usable()
            self._require_same_batch((arguments, named))
            if self._assembly.admit is not None:
                self._assembly.admit((arguments, named))
            self._synchronise(self._is_last_micro())
        arguments = to_device(arguments, self._facts.device)
        named = to_device(named, self._facts.device)
        emit("phase", name="forward")
        with self._contexts():
            return self.model(*arguments, **named)

    @naming_lost_ranks
    def backward(self, loss: torch.Tensor, count: float | torch.Tensor | None = None) -> None:
        """Add this micro-batch's gradients. ``count``: tokens that ``loss`` is the mean of, to weigh it by."""
        self._require_usable()
        self._refuse_under_pipeline("engine.backward")
        loss = plain(loss)
        require_loss(loss)
        if count is not None:
            require_count(count)
        emit("phase", name="backward")
        self._update.backward(loss, 1.0 if count is None else count, count is not None)

    @naming_lost_ranks
    def step(self) -> bool:
        """After each micro-batch: steps the optimizer at the last one, and says whether it did."""
        self._require_usable()
        self._micro += 1
        self._consumed = True
        if self._micro < self._assembly.accumulation and not self._last_is_near:
            return False
        return self._optimizer_step()

    def discard(self) -> None:
        """Forget the gradients since the last optimizer step, after an exception in a loop's own body.

        ``optimizer.zero_grad()`` alone would leave their weight behind, and the next step would be scaled wrong.
        """
        self._micro = 0
        self._update.discard()

    # --- whole steps ---------------------------------------------------------------------------

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, each a step: remade with the configuration's workers, moved by train_step.

        With ``accumulation.global_batch`` and a ``loss_fn`` each is what this rank takes an optimizer step, gathered or cut
        from the loader's batches.
        """
        require_iterable(loader)
        given = loader
        for remake in self._assembly.loaders:
            loader = remake(loader)
        iterator, left = self._data.begin(given, loader)
        while True:
            self._begin_step()
            emit("phase", name="data")
            try:
                batch = next(iterator)
            except BaseException as error:
                emit("step_cancel", index=self._index)
                if isinstance(error, StopIteration):
                    break
                raise
            if left is not None:
                left -= 1
                self._last_is_near = left == 0
            self._step_open = True
            self._size, tokens = size_of(batch), tokens_of(batch)
            passed = False
            try:
                yield batch
                passed = True
            finally:  # also when the loop is left early: the step ends there, if there was one
                if passed or self._consumed:
                    self._data.passed(self._size)
                if self._consumed:
                    self._close_step(self._size, tokens)
                else:
                    self._step_open = False
                    emit("step_cancel", index=self._index)
        if self._micro:
            logger.warning(
                "the loader ended after %d of %d micro-batches: their gradients were left for the next step",
                self._micro,
                self._assembly.accumulation,
            )
        self._data.ended()
        self._last_is_near = False
        if self._broken is None:
            self.flush()

    @naming_lost_ranks
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
        self._require_usable()
        own_step = not self._step_open
        if own_step:
            self._begin_step()
        emit("phase", name="copy")
        try:
            self._require_same_batch(batch)
            if not isinstance(batch, Gathered):  # whose micro-batches are moved one by one
                batch = to_device(batch, self._facts.device)
            self._rehearse(batch)
            self._loss = self._run(batch)
        except BaseException as error:
            self._fail(error)
            if own_step:
                emit("step_cancel", index=self._index)
            raise
        mean = self._loss
        if own_step:
            self._close_step(size_of(batch), tokens_of(batch))
        return mean

    def _run(self, batch: Any) -> torch.Tensor:
        assembly = self._assembly
        if assembly.fitting is not None:
            return assembly.fitting.step(batch, self._accumulate, self._probe, self._take_back)
        return self._accumulate(self._pieces(batch))

    def _accumulate(self, pieces: list[Any]) -> torch.Tensor:
        """Forward and backward of each micro-batch, then the optimizer; the mean loss."""
        if self._assembly.pipeline is not None:
            self._stage = EXCHANGING
            emit("phase", name="forward")
            self._run_stages(pieces)
            return self._updated()
        last = len(pieces) - 1
        samples = [float(size_of(piece) or 1) for piece in pieces] if last else [1.0]
        whole = sum(samples)
        self._stage = RUNNING
        for position, piece in enumerate(pieces):
            self._synchronise(position == last)
            result = self._forward(piece)
            loss, weight, counted = self._weighed(result, piece, samples[position] / whole, len(pieces))
            emit("phase", name="backward")
            if position == last:
                self._stage = EXCHANGING
            self._update.backward(loss, weight, counted)
        return self._updated()

    def _updated(self) -> torch.Tensor:
        self._stage = UPDATING
        self._optimizer_step()
        self._stage = IDLE
        return self._update.loss

    def _forward(self, piece: Any) -> Any:
        piece = to_device(piece, self._facts.device)
        emit("phase", name="forward")
        return self._call(self.model, piece)

    def _probe(self, piece: Any) -> None:
        """Forward and backward of a micro-batch whose memory is measured; what it leaves is undone by who measures."""
        # Gradients that FSDP2 keeps unreduced could not be undone.
        self._synchronise(self.config.zero.stage >= 2 or self._facts.layout.is_hybrid)
        self._stage = RUNNING
        loss = weighed(self._forward(piece), 1.0, piece)[0]
        require_loss(loss)
        with self._update.contexts():
            loss.backward()  # type: ignore[no-untyped-call]
        self._stage = IDLE

    # --- parts ---------------------------------------------------------------------------------

    def _training(self) -> bool:
        import torch

        return torch.is_grad_enabled()

    def _contexts(self) -> AbstractContextManager[Any]:
        contexts = self._assembly.contexts
        if not contexts:
            return _NO_CONTEXT
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context())
        return stack

    def _is_last_micro(self) -> bool:
        return self._micro + 1 >= self._assembly.accumulation or self._last_is_near

    def _synchronise(self, wanted: bool) -> None:
        if self._assembly.synchronise is not None:
            self._assembly.synchronise(wanted)

    def _optimizer_step(self) -> bool:
        emit("phase", name="optimizer")
        self._micro = 0
        self._consumed = True
        return self._update.step()

    def _begin_step(self) -> None:
        if is_heard() and len(self._assembly.effects) > self._described:
            effects = [str(effect) for effect in self._assembly.effects]
            emit("configuration", configuration=self.config.to_dict(), effects=effects)
            self._described = len(effects)
        emit("step_begin", index=self._index)

    def _close_step(self, samples: int | None, tokens: int | None) -> None:
        self._step_open = self._consumed = False
        if is_heard():
            for name, value in self._assembly.metrics.items():
                emit_metric(name, value)
        emit("step_end", index=self._index, samples=samples, tokens=tokens, loss=self._loss)
        self._index += 1
        self._loss = None
        for after in tuple(self._assembly.after_step):  # one that is done takes itself out
            after()


def _close_all(closers: list[Callable[[], None]]) -> None:
    """Every one, the last first; what one of them raises is raised when all have run."""
    with ExitStack() as stack:
        for close in closers:
            stack.callback(close)
