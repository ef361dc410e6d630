"""One optimizer step by DeepSpeed: weights as everywhere, the division by their sum inside DeepSpeed's own step.

DeepSpeed averages over ranks what backward gives, keeps it in partitions and divides by its loss scale when it steps. The
sum of weights is known only then, so it goes into that scale for the length of the step: gradients become the mean over all
tokens, and clipping sees them so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trine.optim.runtime.update import Update

__all__ = ["DeepSpeedUpdate"]

logger = logging.getLogger("trine")


class DeepSpeedUpdate(Update):
    """Sums weights of micro-batches, and has DeepSpeed apply what they added up to."""

    @property
    def _deepspeed(self) -> Any:
        return self._assembly.model

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch has been through backward since the last step."""
        return not isinstance(self._summed, torch.Tensor)

    def drop(self) -> bool:
        """Forget the gradients since the last step; false where ZeRO has them already."""
        empty = self.is_empty
        self._forget()
        if empty:
            return True
        if self._assembly.config.zero.stage:
            return False
        self._deepspeed.zero_grad()
        return True

    def discard(self) -> None:
        """As :meth:`drop`; the engine asks that for its answer."""
        self.drop()

    def flush(self) -> bool:
        """Nothing is held back."""
        return False

    def step(self) -> bool:
        """Have DeepSpeed step; false where the update was skipped.

        Raises ``TrainingError`` on all ranks for gradients that are not finite, unless they are to be skipped or allowed;
        DeepSpeed has dropped them then, and parameters are as before.
        """
        try:
            stepped = self._normalise() and self._apply()
            for after in self._assembly.after_update:
                with self._shown(gradients=False):
                    after(stepped)
        finally:
            self._forget()
            self.steps += 1
        if stepped and self.scheduler is not None:
            self._schedule()
        return stepped

    def _run(self, scaled: torch.Tensor) -> None:
        self._deepspeed.backward(scaled, scale_wrt_gas=False)

    def _normalise(self) -> bool:
        """Agree on the sum of weights; false where nothing was counted."""
        ranks = self._assembly.facts.ranks
        together = self._counted and ranks > 1
        if together:
            self._agreement.put("loss", self._summed)
            self._agreement.put("weight", self._weight)
        totals = self._agreement.settle()
        self._loss = self._mean_loss(totals if together else None)
        total = totals["weight"] / ranks if together else self._weight
        self._total = float(total)  # DeepSpeed waits for the norm in every step anyway
        return self._nothing_counted() if self._total == 0.0 else True

    def _apply(self) -> bool:
        engine = self._deepspeed
        with self._divided(self._total) as scale:
            if self._assembly.inspect:
                with self._shown(gradients=True, scale=scale):
                    for inspect in self._assembly.inspect:
                        inspect()
            if self._plain and self._has_fault():
                engine.zero_grad()
                return self._found()
            engine.step()
        if engine.was_step_applied():
            return True
        if self._assembly.config.precision.dtype == "fp16":  # the loss scale has come down
            self.skipped += 1
            return False
        if self._policy == "allow":
            self.skipped += 1
            return False
        return self._found()

    @property
    def _plain(self) -> bool:
        """Whether the program's optimizer steps, over the model's own parameters and gradients."""
        return isinstance(self._deepspeed.optimizer, torch.optim.Optimizer)

    def _has_fault(self) -> bool:
        faults = self._watch.look()  # replicas hold the same gradients, so all ranks say the same
        return faults is not None and bool(float(faults))

    @contextmanager
    def _divided(self, total: float) -> Iterator[float]:
        """While open, DeepSpeed's step divides gradients by ``total`` as well; gives what it divides by in all."""
        optimizer = self._deepspeed.optimizer
        if self._plain:
            if total != 1.0:
                self._multiply(1.0 / total)
            yield 1.0
            return
        keeper = optimizer.loss_scaler  # of ZeRO's optimizers, which all low precision has
        own = float(keeper.cur_scale)
        if total == 1.0:
            yield own
            return
        keeper.cur_scale = own * total
        try:
            yield own * total
        finally:  # a dynamic scale may have been halved or doubled meanwhile
            changed = float(keeper.cur_scale) / (own * total)
            keeper.cur_scale = own * 2.0 ** round(math.log2(changed))

    @contextmanager
    def _shown(self, gradients: bool, scale: float = 1.0) -> Iterator[None]:
        """While open, ``assembly.parameters`` are whole parameters with the gradients that the update will use.

        Only for who looks, as ``trine verify``: everything is gathered on every rank.
        """
        assembly = self._assembly
        if self._plain or not (assembly.inspect or assembly.after_update):
            yield
            return
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        own = assembly.parameters
        shown: dict[str, nn.Parameter] = {}
        for name, parameter in own.items():
            whole = safe_get_full_fp32_param(parameter)
            stand_in = nn.Parameter((parameter if whole is None else whole).detach().clone())
            if gradients:
                gradient = safe_get_full_grad(parameter)
                stand_in.grad = None if gradient is None else gradient.detach().to(stand_in.dtype) / scale
            shown[name] = stand_in
        assembly.parameters = shown
        try:
            yield
        finally:
            assembly.parameters = own
