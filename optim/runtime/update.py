"""One optimizer step: from summed gradients to new parameters, or to a step that was skipped and says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trine.optim._inputs import require_gradient
from trine.optim.layout import DIMENSIONS
from trine.optim.runtime.agreement import Agreement
from trine.optim.runtime.nonfinite import (
    Policy,
    Watch,
    counts_nothing,
    is_zero_of_nothing,
    leaves_of,
    unread,
    zero_gradients,
    zeroed,
)
from trine.optim.runtime.plain_tensors import local
from trine.record.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Guard", "Update"]

#: What a backward is to run in.
Guard = Callable[[], AbstractContextManager[None]]

logger = logging.getLogger("trine")


class Update:
    """Sums weights of micro-batches, and applies what they added up to.

    ``nonfinite`` says what becomes of a step whose gradients are not finite, or in which no rank counted a token:
    ``raise`` a TrainingError on all ranks, ``skip`` it, or ``allow`` the gradients.
    """

    def __init__(
        self, assembly: Assembly, clip_norm: float | None, scheduler: Any, nonfinite: Policy = "raise"
    ) -> None:
        self._assembly = assembly
        self._clip_norm = clip_norm
        self.scheduler = scheduler
        self._policy = nonfinite
        self._agreement = Agreement(assembly.facts.device, assembly.facts.ranks)
        self._watch = Watch(assembly, nonfinite)
        self._units: dict[bool, float] = {}  # whether tokens were counted → what weights are counted in
        self._weight: float | torch.Tensor = 0.0  # of the gradients summed so far, in units
        self._summed: float | torch.Tensor = 0.0  # weight × loss, of what counted
        self._counted = False
        self._told: tuple[bool, torch.dtype] | None = (
            None  # by the last stage: tokens counted, dtype of losses
        )
        self._loss: torch.Tensor | None = None
        self._dtype = torch.float32  # of the losses
        #: Optimizer steps that were tried since the start.
        self.steps = 0
        #: Those that were left out because of their gradients.
        self.skipped = 0
        if assembly.scaler is None and nonfinite == "skip":
            assembly.metrics["skipped_steps"] = lambda: float(self.skipped)

    @property
    def loss(self) -> torch.Tensor:
        """Mean loss of the last step on this rank, detached; a rank that counted no token has the mean of all ranks."""
        assert self._loss is not None, "no step has ended"
        return self._loss

    def backward(self, loss: torch.Tensor, weight: Any, counted: bool) -> None:
        """Add ``weight`` × the gradient of ``loss``. ``counted``: weights are tokens, and ranks may differ in them."""
        weight = self._in_units(loss, weight, counted)
        if counted and counts_nothing(weight):
            self._backward_of_nothing(loss)
            return
        scaled, nothing = self._scaled(loss, weight, counted)
        require_gradient(loss)
        with self.contexts():
            if nothing is None:
                self._run(scaled)
                return
            with zero_gradients(self._assembly.model, loss, nothing):
                self._run(scaled)

    def weigh(self, loss: torch.Tensor, weight: Any, counted: bool) -> tuple[torch.Tensor, Guard | None]:
        """Count ``loss`` in, and return what a pipeline's schedule is to call backward on, a tensor without dimensions.

        Beside it what that backward is to run in, where the loss may be the mean of nothing.
        """
        weight = self._in_units(loss, weight, counted)
        without = counted and counts_nothing(weight)
        if without:  # the mean of nothing is NaN, which nought would not make nought
            loss = loss.nan_to_num(0.0)
        scaled, nothing = self._scaled(loss, weight, counted)
        if not without and nothing is None:
            return scaled, None
        return scaled, partial(zeroed, tuple(leaves_of(scaled)), nothing)

    def share(self, source: int, group: distributed.ProcessGroup) -> None:
        """Give loss and weights of rank ``source``, which alone computed them, to all ranks of a pipeline.

        Others add nought to them, where a broadcast would let some ranks go on before all have come: what is measured up
        to here would end too early for them. The device is waited for in the first step alone, to learn whether tokens are
        counted.
        """
        vector = torch.zeros(4, dtype=self._agreement.dtype, device=self._assembly.facts.device)
        own = distributed.get_rank() == source
        if own:
            for place, value in enumerate((self._summed, self._weight, self._counted, self._dtype.itemsize)):
                vector[place] = value
        distributed.all_reduce(vector, group=group)
        if self._told is None:
            counted, size = vector[2:].tolist()
            self._told = (bool(counted), torch.float64 if size == 8 else torch.float32)
        counted, dtype = self._told
        # Elsewhere a device would have to be waited for, to learn what the last stage knows and says.
        changed = self._counted if own else vector.device.type == "cpu" and bool(vector[2])
        if (own or vector.device.type == "cpu") and changed != counted:
            raise UsageError(
                "the losses of one step came with token counts, and those of another without: under a pipeline give counts in "
                "every step or in none"
            )
        if own:
            return
        self._counted, self._dtype = counted, dtype
        self._summed = vector[0].to(self._dtype)
        self._weight = float(vector[1]) if vector.device.type == "cpu" else vector[1]

    def step(self) -> bool:
        """Normalise, unscale, clip, step; false where the update was skipped. Gradients are gone afterwards.

        Raises ``TrainingError`` on all ranks at once for gradients that are not finite, unless they are to be skipped
        or allowed; parameters and state are then as before the step.
        """

        def gather() -> bool:
            for collect in self._assembly.collect:
                collect()
            return self._swap()

        return self._complete(gather)

    def flush(self) -> bool:
        """Apply the update that is still to come where updates are one step late; false where there is none."""
        weight = None if self._assembly.deferred is None else self._assembly.deferred.flush()
        return weight is not None and self._complete(lambda: self._in_place(weight))

    def discard(self) -> None:
        """Forget the gradients since the last optimizer step: they are as if there had been no backward."""
        self._assembly.optimizer.zero_grad(set_to_none=True)
        for (
            parameter
        ) in self._assembly.model.parameters():  # where the optimizer holds others, such as masters
            parameter.grad = None
        for forget in self._assembly.discard:
            forget()
        self._forget()

    def _complete(self, gather: Callable[[], bool]) -> bool:
        """The step, from what puts its gradients in place (false: there are none yet) to its end."""
        assembly = self._assembly
        try:
            stepped = gather() and self._normalise()
            if stepped:
                exchanged = [exchange() for exchange in assembly.exchange]  # every one must run
                stepped = all(exchanged) and self._apply()
            for after in assembly.after_update:
                after(stepped)
        finally:
            assembly.optimizer.zero_grad(set_to_none=True)
            self._forget()
            self.steps += 1
        if stepped and self.scheduler is not None:
            self._schedule()
        return stepped

    def _schedule(self) -> None:
        try:
            self.scheduler.step()
        except Exception as error:  # the program's own code, as OneCycleLR's after its last step
            raise TrainingError(
                f"optimizer step {self.steps - 1} was taken, and then {type(self.scheduler).__name__} failed: {error}"
            ) from error

    def _forget(self) -> None:
        self._weight = self._summed = 0.0
        self._counted = False
        self._watch.forget()

    def _swap(self) -> bool:
        """Where updates are one step late: this step's sums leave, and those of the step before take their place."""
        deferred = self._assembly.deferred
        if deferred is None:
            return True
        self._loss = self._mean_loss(None)
        weight = deferred.exchange(self._weight)
        return weight is not None and self._in_place(weight)

    def _in_place(self, weight: Any) -> bool:
        """What lies in the gradients is the mean over ranks of sums of this mean weight; the loss stays this step's."""
        self._weight = weight
        self._summed = self.loss * weight
        self._counted = False
        return True

    def _apply(self) -> bool:
        assembly = self._assembly
        if assembly.scaler is not None:
            finite = assembly.scaler.unscale(self._gradients())
            assembly.scaler.update(finite)
            if not finite:
                self.skipped += 1
                return False
        for inspect in assembly.inspect:
            inspect()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        assembly.optimizer.step()
        return True

    def _clip(self, most: float) -> None:
        assembly = self._assembly
        parameters = [p for group in assembly.optimizer.param_groups for p in group["params"]]
        layout = assembly.facts.layout
        if assembly.config.zero.stage == 0 and not layout.is_hybrid:
            torch.nn.utils.clip_grad_norm_(parameters, most)
            return
        from trine.optim.runtime.local_steps import clip_gradients
        from trine.optim.runtime.meshes import group_of

        elsewhere = {id(assembly.parameters[name]) for name in assembly.duplicates}
        stages = group_of(assembly.facts, "pipeline") if layout.pipeline > 1 else None
        clip_gradients(parameters, most, stages, elsewhere)

    def _gradients(self) -> list[torch.Tensor]:
        groups = self._assembly.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _in_units(self, loss: torch.Tensor, weight: Any, counted: bool) -> Any:
        """The weight in units of a step's; ranks weigh alike, by tokens or by samples."""
        if counted != self._counted and (self._counted or isinstance(self._summed, torch.Tensor)):
            raise UsageError(
                "a loss came with a token count, and another of the same step without: their means cannot be weighed against "
                "each other, so give counts for all or for none"
            )
        self._counted = counted
        self._dtype = loss.dtype
        # Of samples each rank divides by its own sum.
        return weight / self._unit_of(weight, agree=counted)

    def _scaled(
        self, loss: torch.Tensor, weight: Any, counted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Count the loss in; what to call backward on, and whether it weighs nothing where only the device knows."""
        self._watch.saw(loss)
        nothing: torch.Tensor | None = None
        if counted and unread(weight):  # zero must weigh nothing, also times the NaN of 0/0
            nothing = weight == 0
            sound = is_zero_of_nothing(loss)
            loss = torch.where(nothing, torch.zeros_like(loss), loss)
            nothing = None if sound else nothing
        scaler = self._assembly.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        part = loss.detach()
        if not (isinstance(weight, float) and weight == 1.0):
            scaled, part = scaled * weight, part * weight
        self._weight = self._weight + weight
        self._summed = self._summed + part if isinstance(self._summed, torch.Tensor) else part
        return scaled, nothing

    def contexts(self) -> AbstractContextManager[Any]:
        """What every backward runs in."""
        contexts = self._assembly.backward_contexts
        if not contexts:
            return nullcontext()
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context())
        return stack

    def _backward_of_nothing(self, loss: torch.Tensor) -> None:
        """No token was valid: nothing is added, but other ranks wait for this one's part in their exchange."""
        if self._assembly.facts.ranks > 1:
            require_gradient(loss)
            with self.contexts(), zero_gradients(self._assembly.model, loss):
                self._run(loss)

    def _run(self, scaled: torch.Tensor) -> None:
        scaled.backward()  # type: ignore[no-untyped-call]

    def _unit_of(self, weight: Any, agree: bool) -> float:
        """A power of two near a whole step's weight, set once: summed gradients stay in the range of a mean's.

        In fp16 that decides whether they overflow. Ranks that weigh by tokens must count in the same unit.
        """
        if agree not in self._units:
            facts = self._assembly.facts
            first = torch.as_tensor(float(weight), dtype=torch.float64, device=facts.device)
            if agree and facts.ranks > 1:
                group = None if self._assembly.pipeline is None else self._of_losses()
                if self._assembly.pipeline is None or group is not None:
                    distributed.all_reduce(first, op=distributed.ReduceOp.MAX, group=group)
            step = max(float(first), 1.0) * self._assembly.accumulation
            self._units[agree] = 2.0 ** round(math.log2(step))
        return self._units[agree]

    def _of_losses(self) -> distributed.ProcessGroup | None:
        """The ranks that compute losses beside this one: the same stage of the other pipelines."""
        from trine.optim.runtime.meshes import group_of

        return group_of(self._assembly.facts, *(name for name in DIMENSIONS if name != "pipeline"))

    # --- what ranks agree on -------------------------------------------------------------------

    def _normalise(self) -> bool:
        """Divide the summed gradients by the summed weights, over all ranks when tokens were counted.

        False for a step that is to be skipped. Replicas were averaged: (1/W) Σ weight·gradient, which times
        W / Σ weight is the mean over all tokens.
        """
        self._watch.read_deferred()
        ranks = self._assembly.facts.ranks
        together = self._counted and ranks > 1
        faults = self._watch.look()
        if faults is not None and self._watch.sharded:
            self._agreement.put("non_finite", faults)
        if together:
            self._agreement.put("loss", self._summed)
            self._agreement.put("weight", self._weight)
        totals = self._agreement.settle()
        total: Any = totals["weight"] / ranks if together else self._weight
        self._loss = self._mean_loss(totals if together else None)
        if unread(total) and not self._watch.waits:
            self._watch.defer(self.steps, totals.get("non_finite"), total == 0)
            self._multiply(torch.where(total == 0, torch.zeros_like(total), 1.0 / total))
            return True
        total = float(total)
        if total == 0.0:
            return self._nothing_counted()
        if not self._watch.waits:
            self._watch.defer(self.steps, totals.get("non_finite"))
        elif faults is not None and float(totals.get("non_finite", faults)):
            return self._found()
        if total != 1.0:
            self._multiply(1.0 / total)
        return True

    def _multiply(self, factor: float | torch.Tensor) -> None:
        gradients = [local(gradient) for gradient in self._gradients()]
        if not gradients:  # all of this stage is frozen
            return
        if not isinstance(factor, torch.Tensor):
            torch._foreach_mul_(gradients, factor)
            return
        for dtype in {gradient.dtype for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._foreach_mul_(same, factor.to(dtype))

    def _mean_loss(self, totals: dict[str, torch.Tensor] | None) -> torch.Tensor:
        own, weight = self._summed, self._weight
        if not isinstance(own, torch.Tensor):  # no micro-batch of this rank counted anything
            device = self._assembly.facts.device
            if totals is None:
                return torch.full((), math.nan, dtype=self._dtype, device=device)
            return (totals["loss"] / totals["weight"]).to(self._dtype)
        if unread(weight) and totals is not None:
            overall = (totals["loss"] / totals["weight"]).to(own.dtype)
            return torch.where(torch.as_tensor(weight == 0), overall, own / weight)
        return own if isinstance(weight, float) and weight == 1.0 else own / weight

    def _nothing_counted(self) -> bool:
        if not self._counted and not isinstance(self._summed, torch.Tensor):
            raise UsageError("engine.step() has nothing to apply: call engine.backward(loss) before it")
        if self._policy == "raise":
            whose = "the batch holds" if self._assembly.facts.ranks == 1 else "no rank's batch holds"
            negated = "no valid token" if self._assembly.facts.ranks == 1 else "a valid token"
            raise TrainingError(
                f"optimizer step {self.steps}: {whose} {negated}, so its loss has no mean: leave such batches out, or "
                'have them skipped with nonfinite="skip" in trine.optimize'
            )
        self.skipped += 1
        logger.warning("optimizer step %d was skipped: no token was valid", self.steps)
        return False

    def _found(self) -> bool:
        if self._policy == "raise":
            raise self._watch.error(self.steps)
        self.skipped += 1
        said = self._watch.describe()  # every rank must take part
        if self._assembly.facts.rank == 0:
            logger.warning("optimizer step %d was skipped: %s", self.steps, said)
        return False
