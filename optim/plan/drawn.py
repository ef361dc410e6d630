"""A layout's step as it would run, to be drawn: the ranks of one pipeline, gradients, optimizer and all.

write_record(simulated_step(workload, cluster, stack, layouts, row=0), Path("planned"))
$ trine analyze planned
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import SCHEDULES, Layouts
from trine.optim.plan.operators import layer_times
from trine.optim.plan.refine import work_of
from trine.optim.plan.schedules import BACKWARD, FORWARD, INPUT, Shape, order_of
from trine.optim.plan.simulator import OPTIMIZER, Gradients, Meeting, Simulation, StepEnd, simulate
from trine.optim.plan.stages import stage_layers
from trine.optim.plan.step import predict, rank_times
from trine.optim.plan.traffic import Traffic, traffic_of
from trine.optim.plan.waits import waits_of
from trine.optim.plan.workload import Workload

__all__ = ["simulated_step"]

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What a layer's passes wait for: a collective of a group. ``seconds``: of an action, by its kind and stage."""

    operation: str
    group: str
    seconds: Seconds


def simulated_step(
    workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, row: int, steps: int = 3
) -> Simulation:
    """Some steps of one layout. One replica and one rank of each tensor group stand for all that do alike.

    Of each action what it waits for is drawn as collectives behind its computing, one a kind. What the prediction leaves exposed
    of the gradients' reduction follows the last backward, then all ranks meet and update. Overhead that is no rank's computing (of
    the host, a step or a micro-batch) is not in it. Raises ``UsageError`` where the schedule cannot run the layout's pipeline.
    """
    one = layouts.take([row])
    parts = {name: float(column[0]) for name, column in predict(workload, cluster, stack, one).parts.items()}
    ranks, chunks, count = (int(one[name][0]) for name in ("pipeline", "chunks", "microbatches"))
    shape = Shape(ranks, chunks, count)
    work = work_of(rank_times(workload, cluster, stack, one), one, 0)
    order = order_of(SCHEDULES[int(one["schedule"][0])], shape, work)
    exposed, update = parts["exposed_gradients"] / chunks, parts["optimizer"] + parts["offload"]
    simulation = simulate(
        order,
        work,
        gradients=Gradients((exposed,), overlapped=False) if exposed > 0 else None,
        end=StepEnd(optimizer_s=update, norm_s=0.0),
        steps=steps,
    )
    return _with_exchanges(simulation, _exchanges(workload, cluster, stack, one))


def _exchanges(workload: Workload, cluster: Cluster, stack: Stack, one: Layouts) -> list[_Exchange]:
    """Of a layout: what its layers wait for."""
    sizes, conditions = Sizes.of(workload), Conditions.of(cluster, stack)
    times = layer_times(sizes, conditions, one)
    traffic = traffic_of(sizes, conditions, one, times, waits_of(sizes, conditions, one))
    stages = int(one["pipeline"][0]) * int(one["chunks"][0])
    middle, ends = (float(count) for count in stage_layers(workload.layers, stages))
    layers = np.full(stages, middle)
    layers[[0, -1]] = ends
    found = []
    for group, (operation, waited_s) in _by_group(traffic, one).items():
        # Which part of a layer's waits is whose is known of both passes together.
        whole_s = float(traffic.forward_s[0] + traffic.backward_s[0])
        share = float(waited_s[0]) / whole_s if whole_s > 0 else 0.0
        seconds = np.zeros((OPTIMIZER + 1, stages))
        seconds[FORWARD] = share * float(traffic.forward_s[0]) * layers
        seconds[[INPUT, BACKWARD]] = share * float(traffic.backward_s[0]) * layers
        if share > 0:
            found.append(_Exchange(operation, group, seconds))
    return found


def _by_group(traffic: Traffic, one: Layouts) -> Mapping[str, tuple[str, Seconds]]:
    """Kind of group → its collective, and seconds of a layer. Keys and values that go round a ring are gathered bit by bit."""
    return {
        "tensor": ("reduce_scatter" if one["sequence"][0] else "all_reduce", traffic.tensor_s),
        "context": ("all_gather", traffic.context_s),
        "expert": ("all_to_all", traffic.expert_s),
        "data": ("all_gather", traffic.gather_s),
    }


def _with_exchanges(simulation: Simulation, exchanges: list[_Exchange]) -> Simulation:
    """Every action's computing first, then its collectives, one after the other."""
    work = simulation.work
    kind, stage = (work[name].astype(np.int64) for name in ("kind", "stage"))
    each_s = [exchange.seconds[kind, stage] for exchange in exchanges]
    computed_s = np.maximum(work["end_s"] - sum(each_s, np.zeros(len(kind))), work["start_s"])
    meetings, begin_s = list(simulation.meetings), computed_s
    for exchange, seconds in zip(exchanges, each_s, strict=True):
        end_s = np.minimum(begin_s + seconds, work["end_s"])
        for row in np.flatnonzero(seconds > 0):
            rank, step = int(work["rank"][row]), int(work["step"][row])
            entered, end = float(begin_s[row]), float(end_s[row])
            name = f"{exchange.group} {rank}"
            meetings.append(Meeting(rank, step, exchange.operation, name, -1, 0, entered, entered, end))
        begin_s = end_s
    return replace(simulation, work={**work, "computed_s": computed_s}, meetings=tuple(meetings))
