"""Training steps under a ledger: the same for a run that is measured and for one that is predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from trine.optim.runtime.memory_ledger import Ledger

if TYPE_CHECKING:
    from trine.optim.config import Config

__all__ = ["STEPS", "counted", "without_reading_counts"]

#: The first makes the optimizer's state and DDP's final buckets, the second runs with both.
STEPS = 2


def counted(
    ledger: Ledger,
    made: tuple[torch.nn.Module, torch.optim.Optimizer],
    config: Config,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    clip_norm: float | None = None,
    around: AbstractContextManager[Any] | None = None,
) -> dict[str, dict[str, int]]:
    """Bytes by kind: at the steps' ``peak``, the ``most`` of each kind, ``resident`` between steps, and ``start``, the
    peak while the configuration is applied.

    Model and optimizer are adopted as :func:`trine.optimize` does; ``made`` is emptied of them by the caller.
    """
    from trine.optim.engine import optimize

    model, optimizer = made
    ledger.tag_model(model)
    ledger.tag_optimizer(optimizer)
    ledger.tag(_tensors_of(batch), "batch")
    with around or nullcontext(), _collecting_by_hand(), ledger:
        engine = optimize(
            model, optimizer, config, loss_fn=without_reading_counts(loss_fn), clip_norm=clip_norm
        )
        ledger.tag_model(engine.model)
        ledger.tag_optimizer(engine.optimizer)
        begun = ledger.mark()
        for _ in range(STEPS):
            gc.collect()
            engine.train_step(batch)
            ledger.tag_model(engine.model)
    engine.close()
    return {
        "peak": ledger.peak(begun),
        "most": ledger.most_of(begun),
        "resident": ledger.at_end(),
        "start": ledger.peak(0, begun),
    }


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """Python's collector frees cycles of tensors when it pleases; here at each step's begin, so that counts repeat."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def without_reading_counts(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss function whose token count is the number 1: a count that has no value cannot be divided by."""

    def loss_of(model: Any, batch: Any) -> Any:
        result = loss_fn(model, batch)
        return (result[0], 1.0) if isinstance(result, tuple) and len(result) == 2 else result

    return loss_of


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    from trine.optim.batches import with_tensors

    found: list[torch.Tensor] = []
    with_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
