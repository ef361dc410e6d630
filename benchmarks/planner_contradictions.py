"""Cells of a published run that contradict one another: a note where the nearest layout stands for the run, else a skip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_cells import Missing, Row

from trine.optim.plan import Workload

__all__ = ["check_layout"]

#: A layout whose step holds more than this times the stated sequences, or fewer than its inverse, is another run's; within, a cell
#: may mean something else: micro-batches of several ranks together, or ranks whose pipeline or context cell was left out.
_ANOTHER_RUN = 4.0


def check_layout(row: Row, workload: Workload, layout: Mapping[str, Any], batch: int) -> None:
    """Notes in ``row`` what its layout has otherwise than its cells. Raises ``Missing`` where it is no longer the same run."""
    _check_batch(row, layout, batch)
    _check_experts(row, workload, layout)


def _check_batch(row: Row, layout: Mapping[str, Any], batch: int) -> None:
    """Whether data ranks, micro-batches and their size make the stated batch."""
    ranks, size, steps = layout["data"], layout["micro_batch"], layout["microbatches"]
    parts = f"{ranks} data ranks with micro-batches of {size}"
    if (ran := ranks * size * steps) != batch:
        if not 1 / _ANOTHER_RUN <= ran / batch <= _ANOTHER_RUN:
            raise Missing(f"a batch of {batch} is not one of {parts}")
        row.assume(f"{ran} sequences a step, since {batch} are not those of {parts}")
    stated, stated_size = row.count("ga"), row.count("mbs")
    if stated not in (None, steps) and stated_size in (None, size):
        row.assume(f"ga {stated} is passed over, since {parts} take {steps} for {batch}")


def _check_experts(row: Row, workload: Workload, layout: Mapping[str, Any]) -> None:
    """Whether the stated expert ranks divide experts, and the ranks that they are of."""
    stated = row.count("ep") or 1
    if stated == 1:
        return
    if not workload.is_mixture:
        row.assume(f"no expert ranks, since no experts are stated for {stated} of them")
        return
    ranks = layout["data"] * layout["context"] * layout["tensor"]
    for whole, what in ((workload.experts, "experts"), (ranks, "ranks of a stage")):
        if whole % stated:
            raise Missing(f"ep {stated} does not divide {whole} {what}")
