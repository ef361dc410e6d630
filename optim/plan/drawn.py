"""A layout's step as it would run, to be drawn: the ranks of one pipeline, gradients, optimizer and all.

write_record(simulated_step(workload, cluster, stack, layouts, row=0), Path("planned"))
$ trine analyze planned
"""

from __future__ import annotations

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import SCHEDULES, Layouts
from trine.optim.plan.refine import work_of
from trine.optim.plan.schedules import Shape, order_of
from trine.optim.plan.simulator import Gradients, Simulation, StepEnd, simulate
from trine.optim.plan.step import predict, rank_times
from trine.optim.plan.workload import Workload

__all__ = ["simulated_step"]


def simulated_step(
    workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, row: int, steps: int = 3
) -> Simulation:
    """Some steps of one layout. One replica and one rank of each tensor group stand for all that do alike.

    What the prediction leaves exposed of the gradients' reduction follows the last backward, then all ranks meet and update.
    Overhead that is no rank's computing (of the host, a step or a micro-batch) is not in it. Raises ``UsageError`` where the
    schedule cannot run the layout's pipeline.
    """
    one = layouts.take([row])
    parts = {name: float(column[0]) for name, column in predict(workload, cluster, stack, one).parts.items()}
    ranks, chunks, count = (int(one[name][0]) for name in ("pipeline", "chunks", "microbatches"))
    shape = Shape(ranks, chunks, count)
    work = work_of(rank_times(workload, cluster, stack, one), one, 0)
    order = order_of(SCHEDULES[int(one["schedule"][0])], shape, work)
    exposed, update = parts["exposed_gradients"] / chunks, parts["optimizer"] + parts["offload"]
    return simulate(
        order,
        work,
        gradients=Gradients((exposed,), overlapped=False) if exposed > 0 else None,
        end=StepEnd(optimizer_s=update, norm_s=0.0),
        steps=steps,
    )
