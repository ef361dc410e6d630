"""The batch that would keep a pipeline busy: micro-batches hide what filling and draining it leaves idle.

A schedule's bubble is the same for every number of micro-batches, so its share falls with them (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.problem import Problem
from trine.optim.plan.step import predict

__all__ = ["LARGEST_SHARE", "Busier", "busier"]

#: A pipeline that is idle for no more of a step is as it should be.
LARGEST_SHARE = 0.15
#: Doublings of the batch that are tried.
_DOUBLINGS = 7


@dataclass(frozen=True, slots=True)
class Busier:
    """``idle``: share of the step that the pipeline is. ``global_batch``: sequences with which it is ``then``, all else alike."""

    idle: float
    global_batch: int
    then: float


def busier(problem: Problem, layout: Mapping[str, int | str], parts_s: Mapping[str, float]) -> Busier | None:
    """The smallest doubling of a layout's micro-batches that leaves its pipeline idle no more than :data:`LARGEST_SHARE`.

    None where it is not idle for more as it is, or where no batch that fits helps.
    """
    idle = parts_s["pipeline_bubble"] / sum(parts_s.values())
    if idle <= LARGEST_SHARE:
        return None
    times = 2 ** np.arange(1, _DOUBLINGS + 1)
    more = Layouts.of(**{**layout, "microbatches": int(layout["microbatches"]) * times})
    found = predict(problem.workload, problem.cluster, problem.stack, more)
    shares = np.broadcast_to(found.parts["pipeline_bubble"], len(more)) / found.step_s
    needed = memory_of(problem.workload, problem.cluster, problem.stack, more).needed_bytes
    fits = needed <= problem.capacity_bytes
    rows = np.flatnonzero(fits & (shares <= LARGEST_SHARE))
    if not len(rows):
        return None
    return Busier(idle, int(more.global_batch[rows[0]]), float(shares[rows[0]]))
