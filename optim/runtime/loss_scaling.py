"""Loss scaling: gradients that fp16 would round to zero are kept in its range (Micikevicius et al. 2018, section 3.2).

The loss is multiplied before backward and the gradients divided after it. The dynamic scale doubles after a number of
sound steps and halves after one that overflowed, which is left out; numbers as in ``torch.amp.GradScaler``.

That class is not used itself: it takes the gradients of one optimizer, refuses those in fp16, and leaves to the caller
whether ranks that hold different shards agree. What it computes with is the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import distributed

from trine.optim.runtime.plain_tensors import local
from trine.record.errors import TrainingError

__all__ = ["BACKOFF", "FLOOR", "GROWTH", "GROWTH_INTERVAL", "INITIAL", "STORM", "LossScaler"]

#: PyTorch's defaults (torch/amp/grad_scaler.py).
INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: A dynamic scale that must fall below one says that gradients overflow without any scaling.
FLOOR = 1.0
#: So many steps left out one after another are no search for a scale any more: from 2^24 the floor is 24 steps away.
STORM = 25


class LossScaler:
    """Scales losses and unscales gradients. ``scale``: a fixed one, or ``"auto"`` for a dynamic one.

    ``agree_on``: where ranks hold parts of the model, as stages of a pipeline do, the device that they exchange numbers on.
    """

    def __init__(
        self, scale: float | Literal["auto"], ranks: int = 1, agree_on: torch.device | None = None
    ) -> None:
        self._dynamic = scale == "auto"
        self._ranks = ranks
        self._agree_on = agree_on
        self._scale = INITIAL if scale == "auto" else float(scale)
        self._sound = 0  # steps since the scale last changed
        self._in_a_row = 0  # steps left out since the last sound one
        self._skipped = 0

    @property
    def current(self) -> float:
        """What the next loss is multiplied by."""
        return self._scale

    @property
    def skipped(self) -> int:
        """Steps that were left out since the run began."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on. A loss in fp16 goes to fp32 first: 65504 is fp16's largest number."""
        return (loss.float() if loss.dtype == torch.float16 else loss) * self._scale

    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide in place; whether all are finite. Ranks that hold shards or stages agree by one all-reduce.

        Replicas hold the same gradients already. The answer is read on the host, as ``GradScaler.step`` does. A stage
        whose parameters are all frozen has no gradients, and takes part nevertheless.
        """
        if not gradients and self._agree_on is None:
            return True
        device = gradients[0].device if gradients else self._agree_on
        found = torch.zeros((), dtype=torch.float32, device=device)
        inverse = torch.full((), 1.0 / self._scale, dtype=torch.float32, device=device)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            values = local(gradient)
            values = values._values() if values.is_sparse else values
            by_dtype.setdefault(values.dtype, []).append(values)
        for same in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
        if self._agree_on is not None:
            found = found.to(self._agree_on)  # gradients may lie in the host's memory
            distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        elif self._ranks > 1 and any(hasattr(gradient, "to_local") for gradient in gradients):
            distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        return not bool(found)

    def update(self, was_finite: bool) -> None:
        """Grow or back off. Raises ``TrainingError`` where scaling cannot help any more, on all ranks alike."""
        if was_finite:
            self._in_a_row = 0
            self._sound += 1
            if self._dynamic and self._sound == GROWTH_INTERVAL:
                self._sound = 0
                if math.isfinite(self._scale * GROWTH):
                    self._scale *= GROWTH
            return
        self._skipped += 1
        self._in_a_row += 1
        self._sound = 0
        self._stop_a_storm()
        if self._dynamic:
            self._scale = max(FLOOR, self._scale * BACKOFF)

    def _stop_a_storm(self) -> None:
        if self._dynamic and self._scale <= FLOOR:
            raise TrainingError(
                f"precision.loss_scale is down to {self._scale:g} and gradients still overflow in fp16 "
                f"({self._in_a_row} steps left out in a row): the model does not fit fp16's range, or it diverged. Use "
                'precision.dtype = "bf16", or a lower learning rate from an earlier checkpoint'
            )
        if self._in_a_row >= STORM:
            way = "" if self._dynamic else 'precision.loss_scale = "auto" or a smaller number, '
            raise TrainingError(
                f"precision.loss_scale = {self._scale:g}: gradients overflowed in {self._in_a_row} steps in a row, and "
                f'none was applied: use {way}precision.dtype = "bf16", or a lower learning rate from an earlier checkpoint'
            )

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history."""
        return {
            "scale": self._scale,
            "sound_steps": self._sound,
            "skipped_in_a_row": self._in_a_row,
            "skipped_steps": self._skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back; a fixed scale stays what the configuration says."""
        if self._dynamic:
            self._scale = float(state["scale"])
        self._sound = int(state["sound_steps"])
        self._in_a_row = int(state["skipped_in_a_row"])
        self._skipped = int(state["skipped_steps"])

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take it back from other ranks: it was the same on all."""
        self.load_state_dict(states[0])
