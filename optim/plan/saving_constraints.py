"""What recomputation and offload ask of a layout, as constraints of :mod:`trine.optim.plan.constraints`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trine.optim.plan.constraints import SAVED, Constraint, Mask, Rows
from trine.optim.plan.layouts import OFFLOADED, OFFLOADS, RECOMPUTATIONS
from trine.optim.plan.problem import Problem
from trine.optim.plan.refusals import Rule, broken, broken_words

__all__ = ["OFFLOADS_ALONE", "SAVINGS", "stage_most"]


def _offload(problem: Problem, rows: Rows) -> Mask:
    alone = rows["data"] * rows["context"] == 1
    return np.asarray((rows["parameter_offload"] == 0) | (rows["zero_stage"] == 3) | alone)


def _offload_words(problem: Problem, row: Mapping[str, int]) -> str:
    ranks = row["data"] * row["context"]
    return (
        f"parameter_offload needs zero_stage 3, not {row['zero_stage']}, beside {ranks} ranks of data x context: whole parameters "
        "are used where they are"
    )


def _uses_none(rows: Rows, tier: str) -> Mask:
    """Rows of which nothing lies on this tier."""
    return np.asarray(np.all([rows[column] != OFFLOADS.index(tier) for column in OFFLOADED], axis=0))


def _first_on(row: Mapping[str, int], tier: str) -> str:
    return next(name for name in OFFLOADED if row[name] == OFFLOADS.index(tier))


def _host(problem: Problem, rows: Rows) -> Mask:
    if not problem.cluster.device.is_processor:
        return np.ones(len(rows["recompute"]), dtype=bool)
    return _uses_none(rows, "cpu")


def _host_words(problem: Problem, row: Mapping[str, int]) -> str:
    column = _first_on(row, "cpu")
    return f"{column}=cpu frees nothing: {problem.cluster.device.name} is a processor, and the host's memory is its own"


def _remote(problem: Problem, rows: Rows) -> Mask:
    if problem.cluster.nodes > 1:
        return np.ones(len(rows["recompute"]), dtype=bool)
    return _uses_none(rows, "remote")


def _remote_words(problem: Problem, row: Mapping[str, int]) -> str:
    column = _first_on(row, "remote")
    return f"{column}=remote is another node's memory, and {problem.cluster.name or 'this cluster'} is planned as one node"


def stage_most(problem: Problem, pipeline: Any) -> Any:
    """Layers of the fullest stage of so many: a budget recomputes no more."""
    return -(-problem.workload.layers // pipeline)


def _budget(problem: Problem, rows: Rows) -> Mask:
    is_budget = rows["recompute"] == RECOMPUTATIONS.index("budget")
    most = stage_most(problem, rows["pipeline"])
    within = (rows["recomputed_layers"] >= 1) & (rows["recomputed_layers"] <= most)
    return np.asarray(np.where(is_budget, within, rows["recomputed_layers"] == 0))


def _budget_words(problem: Problem, row: Mapping[str, int]) -> str:
    if row["recompute"] != RECOMPUTATIONS.index("budget"):
        return f"recomputed_layers {row['recomputed_layers']} needs recompute=budget"
    most = stage_most(problem, row["pipeline"])
    return (
        f"recompute=budget needs recomputed_layers from 1 to a stage's {most}, not {row['recomputed_layers']}"
    )


def _rules(problem: Problem, recomputed: bool) -> list[Rule]:
    """Of what saves memory: those that ask for recomputation, or the others."""
    return problem.refused_unless_pinned(
        lambda columns: bool(columns & SAVED) and ("recompute" in columns) == recomputed
    )


def _together(recomputed: bool) -> Constraint:
    return Constraint(
        "together",
        lambda problem, rows: ~broken(_rules(problem, recomputed), rows, problem.workload),
        lambda problem, row: (
            f"{problem.stack.name} does not run {broken_words(_rules(problem, recomputed), row, problem.workload)}"
        ),
    )


#: Of layouts whose recomputation is still to be chosen.
OFFLOADS_ALONE = (
    Constraint("offload", _offload, _offload_words),
    Constraint("host", _host, _host_words),
    Constraint("remote", _remote, _remote_words),
    _together(False),
)
SAVINGS = (*OFFLOADS_ALONE, Constraint("budget", _budget, _budget_words), _together(True))
