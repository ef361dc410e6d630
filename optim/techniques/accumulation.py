"""Gradient accumulation: ``accumulation.steps``.

A batch is cut into micro-batches whose gradients add up, so activations of one alone are alive and
the numbers stay those of the whole batch: each micro-batch weighs as many tokens (or samples) as it
has. A mean of means is far off where counts differ. Ranks synchronise at the last one only.
"""

from __future__ import annotations

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal"]

KEYS = ("accumulation.steps",)
ORDER = 60
QUANTITY = "activation bytes; synchronisations per sample"
NUMERICS = "unchanged but for the order of summation: losses within 1e-6 relative in fp32; batch norms see micro-batches"


def refusal(config: Config) -> str | None:
    """Picking the number by measured memory comes later."""
    if config.accumulation.steps == "auto":
        return (
            'accumulation.steps = "auto" needs the memory planner, which this version lacks: write a number'
        )
    return None


def check(config: Config, facts: Facts) -> None:
    """Nothing more to check: a batch that cannot be cut says so when it comes."""


def apply(assembly: Assembly) -> None:
    """Tell the engine."""
    steps = assembly.config.accumulation.steps
    if steps == 1 or steps == "auto":
        return
    assembly.accumulation = steps
    assembly.effects.append(Effect(KEYS[0], "1", str(steps), "synchronised at the last"))
