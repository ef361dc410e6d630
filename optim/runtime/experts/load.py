"""How equally a router spreads its tokens over experts and ranks."""

from __future__ import annotations

import torch

__all__ = ["Load"]


class Load:
    """Tokens that each expert got since the last :meth:`forget`, layer by layer, from all ranks that share the experts.

    What a step waits for is the rank with most tokens: a balance of 0.5 means that the busiest has twice its part.
    """

    def __init__(self) -> None:
        self._layers: dict[str, torch.Tensor] = {}  # name → (experts,), int64 on the CPU
        self._ranks = 1

    def add(self, layer: str, counts: torch.Tensor, ranks: int) -> None:
        """``counts`` (ranks, experts) of picks by rank of origin, on the CPU; the experts lie over ``ranks`` in order."""
        self._ranks = ranks
        total = counts.sum(0)
        self._layers[layer] = self._layers[layer] + total if layer in self._layers else total

    def forget(self) -> None:
        """Begin anew."""
        self._layers.clear()

    def balance(self) -> float | None:
        """Mean load ÷ largest load over the experts of the least balanced layer, 1 at best; ``None`` without tokens."""
        return self._worst(list(self._layers.values()))

    def rank_balance(self) -> float | None:
        """The same over ranks, each with the load of its experts together."""
        return self._worst([total.view(self._ranks, -1).sum(1) for total in self._layers.values()])

    def busiest(self) -> str | None:
        """In words: the expert with the largest share of its layer's tokens, and that share; ``None`` without tokens."""
        shares = {name: (total / total.sum()).max(0) for name, total in self._layers.items() if total.sum()}
        if not shares:
            return None
        name = max(shares, key=lambda each: float(shares[each].values))
        share, expert = float(shares[name].values), int(shares[name].indices)
        even = 1.0 / len(self._layers[name])
        return f"expert {expert} of {name} gets {share:.0%} of its tokens, {even:.0%} would be even"

    @staticmethod
    def _worst(loads: list[torch.Tensor]) -> float | None:
        found = [float(each.double().mean() / each.max()) for each in loads if int(each.max())]
        return min(found) if found else None
