"""The best few, simulated: what a pipeline's schedule leaves idle, event by event, where the search had a formula.

Only the parts ``pipeline_bubble`` and ``pipeline_messages`` change; a layout without stages stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.closed_form import FOLDED
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import SCHEDULES, Layouts
from trine.optim.plan.schedules import Order, Shape, Work, order_of
from trine.optim.plan.simulator import simulate
from trine.optim.plan.stages import stage_layers
from trine.optim.plan.step import RankTimes, predict, rank_times
from trine.optim.plan.workload import Workload

__all__ = ["Pipelined", "idle_of", "refined_parts", "work_of"]

#: Actions of one simulation; beyond, two shorter steps are simulated, and a step is affine in its micro-batches.
_MOST_ACTIONS = 20_000


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Seconds of a step that the busiest rank computes nothing: for want of work, and for messages. ``exact`` False: of a
    long step, continued from two shorter ones."""

    bubble_s: float
    messages_s: float
    exact: bool


def work_of(times: RankTimes, layouts: Layouts, row: int, *, messages: bool = True) -> Work:
    """Every stage's seconds on one micro-batch, in the order of the stages."""
    ranks, chunks = int(layouts["pipeline"][row]), int(layouts["chunks"][row])
    middle, ends = (float(count) for count in stage_layers(times.layers[row], ranks * chunks))
    of_rank = float(times.middle_layers[row])

    def seconds(name: str) -> tuple[float, ...]:
        one, own, first, last = (
            float(getattr(getattr(times, which), name)[row]) for which in ("middle", "ends", "first", "last")
        )
        layer = one / of_rank
        found = [layer * middle] * (ranks * chunks)
        # One stage is both ends.
        found[0] += layer * (ends - middle) + first - own
        found[-1] += layer * (ends - middle) + last - own
        # A stage without layers is a difference of equals.
        return tuple(max(value, 0.0) for value in found)

    message_s = float(np.broadcast_to(times.message_s, len(layouts))[row]) if messages else 0.0
    return Work(seconds("forward_s"), seconds("input_s"), seconds("weight_s"), message_s)


def idle_of(
    workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, row: int
) -> Pipelined | None:
    """What a layout's pipeline leaves idle, simulated; None where it has one rank."""
    if int(layouts["pipeline"][row]) == 1:
        return None
    one = layouts.take([row])
    times = rank_times(workload, cluster, stack, one)
    spans = [_span_s(one, work_of(times, one, 0, messages=sent)) for sent in (False, True)]
    busy = _busiest_s(work_of(times, one, 0), one) * int(one["microbatches"][0])
    (silent, exact), (full, _) = spans
    # Software that does not hide messages waits for its own besides; links of the simulation carry them beside computing.
    steady = float(np.broadcast_to(times.steady_messages_s, 1)[0]) * int(one["microbatches"][0])
    return Pipelined(max(silent - busy, 0.0), full - silent + steady, exact)


def refined_parts(workload: Workload, cluster: Cluster, stack: Stack, one: Layouts) -> dict[str, float]:
    """Seconds of a single layout's step by part, as a plan has them of its best: what the pipeline leaves idle is simulated."""
    parts = {name: float(column[0]) for name, column in predict(workload, cluster, stack, one).parts.items()}
    idle = idle_of(workload, cluster, stack, one, 0)
    if idle is not None:
        parts |= {"pipeline_bubble": idle.bubble_s, "pipeline_messages": idle.messages_s}
    return parts


def _busiest_s(work: Work, one: Layouts) -> float:
    """Seconds of the busiest rank on one micro-batch."""
    ranks, chunks = int(one["pipeline"][0]), int(one["chunks"][0])
    folded = SCHEDULES[int(one["schedule"][0])] in FOLDED
    order = Order(Shape(ranks, chunks, 1), (), folded)
    total = np.zeros(ranks)
    for stage in range(ranks * chunks):
        total[order.rank_of(stage)] += work.forward_s[stage] + work.input_s[stage] + work.weight_s[stage]
    return float(total.max())


def _span_s(one: Layouts, work: Work) -> tuple[float, bool]:
    """From the first forward to the last backward, and whether all micro-batches were simulated."""
    ranks, chunks, count = (int(one[name][0]) for name in ("pipeline", "chunks", "microbatches"))
    name = SCHEDULES[int(one["schedule"][0])]
    most = max(_MOST_ACTIONS // (3 * ranks * chunks), 4 * ranks)
    if count <= most:
        return _simulated_s(name, Shape(ranks, chunks, count), work), True
    # Whole rounds, in step with the count itself, which schedules may ask for.
    rounds = max(most // ranks // 2, 2)
    short = rounds * ranks
    first, second = (_simulated_s(name, Shape(ranks, chunks, size), work) for size in (short, 2 * short))
    return second + (second - first) / short * (count - 2 * short), False


def _simulated_s(name: str, shape: Shape, work: Work) -> float:
    return simulate(order_of(name, shape, work), work).span_s()
