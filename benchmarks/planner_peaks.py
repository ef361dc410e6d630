"""Runs that come near to all peaks at once with what their table states: the argument of an erratum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from planner_rows import Run

from trine.optim.plan import Layouts
from trine.optim.plan.columns import Conditions, Sizes, joined
from trine.optim.plan.step import parts_of

__all__ = ["NEAR", "near_all_peaks"]

#: Of the time that a run would take at all its peaks at once.
NEAR = 0.15


def near_all_peaks(runs: Sequence[Run]) -> Mapping[str, int]:
    """Table → how many of its runs come within :data:`NEAR` of a step of nothing but matmuls and element-wise traffic.

    The matmuls at the best rate ever seen, the traffic at the memory's full bandwidth; of runs that state full recomputation and
    whose scores pass through memory.
    """
    stated = [
        run
        for run in runs
        if run.seconds and run.layout["recompute"] == "full" and not run.stack.fused_attention
    ]
    if not stated:
        return {}
    ones = [1] * len(stated)
    full = np.ones(len(stated))
    best = replace(
        joined([Conditions.of(run.cluster, run.stack) for run in stated], ones),
        matmul=full, attention=full, memory=full, compute=full, depth=0 * full, launch_s=0 * full,
    )  # fmt: skip
    layouts = Layouts(
        {name: np.concatenate([run.layouts[name] for run in stated]) for name in stated[0].layouts.columns}
    )
    parts = parts_of(joined([Sizes.of(run.workload) for run in stated], ones), best, layouts)
    least = parts["compute"] + parts["recomputation"]
    measured = np.asarray([run.seconds for run in stated], dtype=np.float64)
    near = measured < (1 + NEAR) * least
    return Counter(run.table for run, is_near in zip(stated, near, strict=True) if is_near)
