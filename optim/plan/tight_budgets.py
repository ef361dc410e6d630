"""Of a budget of recomputation the smallest that fits: between the parts of a stage that a search tries.

Every recomputed layer costs time and saves memory, so the fastest budget of a layout is the smallest with which it fits; halving
finds it among all numbers of layers in a few evaluations of whole columns. (Where activations are moved away what is recomputed need
not be moved, so a larger one may be faster there: the parts that are tried beside it stand for those.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.constraints import kept
from trine.optim.plan.layouts import RECOMPUTATIONS, Integers, Layouts
from trine.optim.plan.problem import Problem
from trine.optim.plan.saving_constraints import SAVINGS, stage_most

__all__ = ["tight_budgets"]

_BUDGET = RECOMPUTATIONS.index("budget")


def tight_budgets(
    problem: Problem, layouts: Layouts, peak_bytes: Callable[[Layouts], Column]
) -> tuple[Layouts, Integers]:
    """These layouts with the fewest recomputed layers that fit, where some do, and the row that each came from.

    None where a pin settles the layers, or recomputation in part is no choice.
    """
    nothing = layouts.take(slice(0)), np.empty(0, dtype=np.int64)
    if "recomputed_layers" in problem.pins or _BUDGET not in problem.choices("recompute", RECOMPUTATIONS):
        return nothing
    most = stage_most(problem, layouts["pipeline"]) - 1
    rows = np.flatnonzero(most >= 1)
    room = problem.capacity_bytes
    if len(rows):
        rows = rows[peak_bytes(_recomputing(layouts.take(rows), most[rows])) <= room]
    if not len(rows):
        return nothing
    chosen = layouts.take(rows)
    # No layer at all is taken not to fit: it is another layout, which is weighed apart.
    low, high = np.zeros(len(rows), dtype=np.int64), most[rows].copy()
    while (open_ := np.flatnonzero(high - low > 1)).size:
        middle = (low[open_] + high[open_]) // 2
        fits = peak_bytes(_recomputing(chosen.take(open_), middle)) <= room
        high[open_], low[open_] = np.where(fits, middle, high[open_]), np.where(fits, low[open_], middle)
    tight = _recomputing(chosen, high)
    allowed = kept(SAVINGS, problem, tight.columns)
    return tight.take(allowed), rows[allowed]


def _recomputing(layouts: Layouts, layers: Integers) -> Layouts:
    return layouts.with_changes(recompute=_BUDGET, recomputed_layers=layers)
