"""The small numbers of one step that all ranks must know, summed in ONE all-reduce.

Token counts, the count of non-finite gradients, squared norms of shards, the loss: each alone would pay a latency of
its own, and on a device a wait for it. They are collected by name and travel together as one small vector.

    agreement.put("tokens", count)
    agreement.put("non_finite", flag)
    totals = agreement.settle()     # one all-reduce, or none where nothing was put or the process is alone
    totals["tokens"]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

__all__ = ["Agreement"]


class Agreement:
    """Sums of small numbers over all ranks. Every rank must put the same names, in any order."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._ranks = ranks
        # Counts beyond 2^24 are not whole in float32; Apple's devices have nothing wider.
        #: Of the sums.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._pending: dict[str, float | torch.Tensor] = {}
        #: All-reduces that were made since the start.
        self.calls = 0

    def put(self, name: str, value: float | torch.Tensor) -> None:
        """A number, or a tensor of one element: on the model's device it is not read, so nothing waits for it.

        Putting a name twice before :meth:`settle` adds up.
        """
        before = self._pending.get(name)
        self._pending[name] = value if before is None else before + value

    def settle(self) -> dict[str, torch.Tensor]:
        """Name → sum over all ranks, float64 tensors without dimensions on the model's device; forgets what was put."""
        if not self._pending:
            return {}
        names = sorted(self._pending)  # the same place in the vector on every rank
        vector = self._vector([self._pending[name] for name in names])
        self._pending = {}
        if self._ranks > 1:
            distributed.all_reduce(vector)
            self.calls += 1
        return dict(zip(names, vector.unbind(), strict=True))

    def _vector(self, values: list[Any]) -> torch.Tensor:
        """(names,): plain numbers go to the device in one copy, tensors that are there already stay."""
        vector = torch.tensor(
            [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values],
            dtype=self.dtype,
            device=self._device,
        )
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                vector[place] = value.detach().to(self._device, self.dtype).reshape(())
        return vector
