"""``benchmarks/delayed.py``, importable by ranks that stay alive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import delayed

__all__ = ["held_out_losses", "outcome"]


def held_out_losses(rank: int, seed: int, steps: int) -> tuple[float, float, float]:
    return delayed.held_out_losses(rank, seed, steps)


def outcome(pool: Any, seed: int, steps: int = 120) -> tuple[float, float, float]:
    """Held-out losses of one seed: plain, late, untrained."""
    first, second = pool.run("delayed_ranks:held_out_losses", seed, steps)
    assert first == second, "the replicas differ"
    found: tuple[float, float, float] = first
    return found
