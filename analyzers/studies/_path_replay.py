"""The step over again with some of its work gone: a longest-path recurrence, many scenarios at once.

On one stream, end[i] = max(ready[i], end[i−1] + g[i]) + w[i], with g the gap that the machine leaves between
two pieces of work, unrolls to sums and a running maximum: over a stretch a…b in which nothing else interferes,

    end[b] = max(end[a−1] + Σ (g + w),  host + max over j of (offset[j] + w[j] + Σ (g + w)[j+1…b]))

with one shift of the host for all launches between two blocking calls. So a stretch is two numbers, and
only the places where streams or the host wait for one another are walked one by one. This is the
(max, +) algebra of timed event graphs (Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity,
1992, chapter 2). All times are ns from the window's begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._path_graph import CALL_NS, NEVER, Graph, gaps_of

__all__ = ["Plan", "Scenario", "measured", "modelled", "plan_of", "replay"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What all scenarios of a graph share: stretches of work, and the order in which they are walked."""

    graph: Graph
    epoch: Array  # of each work: how many waits returned before its launch
    first: Array  # of each stretch: its first work
    last: Array
    before: Array  # the stretch before it on its lane, -1
    source: Array  # the stretch that it waits for, -1
    gap: Array  # of each work: what the machine leaves between it and the one before on its lane
    order: Array  # nodes: a stretch, or −1 − a wait
    wait_epoch: Array  # of each wait: the epoch in which it was called
    wait_source: Array  # the stretch that it waits for, -1
    final: Array  # the last stretch of each lane
    usual_gap_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A variation. ``weight`` is each work's duration and what follows its start; ``ready`` is when it could
    start for the host's sake, from the return of the wait before its launch (:data:`NEVER`: always);
    ``call``, ``cost`` and ``after`` are of each wait: from its epoch's begin to the call, what the call
    takes at least, and from the work's end to the return. ``tail`` is from the last return to the host's
    end; ``held`` the waits that still wait."""

    weight: Array
    ready: Array
    call: Array
    cost: Array
    after: Array
    tail: int
    held: Array


def plan_of(graph: Graph) -> Plan:
    """Cut the work where streams or the host wait for one another."""
    waits, count = graph.waits, len(graph)
    epoch = np.searchsorted(waits.end, graph.launch, side="right")
    first_in_lane = graph.first_in_lane()
    unknown = graph.launch == NEVER
    if unknown.any() and count:
        # Ready whatever the host does: it belongs to the stretch that it lies in.
        place = np.maximum.accumulate(np.where(unknown & ~first_in_lane, 0, np.arange(count)))
        epoch = epoch[place]
    begins = first_in_lane | (graph.dependency >= 0)
    begins[1:] |= epoch[1:] != epoch[:-1]
    feeds = np.concatenate((graph.dependency, waits.work))
    feeds = feeds[feeds >= 0]
    after = feeds + 1
    begins[after[after < count]] = True
    first = np.flatnonzero(begins)
    last = np.append(first[1:], count)[: len(first)] - 1
    stretch = np.cumsum(begins) - 1
    before = np.where(first_in_lane[first], -1, np.arange(len(first)) - 1)
    dependency = graph.dependency[first]
    source = np.where(dependency >= 0, stretch[dependency], -1) if count else before
    # By measured time: whatever something waits for began before it did. A return comes before what starts then.
    times = np.concatenate((waits.end, graph.start[first]))
    nodes = np.concatenate((-1 - np.arange(len(waits)), np.arange(len(first))))
    gap, usual = gaps_of(graph)
    is_last = np.append(graph.lane[1:] != graph.lane[:-1], True)[:count]
    return Plan(
        graph, epoch, first, last, before, source, gap, nodes[np.argsort(times, kind="stable")],
        np.searchsorted(waits.end, waits.start, side="right").clip(max=np.arange(len(waits))),
        np.where(waits.work >= 0, stretch[waits.work], -1) if count else np.full(len(waits), -1),
        stretch[np.flatnonzero(is_last)], usual,
    )  # fmt: skip


def replay(plan: Plan, scenarios: Sequence[Scenario]) -> Array:
    """Length of each scenario in ns, shape (scenarios,)."""
    graph, count = plan.graph, len(plan.first)
    total = np.empty((count, len(scenarios)), dtype=np.int64)
    from_host = np.empty((count, len(scenarios)), dtype=np.int64)
    for column, scenario in enumerate(scenarios):
        if count:
            total[:, column], from_host[:, column] = _stretches(plan, scenario)
    waits = len(graph.waits)
    call, cost, after, held = (
        np.stack([getattr(scenario, name) for scenario in scenarios], axis=1).reshape(waits, len(scenarios))
        for name in ("call", "cost", "after", "held")
    )
    end, host = _walk(plan, total, from_host, call, cost, np.where(held, after, NEVER))
    finish = host[-1] + np.array([scenario.tail for scenario in scenarios])
    for stretch in plan.final.tolist():
        finish = np.maximum(finish, end[stretch])
    return np.asarray(finish)


def _stretches(plan: Plan, scenario: Scenario) -> tuple[Array, Array]:
    """Of each stretch: Σ w and the gaps inside, and the largest of offset[j] + w[j] + what follows to the end."""
    sums = np.cumsum(scenario.weight + plan.gap)
    reach = np.maximum.reduceat(scenario.ready - (sums - scenario.weight), plan.first)
    # The first one's gap counts against the work before it alone.
    until = sums[plan.first] - scenario.weight[plan.first]
    return sums[plan.last] - until, reach + sums[plan.last]


def _walk(
    plan: Plan, total: Array, from_host: Array, call: Array, cost: Array, after: Array
) -> tuple[list[Array], list[Array]]:
    """End of each stretch, and the host's clock after each wait (the first: at the window's begin)."""
    width = total.shape[1]
    end: list[Array] = [np.zeros(width, dtype=np.int64)] * len(plan.first)
    host: list[Array] = [np.zeros(width, dtype=np.int64)]
    start = np.zeros(width, dtype=np.int64)
    epoch = np.minimum(plan.epoch[plan.first], len(plan.graph.waits)).tolist() if len(plan.first) else []
    before, source, gap = plan.before.tolist(), plan.source.tolist(), plan.gap[plan.first].tolist()
    wait_epoch, wait_source = plan.wait_epoch.tolist(), plan.wait_source.tolist()
    for node in plan.order.tolist():
        if node >= 0:
            ready = end[before[node]] + gap[node] if before[node] >= 0 else start
            if source[node] >= 0:
                ready = np.maximum(ready, end[source[node]])
            end[node] = np.maximum(ready + total[node], host[epoch[node]] + from_host[node])
        else:
            wait = -1 - node
            back = np.maximum(host[wait_epoch[wait]] + call[wait] + cost[wait], host[-1])
            if wait_source[wait] >= 0:
                back = np.maximum(back, end[wait_source[wait]] + after[wait])
            host.append(back)
    return end, host


# --- scenarios ---------------------------------------------------------------------------------------


def measured(plan: Plan) -> Scenario:
    """The step as it was: what the model does not explain stays where it was measured. Its replay is exact."""
    graph = plan.graph
    known = np.where(graph.launch > NEVER, graph.launch + graph.delay, NEVER)
    known = np.maximum(known, graph.before_end() + plan.gap)
    dependency = np.where(graph.dependency >= 0, graph.end[np.maximum(graph.dependency, 0)], NEVER)
    rest = graph.start - np.maximum(np.maximum(known, dependency), graph.begin_ns)
    cost, after, waited = _returns(graph)
    ready = _ready(plan, graph.delay)
    return Scenario(graph.end - graph.start + rest, ready, _calls(plan), cost, after, _tail(graph), waited)


def modelled(plan: Plan) -> Scenario:
    """The step from the model's constants and the measured durations alone: one launch delay, one gap between
    pieces of work. How far its length is off says how well the model holds."""
    graph = plan.graph
    ready = _ready(plan, np.maximum(graph.delay, graph.delay_ns))
    cost, after, waited = _returns(graph)
    after = np.minimum(after, 10 * CALL_NS)
    even = np.where(graph.first_in_lane(), 0, plan.usual_gap_ns - plan.gap)
    return Scenario(graph.end - graph.start + even, ready, _calls(plan), cost, after, _tail(graph), waited)


def _epoch_begin(plan: Plan) -> Array:
    """Measured begin of each epoch: the window's, then each return."""
    return np.append(plan.graph.begin_ns, np.maximum.accumulate(plan.graph.waits.end))


def _ready(plan: Plan, delay: Array) -> Array:
    graph = plan.graph
    offset = graph.launch - _epoch_begin(plan)[plan.epoch] + delay
    return np.where(graph.launch > NEVER, offset, NEVER)


def _calls(plan: Plan) -> Array:
    return np.asarray(plan.graph.waits.start - _epoch_begin(plan)[plan.wait_epoch])


def _returns(graph: Graph) -> tuple[Array, Array, Array]:
    """Of each wait: what the call costs, from the work's end to the return, and whether it waits for work."""
    waits = graph.waits
    length = waits.end - waits.start
    has_work = waits.work >= 0
    ended = graph.end[np.maximum(waits.work, 0)] if len(graph) else waits.end
    blocked = has_work & (ended > waits.start)
    cost = np.where(blocked, np.minimum(length, CALL_NS), length)
    after = np.where(blocked, waits.end - ended, 0)
    return cost, after, has_work


def _tail(graph: Graph) -> int:
    last = int(graph.waits.end.max()) if len(graph.waits) else graph.begin_ns
    return graph.host_end_ns - last
