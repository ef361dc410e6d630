"""One optimizer step: from summed gradients to new parameters, or to a step that was skipped and says so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Update"]


class Update:
    """Sums weights of micro-batches, and applies what they added up to."""

    def __init__(self, assembly: Assembly, clip_norm: float | None, scheduler: Any) -> None:
        self._assembly = assembly
        self._clip_norm = clip_norm
        self._scheduler = scheduler
        self._unit: float | None = None  # what weights are counted in; the same on every rank
        self._weight: float | torch.Tensor = 0.0  # of the gradients summed so far, in units
        self._counted = False

    def backward(self, loss: torch.Tensor, weight: Any, counted: bool) -> None:
        """Add ``weight`` × the gradient of ``loss``. ``counted``: weights are tokens, and ranks may differ in them."""
        self._counted = self._counted or counted
        if counted:
            weight = weight / self._unit_of(weight)
        scaler = self._assembly.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        if isinstance(weight, float) and weight == 1.0:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            (scaled * weight).backward()
        self._weight = self._weight + weight

    def step(self) -> bool:
        """Normalise, unscale, clip, step; false where the update was skipped. Gradients are gone afterwards."""
        assembly = self._assembly
        for collect in assembly.collect:
            collect()
        self._normalise()
        ready = [exchange() for exchange in assembly.exchange]  # every one must run
        stepped = all(ready)
        if stepped:
            stepped = self._apply()
        for after in assembly.after_update:
            after(stepped)
        assembly.optimizer.zero_grad(set_to_none=True)
        if stepped and self._scheduler is not None:
            self._scheduler.step()
        self._weight = 0.0
        self._counted = False
        return stepped

    def _apply(self) -> bool:
        assembly = self._assembly
        if assembly.scaler is not None:
            finite = assembly.scaler.unscale(self._gradients())
            assembly.scaler.update(finite)
            if not finite:
                return False
        for inspect in assembly.inspect:
            inspect()
        if self._clip_norm is not None:
            parameters = [p for group in assembly.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        assembly.optimizer.step()
        return True

    def _gradients(self) -> list[torch.Tensor]:
        groups = self._assembly.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _unit_of(self, weight: Any) -> float:
        """A power of two near the first count, agreed once: gradients stay in the range they have by themselves."""
        if self._unit is None:
            first = torch.as_tensor(float(weight), dtype=torch.float64, device=self._assembly.facts.device)
            if self._assembly.facts.ranks > 1:
                distributed.all_reduce(first, op=distributed.ReduceOp.MAX)
            self._unit = 2.0 ** round(math.log2(max(float(first), 1.0)))
        return self._unit

    def _normalise(self) -> None:
        """Divide the summed gradients by the summed weights, over all ranks when tokens were counted."""
        total: Any = self._weight
        facts = self._assembly.facts
        if self._counted and facts.ranks > 1:
            # Replicas were averaged: (1/W) Σ weight·gradient. Times W / Σ weight gives the mean over all tokens.
            summed = torch.as_tensor(float(total), dtype=torch.float64, device=facts.device)
            distributed.all_reduce(summed)
            total = float(summed) / facts.ranks
        total = float(total)
        if total == 0.0:
            raise UsageError(
                "no rank counted a token in this step, so its loss has no mean: skip such batches"
            )
        if total != 1.0:
            torch._foreach_mul_(self._gradients(), 1.0 / total)
