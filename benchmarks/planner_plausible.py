"""What a table states and its times contradict: recomputation that cannot have happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trine.optim.plan import Layouts
from trine.optim.plan.columns import Conditions, Sizes, joined
from trine.optim.plan.step import parts_of

__all__ = ["without_impossible_recomputation"]

#: Of the time that a run would take at all its peaks at once: nearer to it is none whose scores pass through memory. (The fastest of
#: other tables take 1.2 times it, but for one run.)
_TOO_NEAR = 1.15


def without_impossible_recomputation(runs: Sequence[Any]) -> list[Any]:
    """Runs that state recomputation, read as without it where their table as a whole is faster than that allows.

    No run comes near to its matmuls at the best rate ever seen, its element-wise traffic at the memory's full bandwidth and nothing
    else. Where several runs of one table and stack do, with what they state to recompute, none of that table's recomputed.
    """
    stated = [run for run in runs if run.seconds and _says_so(run)]
    if not stated:
        return list(runs)
    conditions = joined([Conditions.of(run.cluster, run.stack) for run in stated], [1] * len(stated))
    one = np.ones(len(stated))
    best = replace(
        conditions, matmul=one, attention=one, memory=one, compute=one, depth=0 * one, launch_s=0 * one
    )
    layouts = Layouts(
        {name: np.concatenate([run.layouts[name] for run in stated]) for name in stated[0].layouts.columns}
    )
    parts = parts_of(joined([Sizes.of(run.workload) for run in stated], [1] * len(stated)), best, layouts)
    least = parts["compute"] + parts["recomputation"]
    too_fast: Counter[tuple[str, str]] = Counter()
    for run, bound in zip(stated, least, strict=True):
        too_fast[run.table, run.stack.name] += (run.seconds or 0.0) < _TOO_NEAR * bound
    found = []
    for run in runs:
        if too_fast[run.table, run.stack.name] >= 3 and _says_so(run):
            note = "no recomputation, since its table is faster than the stated one allows"
            run = replace(run, layout={**run.layout, "recompute": "none"}, assumed=(*run.assumed, note))
        found.append(run)
    return found


def _says_so(run: Any) -> bool:
    return bool(run.layout["recompute"] == "full" and not run.stack.fused_attention)
