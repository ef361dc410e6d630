"""A layout's step as it would run, to be drawn: the ranks of one pipeline, gradients, optimizer and all.

step = simulated_step(workload, cluster, stack, layouts, row=0)
write_record(step, Path("planned"), described(workload, cluster, stack, layouts, row=0))
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
from trine.optim.plan.drawn_bytes import Carried, carried_by
from trine.optim.plan.layouts import SCHEDULES, Layouts
from trine.optim.plan.operators import layer_times
from trine.optim.plan.refine import refined_parts, work_of
from trine.optim.plan.schedules import BACKWARD, FORWARD, INPUT, Shape, order_of
from trine.optim.plan.simulator import OPTIMIZER, Gradients, Meeting, Simulation, StepEnd, simulate
from trine.optim.plan.stages import stage_layers
from trine.optim.plan.step import rank_times
from trine.optim.plan.traffic import Traffic, traffic_of
from trine.optim.plan.waits import waits_of
from trine.optim.plan.workload import Workload

__all__ = ["simulated_step"]

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What a layer's passes wait for: a collective of a group. ``seconds`` and ``bytes``: of an action, by its kind and stage."""

    operation: str
    group: str
    seconds: Seconds
    bytes: Seconds


def simulated_step(
    workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, row: int, steps: int = 3
) -> Simulation:
    """Some steps of one layout. One replica and one rank of each tensor group stand for all that do alike.

    Of each action what it waits for is drawn as collectives behind its computing, one a kind. What the prediction leaves exposed
    of the gradients' reduction follows the last backward, then all ranks meet and update. What is no rank's action (overhead
    of the host, a step or a micro-batch; messages that hold up their sender) is idle at a step's end, and a first gather that
    nothing hides leads it: a step is as long as the plan says. Raises ``UsageError`` where the schedule cannot run the layout's
    pipeline.
    """
    one = layouts.take([row])
    parts = refined_parts(workload, cluster, stack, one)
    sizes, conditions = Sizes.of(workload), Conditions.of(cluster, stack)
    traffic = _traffic(sizes, conditions, one)
    carried = carried_by(sizes, conditions, one)
    simulation = _simulated(workload, cluster, stack, one, parts, steps)
    exchanges = _exchanges(sizes, one, traffic, carried)
    simulation = _with_bytes(_with_exchanges(simulation, exchanges), one, carried)
    count = int(one["microbatches"][0])
    lead_s = float(np.broadcast_to(traffic.first_gather_s, 1)[0])
    rest_s = float(conditions.microbatch_s[0]) * count + float(conditions.step_s[0])
    rest_s += float(np.broadcast_to(traffic.steady_messages_s, 1)[0]) * count
    lead_bytes = carried.gathered[0] * count * int(one["chunks"][0])
    return _lasting(simulation, sum(parts.values()), lead_s, rest_s, lead_bytes)


def _simulated(
    workload: Workload, cluster: Cluster, stack: Stack, one: Layouts, parts: Mapping[str, float], steps: int
) -> Simulation:
    ranks, chunks, count = (int(one[name][0]) for name in ("pipeline", "chunks", "microbatches"))
    shape = Shape(ranks, chunks, count)
    work = work_of(rank_times(workload, cluster, stack, one), one, 0)
    exposed, update = parts["exposed_gradients"] / chunks, parts["optimizer"] + parts["offload"]
    return simulate(
        order_of(SCHEDULES[int(one["schedule"][0])], shape, work),
        work,
        gradients=Gradients((exposed,), overlapped=False) if exposed > 0 else None,
        end=StepEnd(optimizer_s=update, norm_s=0.0),
        steps=steps,
    )


def _lasting(
    simulation: Simulation, step_s: float, lead_s: float, rest_s: float, lead_bytes: float
) -> Simulation:
    """Every step so long, with a first gather before it and ``rest_s`` behind it.

    What lies between fits already but for what a long step's continuation (:mod:`trine.optim.plan.refine`) and unequal chunks
    make of it, and is stretched by that.
    """
    factor = (step_s - lead_s - rest_s) / float(simulation.step_s[0])
    step = simulation.work["step"]
    work = {
        name: column * factor + lead_s + step * (lead_s + rest_s) if name.endswith("_s") else column
        for name, column in simulation.work.items()
    }
    meetings = [_moved(met, factor, lead_s + met.step * (lead_s + rest_s)) for met in simulation.meetings]
    if lead_s > 0:
        for rank in range(simulation.ranks):
            for number in range(simulation.steps):
                start_s = number * step_s
                end_s, size = start_s + lead_s, round(lead_bytes)
                first = Meeting(rank, number, "all_gather", f"data {rank}", -1, size, start_s, start_s, end_s)
                meetings.append(first)
    return replace(simulation, work=work, meetings=tuple(meetings), rest_s=rest_s)


