"""What spreading a mixture's experts asks of a layout, as constraints of :mod:`trine.optim.plan.constraints`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trine.optim.plan.constraints import Constraint, Mask, Rows, divides
from trine.optim.plan.problem import Problem

__all__ = ["EXPERTS"]


def _experts(problem: Problem, rows: Rows) -> Mask:
    return divides(rows["expert"], max(problem.workload.experts, 1))


def _experts_words(problem: Problem, row: Mapping[str, int]) -> str:
    if not problem.workload.is_mixture:
        return f"expert {row['expert']}: {problem.workload.name} has no experts"
    return f"expert {row['expert']} does not divide {problem.workload.experts} experts"


def _ranks(problem: Problem, rows: Rows) -> Mask:
    # Where each expert is split over its tensor group, the whole group is one place for experts.
    inside = 1 if problem.stack.expert_tensor else rows["tensor"]
    return divides(rows["expert"], rows["data"] * rows["context"] * inside)


def _ranks_words(problem: Problem, row: Mapping[str, int]) -> str:
    ranks = row["data"] * row["context"]
    if problem.stack.expert_tensor:
        return (
            f"expert {row['expert']} does not divide the {ranks} tensor group{'' if ranks == 1 else 's'} of a stage "
            f"(data x context): {problem.stack.name} splits each expert over one"
        )
    ranks *= row["tensor"]
    return f"expert {row['expert']} does not divide the {ranks} ranks of a stage (data x context x tensor)"


def _widths(problem: Problem) -> dict[str, int]:
    """What the tensor group splits of experts, by whose it is."""
    workload, found = problem.workload, {}
    if workload.shared_experts:
        found["the shared experts'"] = workload.shared_experts * workload.shared_ffn
    if workload.is_mixture and problem.stack.expert_tensor:
        found["an expert's"] = workload.expert_ffn
    return found


def _width(problem: Problem, rows: Rows) -> Mask:
    found = np.ones(len(rows["tensor"]), dtype=bool)
    for width in _widths(problem).values():
        found &= divides(rows["tensor"], width)
    return found


def _width_words(problem: Problem, row: Mapping[str, int]) -> str:
    tensor = row["tensor"]
    whose, width = next((whose, width) for whose, width in _widths(problem).items() if width % tensor)
    return f"tensor {tensor} does not divide {whose} width {width}"


EXPERTS = (
    Constraint("experts", _experts, _experts_words),
    Constraint("expert ranks", _ranks, _ranks_words),
    Constraint("expert widths", _width, _width_words),
)
