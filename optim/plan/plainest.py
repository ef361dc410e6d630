"""Of layouts that are as fast, the plainest: fewer stages a rank, fewer kinds of parallelism, less that is not as usual.

What is predicted to a hundredth is not known to a thousandth, and what is plainer is easier to run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trine.optim.plan.layouts import DEFAULTS, KINDS, Layouts
from trine.optim.plan.reasons import SAME
from trine.optim.plan.search import Searcher

__all__ = ["plainest", "plainness"]

#: What may change for a plainer layout; degrees, batches, state and savings stay.
_FREE = ("schedule", "chunks", "two_level", "bucket_bytes")
_KEPT = ("data", "shard", "zero_stage", "tensor", "sequence", "context", "expert", "pipeline", "micro_batch")
_NUMBERS = ("compression", "precision")


def plainness(row: Mapping[str, int | str]) -> tuple[int, int, int]:
    """Smaller is plainer: kinds of parallelism beside data, stages a rank, and columns that are not as usual."""
    kinds = sum(row[name] != 1 for name in ("tensor", "context", "expert", "pipeline"))
    usual = {name: KINDS[name][value] if name in KINDS else value for name, value in DEFAULTS.items()}
    others = sum(
        row[name] != usual[name] for name in DEFAULTS if name not in ("data", "micro_batch", "microbatches")
    )
    return kinds, int(row["chunks"]), others


def plainest(searcher: Searcher, row: Mapping[str, int | str]) -> dict[str, int | str]:
    """A layout, or one that differs in its schedule, chunks, levels or buckets alone, fits, and is as fast by formula."""
    own = Layouts.of(**row)
    same = np.ones(len(searcher.shapes), dtype=bool)
    for name in (*_KEPT, *_NUMBERS):
        same &= searcher.shapes[name] == own[name][0]
    free = {name: searcher.shapes[name][same] for name in _FREE}
    others = Layouts.of(**{**own.columns, **free}) if same.any() else own
    fits = searcher.peak_bytes(others) <= searcher.problem.capacity_bytes
    fast = searcher.step_s(others) <= searcher.step_s(own)[0] * (1 + SAME)
    rows = [others.row(int(place)) for place in np.flatnonzero(fits & fast)]
    return min([own.row(0), *rows], key=plainness)