def _moved(met: Meeting, factor: float, by_s: float) -> Meeting:
    entered_s, start_s, end_s = (each * factor + by_s for each in (met.entered_s, met.start_s, met.end_s))
    return replace(met, entered_s=entered_s, start_s=start_s, end_s=end_s)


def _traffic(sizes: Sizes, conditions: Conditions, one: Layouts) -> Traffic:
    times = layer_times(sizes, conditions, one)
    return traffic_of(sizes, conditions, one, times, waits_of(sizes, conditions, one))


def _exchanges(sizes: Sizes, one: Layouts, traffic: Traffic, carried: Carried) -> list[_Exchange]:
    """Of a layout: what its layers wait for."""
    stages = int(one["pipeline"][0]) * int(one["chunks"][0])
    middle, ends = (float(count) for count in stage_layers(float(sizes.layers[0]), stages))
    layers = np.full(stages, middle)
    layers[[0, -1]] = ends
    found = []
    for group, (operation, waited_s) in _by_group(traffic, one).items():
        # Which part of a layer's waits is whose is known of both passes together.
        whole_s = float(traffic.forward_s[0] + traffic.backward_s[0])
        share = float(waited_s[0]) / whole_s if whole_s > 0 else 0.0
        if share > 0:
            ahead_s, behind_s = (
                share * float(each[0]) * layers for each in (traffic.forward_s, traffic.backward_s)
            )
            ahead, behind = _bytes_of(group, layers, carried)
            seconds, amounts = _of_actions(ahead_s, behind_s), _of_actions(ahead, behind)
            found.append(_Exchange(operation, group, seconds, amounts))
    return found


def _of_actions(ahead: Seconds, behind: Seconds) -> Seconds:
    """By kind of action and stage."""
    found = np.zeros((OPTIMIZER + 1, len(ahead)))
    found[FORWARD] = ahead
    found[[INPUT, BACKWARD]] = behind
    return found


def _bytes_of(group: str, layers: Seconds, carried: Carried) -> tuple[Seconds, Seconds]:
    """Forward and backward of every stage."""
    if group in carried.layer:
        ahead, behind = carried.layer[group]
        return ahead * layers, behind * layers
    return _at_places(carried.gathered, len(layers)), _at_places(carried.reduced, len(layers))


def _at_places(values: tuple[float, float, float], count: int) -> Seconds:
    """Of so many ranks or stages in turn, where the first, those between and the last are known."""
    found = np.full(count, values[1])
    found[-1], found[0] = values[2], values[0]
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
        sizes = np.rint(exchange.bytes[kind, stage]).astype(np.int64)
        for row in np.flatnonzero(seconds > 0):
            rank, step = int(work["rank"][row]), int(work["step"][row])
            entered, end, size = float(begin_s[row]), float(end_s[row]), int(sizes[row])
            name = f"{exchange.group} {rank}"
            meetings.append(Meeting(rank, step, exchange.operation, name, -1, size, entered, entered, end))
        begin_s = end_s
    return replace(simulation, work={**work, "computed_s": computed_s}, meetings=tuple(meetings))


def _with_bytes(simulation: Simulation, one: Layouts, carried: Carried) -> Simulation:
    """Messages and gradients with what they carry."""
    gradients = _at_places(carried.gradients, simulation.ranks)
    sharded = int(one["zero_stage"][0]) in (1, 2)

    def known(met: Meeting) -> Meeting:
        if met.peer >= 0:
            return replace(met, bytes=round(carried.message))
        if met.operation == "all_reduce" and met.group.startswith("data "):
            operation = "reduce_scatter" if sharded else met.operation
            return replace(met, operation=operation, bytes=round(float(gradients[met.rank])))
        return met

    return replace(simulation, meetings=tuple(known(met) for met in simulation.meetings))
