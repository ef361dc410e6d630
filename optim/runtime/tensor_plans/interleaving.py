"""Matrices that lie side by side in one, cut so that every rank has its part of each.

Queries, keys and values in one matrix of (3 × hidden) rows cannot be cut in a row: the first rank would have all queries. Its
rows are put into the order [q₀ k₀ v₀ q₁ k₁ v₁ …], of which each rank's are then one run, an ordinary ``Shard``. PyTorch's
``_StridedShard`` describes the same parts without moving rows, but operators and FSDP2 know it for FSDP2's own use alone.
Whoever needs rows in their own order again (checkpoints, ``trine verify``) finds it in ``Assembly.reordered``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trine.optim.techniques._assembly import Reordered

__all__ = ["Interleaved", "in_given_order"]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """How rows of one parameter are put into another order, along ``dim``.

    ``sections``: the sizes of what lies side by side, in the model's own order; ``shards`` divides each.
    """

    dim: int
    sections: tuple[int, ...]
    shards: int

    def permuted(self, value: torch.Tensor) -> torch.Tensor:
        """From the model's order to that of the ranks: (…, sum of sections, …) to the same."""
        parts = [
            part.chunk(self.shards, self.dim) for part in torch.split(value, list(self.sections), self.dim)
        ]
        return torch.cat([part[rank] for rank in range(self.shards) for part in parts], self.dim)

    @property
    def reordered(self) -> Reordered:
        """The same as runs of rows: where each begins here, where in the model's order, and how many they are."""
        found = []
        here = 0
        for rank in range(self.shards):
            before = 0
            for size in self.sections:
                count = size // self.shards
                found.append((here, before + rank * count, count))
                here += count
                before += size
        return Reordered(self.dim, tuple(found))


def in_given_order(value: torch.Tensor, order: Reordered | None) -> torch.Tensor:
    """A whole tensor as the model that was given has it; itself where it never had another order."""
    if order is None:
        return value
    restored = torch.empty_like(value)
    for here, there, count in order.blocks:
        restored.narrow(order.dimension, there, count).copy_(value.narrow(order.dimension, here, count))
    return restored
