"""``benchmarks/spawned_ranks.py``, importable by tests and by the ranks that they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from spawned_ranks import Failure, RankFailed, SpawnedRanks, cause, in_one_line, launch, on_ranks

__all__ = ["Failure", "RankFailed", "SpawnedRanks", "cause", "in_one_line", "launch", "on_ranks"]
