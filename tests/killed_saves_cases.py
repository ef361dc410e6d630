"""``benchmarks/killed_saves.py``, importable by tests."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import killed_saves

__all__ = ["BENCHMARKS", "killed_saves"]
