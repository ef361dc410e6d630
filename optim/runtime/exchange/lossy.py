"""What lossy reductions share, and the one that a run uses: warm-up first, then the code, over skipped steps and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trine.optim.runtime.exchange import Bucket, Reduction
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.traffic import Traffic

if TYPE_CHECKING:
    from trine.optim.runtime.exchange.break_even import Estimate
    from trine.optim.techniques._assembly import Scaler

__all__ = ["Compressed", "Lossy"]


class Lossy:
    """A ``Reduction`` that counts its traffic and may keep residuals; subclasses say how a mean is taken."""

    name: str

    def __init__(self, residuals: Residuals | None = None, generator: Any = None) -> None:
        self.traffic = Traffic()
        self.residuals = residuals
        self.generator = generator  # a torch.Generator, where rounding is stochastic

    def mean(self, bucket: Bucket) -> None:
        """Replace the bucket by its mean."""
        raise NotImplementedError

    def sent_bytes(self) -> int:
        """Since the start."""
        return round(self.traffic.sent)

    def settle(self, stepped: bool) -> None:
        """The step was taken, or skipped and its gradients dropped."""
        if self.residuals is not None:
            self.residuals.settle(stepped)

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter, and where the random generator is."""
        state: dict[str, Any] = {}
        if self.residuals is not None:
            state["residuals"] = self.residuals.state_dict()
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back, on the same rank."""
        if self.residuals is not None:
            self.residuals.load_state_dict(state.get("residuals", {}))
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take over what other ranks had; the generator goes on as this rank's."""
        if self.residuals is not None:
            self.residuals.load_resharded([state.get("residuals", {}) for state in states], rank, ranks)


class Compressed:
    """A ``Reduction``: ``plain`` for the first ``warmup_steps`` steps, ``lossy`` from then on.

    Residuals are kept in units of scaled losses and follow when the loss scale changes.
    """

    def __init__(self, lossy: Lossy, plain: Reduction, warmup_steps: int) -> None:
        self.name = lossy.name
        self.lossy = lossy
        self.plain = plain
        self.estimate: Estimate | None = None
        self._warmup_steps = warmup_steps
        self._loss_scale: Callable[[], float] | None = None
        self._scale: float | None = None
        self._step = 0

    def follow(self, scaler: Scaler) -> None:
        """Losses are scaled, and steps that overflow are skipped: residuals change with taken steps only."""

        def loss_scale() -> float:
            return float(scaler.scale(torch.ones((), dtype=torch.float32)))

        self._loss_scale = loss_scale
        if self._scale is None:
            self._scale = loss_scale()
        if self.lossy.residuals is not None:
            self.lossy.residuals.staged = True

    @property
    def is_warm(self) -> bool:
        """Whether this step's gradients are compressed."""
        return self._step >= self._warmup_steps

    def mean(self, bucket: Bucket) -> None:
        """By the reduction whose turn it is."""
        (self.lossy if self.is_warm else self.plain).mean(bucket)

    def after_update(self, stepped: bool) -> None:
        """Once a step, on the training thread, when no reduction is under way."""
        self.lossy.settle(stepped)
        self._step += 1
        if self._loss_scale is None or self.lossy.residuals is None:
            return
        scale = self._loss_scale()
        if self._scale is not None and scale != self._scale:
            self.lossy.residuals.rescale(scale / self._scale)
        self._scale = scale

    def sent_bytes(self) -> int:
        """Since the start, warm-up included."""
        return self.lossy.sent_bytes() + self.plain.sent_bytes()

    def plain_bytes(self) -> int:
        """What the plain exchange of the same gradients would have sent."""
        return round(self.lossy.traffic.plain) + self.plain.sent_bytes()

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, the loss scale that residuals are in, and the code's own state."""
        return {"step": self._step, "scale": self._scale, "lossy": self.lossy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._step = int(state["step"])
        self._scale = state["scale"]
        self.lossy.load_state_dict(state["lossy"])

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take over what other ranks had."""
        self._step = int(states[0]["step"])
        self._scale = states[0]["scale"]
        self.lossy.load_resharded([state["lossy"] for state in states], rank, ranks)
