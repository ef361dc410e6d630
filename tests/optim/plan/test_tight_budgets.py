"""Budgets of recomputation: what is found is as fast as any number of layers that a pin could name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_problems import DENSE, problem

from trine.optim.plan.layouts import OFFLOADED, RECOMPUTATIONS
from trine.optim.plan.problem import Problem
from trine.optim.plan.saving_constraints import stage_most
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings, shapes
from trine.optim.plan.tight_budgets import tight_budgets

#: Of so many layers quarters are far apart.
DEEP = DENSE.with_changes(name="deep", layers=24)
CASES = {
    "tight": problem(11.0, "pipeline=1,2", "micro_batch=1,2", workload=DEEP),
    "offloaded": problem(7.0, "pipeline=1,2", "micro_batch=1,2", "activation_offload=none", workload=DEEP),
    "a budget alone": problem(9.0, "pipeline=1", "recompute=budget", workload=DEEP),
}


def pinned(asked: Problem) -> Problem:
    """With every number of layers of a stage that leaves some as they are."""
    layers = tuple(range(1, DEEP.layers))
    budget = RECOMPUTATIONS.index("budget")
    return replace(asked, pins={**asked.pins, "recompute": (budget,), "recomputed_layers": layers})


@pytest.mark.parametrize("name", CASES)
def test_no_pinned_number_of_layers_is_faster(name: str) -> None:
    asked = CASES[name]
    free = Searcher(asked, shapes(asked)).fastest(1)
    assert len(free.step_s) and free.layouts["recompute"][0] == RECOMPUTATIONS.index("budget")
    quarters = {round(DEEP.layers / int(free.layouts["pipeline"][0]) * part) for part in (0.25, 0.5, 0.75)}
    assert int(free.layouts["recomputed_layers"][0]) not in quarters, (
        "a case that quarters answer shows nothing"
    )
    best = Searcher(pinned(asked), shapes(pinned(asked))).fastest(1)
    assert free.step_s[0] == pytest.approx(best.step_s[0])


@pytest.mark.parametrize("name", ["tight", "offloaded"])
def test_the_winner_is_on_the_front(name: str) -> None:
    searcher = Searcher(CASES[name], shapes(CASES[name]))
    winner, front = searcher.fastest(1), searcher.front(offload=True)
    assert front.step_s[0] == pytest.approx(winner.step_s[0])


def test_a_layer_less_does_not_fit() -> None:
    asked = CASES["tight"]
    searcher = Searcher(asked, shapes(asked))
    parents, _ = savings(asked, searcher.shapes, OFFLOADED, settled=False)
    tight, rows = tight_budgets(asked, parents, searcher.peak_bytes)
    assert len(tight) == len(rows) > 10
    assert (searcher.peak_bytes(tight) <= asked.capacity_bytes).all()
    layers = tight["recomputed_layers"]
    assert (layers < stage_most(asked, tight["pipeline"])).all()
    more = tight.take(np.flatnonzero(layers > 1))
    assert len(more) > 5
    fewer = more.with_changes(recomputed_layers=more["recomputed_layers"] - 1)
    assert (searcher.peak_bytes(fewer) > asked.capacity_bytes).all()


def test_pins_of_layers_or_of_no_budget_are_kept() -> None:
    for pin in ("recomputed_layers=6", "recompute=none,full"):
        asked = problem(11.0, pin, "pipeline=1", workload=DEEP)
        searcher = Searcher(asked, shapes(asked))
        assert len(tight_budgets(asked, searcher.shapes, searcher.peak_bytes)[0]) == 0
