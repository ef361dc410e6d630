"""A two-level all-reduce: reduce-scatter inside nodes, all-reduce between them, all-gather inside.

    T(S) = RS(S) inside + AR(S/g) between + AG(S) inside        g ranks a node

What lies inside a node is this machine's calibrated link among g ranks; what lies between is what the record's own
all-reduces took, which the links between nodes decide (Goyal et al. 2017, section 4). A node's link carries 2(n-1)/n·S of
a ring through all n ranks, and 2(k-1)/k·S of the g rings between k nodes, each of S/g: little less, but in fewer hops.
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.whatif.graph import Graph, RankStep, Task, mapped
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import refuse_neutral, require_plain
from trine.optim.plan.whatif.transforms._transfers import exchanging, is_gradient, replicas, require_exchange
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("communication.algorithm",)
#: Before compression, whose codec no level divides.
ORDER = 58


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` on one node, where the run had it already, for other algorithms, or where a node's link was not calibrated."""
    name = change.config.communication.algorithm
    if name is None:
        refuse_neutral(graph, change, KEYS)
    if name != "two_level":
        raise UsageError(f'communication.algorithm = "{name}": a what-if knows "two_level" alone')
    require_plain(graph, KEYS[0])
    require_exchange(graph, KEYS[0])
    ranks, nodes = replicas(graph), _nodes(graph)
    inside = ranks // nodes
    if nodes < 2 or inside < 2 or ranks % nodes:
        raise UsageError(
            f'communication.algorithm = "two_level" needs several nodes of several ranks each, and the record has '
            f"{ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}"
        )
    scatter, gather = (change.times.link(each).among(inside) for each in ("reduce_scatter", "all_gather"))
    # Bytes that a node's link carries, of those of the ring through all ranks.
    across = ((nodes - 1) / nodes) / ((ranks - 1) / ranks)

    def changed(step: RankStep) -> list[Task]:
        def levelled(task: Task) -> Task:
            inner = scatter.seconds(task.bytes) + gather.seconds(task.bytes)
            return replace(task, seconds=inner + task.seconds * across)

        return [levelled(task) if is_gradient(task) else task for task in step.tasks]

    return mapped(graph, changed)


def _nodes(graph: Graph) -> int:
    """Of the ranks that reduce gradients together. Raises ``UsageError`` where the record does not say."""
    hosts = graph.facts.get("hosts", 1)
    if hosts is None:
        raise UsageError(
            f'{KEYS[0]} = "two_level": this record does not say on how many nodes its {graph.world} ranks ran: give one with '
            "all of them, or with the first ranks of two nodes"
        )
    a_node = max(graph.world // int(hosts), 1)
    group = exchanging(graph.steps[0].ranks[0].tasks) or range(graph.world)
    return len({rank // a_node for rank in group})
