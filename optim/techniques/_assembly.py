"""What techniques work on: the live model and optimizer, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trine.optim.config import Config

__all__ = ["Assembly", "Effect", "Facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Where the model runs, taken from the model and the process group before anything changes."""

    device: torch.device
    ranks: int
    rank: int
    backend: str | None  # of the default process group; None without one
    model: torch.nn.Module  # as it was given
    optimizer: torch.optim.Optimizer

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda``, ..."""
        return self.device.type


@dataclass(frozen=True, slots=True)
class Effect:
    """What a technique changed, in words that a log line and a report can carry."""

    key: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.after}" + (f" ({self.note})" if self.note else "")


@dataclass(slots=True)
class Assembly:
    """The run under construction. Techniques replace or extend its parts in their order."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    facts: Facts
    #: Entered around every forward, the loss included.
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Applied to the loader by ``engine.steps``, in order.
    loaders: list[Callable[[Iterable[Any]], Iterable[Any]]] = field(default_factory=list)
    #: Micro-batches of a step.
    accumulation: int = 1
    #: Set while gradients must not be synchronised; takes whether to synchronise.
    synchronise: Callable[[bool], None] | None = None
    effects: list[Effect] = field(default_factory=list)
