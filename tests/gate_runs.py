"""Runs to compare, made of real statistics: scattered medians, noisy steps, parts that add up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trine.analyzers.baseline import write_baseline
from trine.analyzers.run_facts import Part, RunFacts

ENVIRONMENT = {
    "device": "NVIDIA A100-SXM4-80GB",
    "devices": 8,
    "world_size": 8,
    "torch": "2.13.0",
    "nccl": "2.27.3",
}


def run_facts(name: str, step_ms: float, steps: int = 60, seed: int = 0, **changes: Any) -> RunFacts:
    """A run whose steps scatter by 2 % around ``step_ms``; backward takes what forward leaves."""
    noise = np.exp(0.02 * np.random.default_rng(seed).standard_normal(steps))
    step_ns = tuple(int(ns) for ns in step_ms * 1e6 * noise)
    median = float(np.median(step_ns)) if steps else 0.0
    values: dict[str, Any] = {
        "source": name,
        "step_ns": step_ns,
        "warm_up": 2,
        "environment": ENVIRONMENT,
        "configuration": {"model": {"parameters": 1000}, "precision": {"autocast_dtype": "fp32"}},
        "configuration_hash": "00ff",
        "metrics": {"step_time_ns": median, "peak_bytes": 1e9, "tokens_per_s": 1e12 / max(median, 1)},
        "missing": {"mfu": "the run chose no convention"},
        "parts": (
            Part("phase", "forward", 30e6),
            Part("phase", "backward", median - 30e6),
            Part("kernel", "gemm", 20e6, calls=10.0),
        ),
    }
    return RunFacts(**{**values, **changes})


def side(name: str, step_ms: float, runs: int = 3, scatter: float = 0.005, **changes: Any) -> list[RunFacts]:
    """Several runs around ``step_ms``, evenly apart by ``scatter``."""
    middle = (runs - 1) / 2
    return [
        run_facts(f"{name}-{i}", step_ms * (1 + scatter * (i - middle)), seed=hash_of(name) + i, **changes)
        for i in range(runs)
    ]


def hash_of(name: str) -> int:
    """A seed that is the same in every process, unlike ``hash``."""
    return sum(name.encode())


def saved(folder: Path, name: str, runs: Sequence[RunFacts]) -> str:
    """The runs as a baseline file, which every command takes for runs."""
    path = folder / f"{name}.json"
    write_baseline(path, runs)
    return str(path)
