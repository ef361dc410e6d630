"""A disk that fails on one rank stops all of them, with its words, where the others would wait for it for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trine.optim.runtime.tiers.files import DamagedTier

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["Faults"]


class Faults:
    """Keeps the first failure of this rank until all ranks look. Alone, it raises at once."""

    def __init__(self, facts: Facts, together: bool) -> None:
        self._facts = facts
        self._together = together and facts.ranks > 1
        self._first: DamagedTier | None = None

    def report(self, error: DamagedTier) -> None:
        """Raise it, or keep it until :meth:`agree`."""
        if not self._together:
            raise error
        self._first = self._first or error

    def agree(self) -> None:
        """Raise on all ranks where any has failed. One all-reduce of one number, on ranks with a disk tier alone."""
        if not self._together:
            return
        failed = torch.full(
            (), float(self._first is not None), dtype=torch.float32, device=self._facts.device
        )
        distributed.all_reduce(failed)
        if not float(failed):
            return
        said: list[Any] = [None] * self._facts.ranks
        distributed.all_gather_object(said, None if self._first is None else str(self._first))
        own, self._first = self._first, None
        if own is not None:
            raise own
        rank, words = next((rank, words) for rank, words in enumerate(said) if words is not None)
        raise DamagedTier(f"rank {rank} has lost a part of the run's state: {words}")
