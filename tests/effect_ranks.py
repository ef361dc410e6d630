"""The rows of ``benchmarks/effects.py``, importable by spawned ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import effects

__all__ = ["effects", "measure", "row_of"]


def row_of(name: str) -> effects.Row:
    return next(row for row in effects.ROWS if row.name == name)


def measure(rank: int, name: str, folder: str, rounds: int) -> Any:
    return effects.measure(rank, row_of(name), folder, rounds)
