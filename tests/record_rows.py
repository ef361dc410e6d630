"""Rows of a record, made up: steps of 50 ms and their collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from trine.record.model import PHASES

STEP_NS = 50_000_000
START_NS = 1_700_000_000 * 10**9


def step_rows(first: int, count: int, *, slow: int | None = None, complete: bool = True) -> dict[str, Any]:
    """Rows of ``parts``: steps of 50 ms, ``slow`` ten times that."""
    index = np.arange(first, first + count)
    length = np.where(index == (-1 if slow is None else slow), 10 * STEP_NS, STEP_NS)
    start = START_NS + index * 11 * STEP_NS
    rows: dict[str, Any] = {f"phase_{name}_ns": np.zeros(count, np.int64) for name in PHASES}
    rows["phase_forward_ns"] = length
    return rows | {
        "index": index,
        "start_ns": start,
        "end_ns": start + length,
        "tokens": np.full(count, 256),
        "loss": 1.0 / (1 + index),
        "complete": np.full(count, int(complete)),
    }


def collective_rows(first: int, steps: int, each: int = 3) -> dict[str, Any]:
    """Rows of ``collectives``: ``each`` a step."""
    step = np.repeat(np.arange(first, first + steps), each)
    start = START_NS + step * 11 * STEP_NS + np.tile(np.arange(each), steps) * 1000
    return {
        "operation": ["all_reduce"] * len(step),
        "group": ["0"] * len(step),
        "dtype": ["float32"] * len(step),
        "bytes": np.full(len(step), 1000),
        "start_ns": start,
        "end_ns": start + 700,
        "step": step,
    }
