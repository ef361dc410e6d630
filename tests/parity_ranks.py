"""The cases of ``benchmarks/parity.py``, importable by spawned ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import parity

__all__ = ["parity", "run_case"]


def run_case(rank: int, name: str, steps: int) -> Any:
    import torch

    case = next(case for case in parity.CASES if case.name == name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.dict(os.environ, case.environment):
            return parity.run_rank(rank, case.ranks, case, steps)
    finally:
        torch.set_num_threads(threads)
