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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.optim.batches import pieces_of, size_of, to_device, tokens_of
from trine.optim.config import Config
from trine.optim.techniques import Assembly, Effect, Facts, require_applicable, techniques
from trine.record.errors import UsageError
from trine.record.events import emit

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
) -> Engine:
    """Apply ``config`` to a live model and optimizer and return the engine that trains them.

    ``config`` is a :class:`Config`, the path of a TOML file, or nested tables. ``loss_fn(model, batch)`` gives the mean
    loss, or ``(mean loss, token count)``; with counts, micro-batches *and* ranks weigh by their tokens, which costs one
    8-byte all-reduce a step. ``clip_norm`` clips the gradients' norm, and ``scheduler.step()`` is called, at each
    optimizer step. In a process group every rank must call it alike.

    Raises ``UsageError``, with the key's name and the way out, for what this version, this machine or this model cannot
    do; model and optimizer are untouched then.
    """
    config = _config(config)
    require_applicable(config)
    facts = _facts(model, optimizer)
    for technique in techniques():
        technique.check(config, facts)
    assembly = Assembly(model, optimizer, config, facts)
    for technique in techniques():
        technique.apply(assembly)
    for effect in assembly.effects:
        if facts.rank == 0:
            logger.info("%s", effect)
    return Engine(assembly, loss_fn, clip_norm, scheduler)


class Engine:
    """Trains one model by one configuration. Made by :func:`optimize`."""

    def __init__(
        self,
        assembly: Assembly,
        loss_fn: LossFunction | None,
        clip_norm: float | None,
        scheduler: Any,
    ) -> None:
        self.model = assembly.model
        self.optimizer = assembly.optimizer
        self.config = assembly.config
        self.effects: tuple[Effect, ...] = tuple(assembly.effects)
        self._assembly = assembly
        self._facts = assembly.facts
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._scheduler = scheduler
        self._index = 0  # of the step
        self._micro = 0  # micro-batches since the last optimizer step
        self._last_is_near = False  # the loader has no further batch
        self._weight: float | torch.Tensor = 0.0  # of the gradients summed so far
        self._step_open = False  # by engine.steps; else train_step opens its own
        self._counted = False
        self._loss: torch.Tensor | None = None  # of the step that is running

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
        self._counted = self._counted or count is not None
        weight = 1.0 if count is None else float(count)
        emit("phase", name="backward")
        self._accumulate(loss, weight)

    def step(self) -> bool:
        """After each micro-batch: steps the optimizer at the last one, and says whether it did."""
        self._micro += 1
        if self._micro < self._assembly.accumulation and not self._last_is_near:
            return False
        self._optimizer_step()
        return True

    # --- whole steps ---------------------------------------------------------------------------

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, each a step: remade with the configuration's workers, moved by train_step."""
        for remake in self._assembly.loaders:
            loader = remake(loader)
        iterator = iter(loader)
        left = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]
        while True:
            emit("step_begin", index=self._index)
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
            emit("step_begin", index=self._index)
        emit("phase", name="copy")
        batch = to_device(batch, self._facts.device)
        pieces = pieces_of(batch, self._assembly.accumulation)
        weighted: Any = 0.0
        weights: Any = 0.0
        for position, piece in enumerate(pieces):
            self._synchronise(position == len(pieces) - 1)
            emit("phase", name="forward")
            with self._contexts():
                result = self._loss_fn(self.model, piece)
            loss, weight = self._weighed(result, piece, len(pieces))
            emit("phase", name="backward")
            self._accumulate(loss, weight)
            weighted = weighted + loss.detach() * weight
            weights = weights + weight
        self._optimizer_step()
        mean: torch.Tensor = weighted / weights
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

    def _weighed(self, result: Any, piece: Any, pieces: int) -> tuple[torch.Tensor, Any]:
        """The mean loss and what it weighs: its token count when given, else its samples, else one."""
        if isinstance(result, tuple):
            loss, count = result
            self._counted = True
            return loss, count
        return result, 1.0 if pieces == 1 else float(size_of(piece) or 1)

    def _accumulate(self, loss: torch.Tensor, weight: Any) -> None:
        """Sum weight × gradient; :meth:`_normalise` divides by the sum of weights at the end."""
        if self._is_plain(weight):
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            (loss * weight).backward()
        self._weight = self._weight + weight

    def _is_plain(self, weight: Any) -> bool:
        return isinstance(weight, float) and weight == 1.0

    def _normalise(self) -> None:
        """Divide the summed gradients by the summed weights, over all ranks when tokens were counted."""
        import torch

        total: Any = self._weight
        if self._counted and self._facts.ranks > 1:
            # DDP averaged over ranks: (1/W) Σ weight·gradient. Times W / Σ weight gives the mean over all tokens.
            summed = torch.as_tensor(float(total), dtype=torch.float64, device=self._facts.device)
            torch.distributed.all_reduce(summed)
            total = float(summed) / self._facts.ranks
        total = float(total)
        if total == 0.0:
            raise UsageError(
                "no rank counted a token in this step, so its loss has no mean: skip such batches"
            )
        if total != 1.0:
            gradients = [
                p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None
            ]
            torch._foreach_mul_(gradients, 1.0 / total)

    def _optimizer_step(self) -> None:
        import torch

        emit("phase", name="optimizer")
        self._normalise()
        if self._clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._micro = 0
        self._weight = 0.0
        self._counted = False

    def _close_step(self, samples: int | None, tokens: int | None) -> None:
        self._step_open = False
        emit("step_end", index=self._index, samples=samples, tokens=tokens, loss=self._loss)
        self._index += 1
        self._loss = None


def _config(given: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return Config.from_dict(given)
    return Config.from_toml(given)


def _facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Facts:
    import torch
    from torch import distributed

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"trine.optimize takes a torch.nn.Module first, not a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"trine.optimize takes a torch optimizer second, not a {type(optimizer).__name__}")
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to train")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model lies on {listed}: this version trains a model that is on one device")
    _require_same_parameters(model, optimizer)
    grouped = distributed.is_available() and distributed.is_initialized()
    return Facts(
        device=devices.pop(),
        ranks=distributed.get_world_size() if grouped else 1,
        rank=distributed.get_rank() if grouped else 0,
        backend=distributed.get_backend() if grouped else None,
        model=model,
        optimizer=optimizer,
    )


def _require_same_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer over other parameters than the model's trains nothing, silently."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if trained and not any(id(p) in held for _, p in trained):
        raise UsageError(
            "the optimizer holds none of the model's parameters, so it would train nothing: make it from "
            "model.parameters() after the model has its final form"
        )
    left = [name for name, p in trained if id(p) not in held]
    if left:
        logger.info("%d parameters are in no group of the optimizer, %s among them", len(left), left[0])
