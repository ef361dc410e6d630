"""Two-level all-reduce: a node's links carry the whole tensor, the network between nodes only a slice a rank.

Reduce-scatter inside the node leaves each of its m ranks with the node's sum of one slice of S/m bytes; ranks of the
same local number all-reduce their slice across nodes, by a ring or by two trees; all-gather inside hands the complete
slices round. What leaves a node per rank is 2(k-1)/k · S/m bytes (k nodes, ring) instead of the flat ring's 2(n-1)/n · S
on the rank at the edge, and only the k nodes' latencies are those of the network.
"""

from __future__ import annotations

from trine.optim.runtime.exchange.ring import all_gather_steps, reduce_scatter_steps, ring_steps
from trine.optim.runtime.exchange.schedule import Plan, Step, merged
from trine.optim.runtime.exchange.tree import double_tree, tree_steps
from trine.optim.topology import Topology

__all__ = ["two_level_plan"]


def two_level_plan(topology: Topology, pieces: int | None = None) -> Plan:
    """This rank's plan. ``pieces``: chunks of each tree's half across the nodes; ``None``: a ring across them."""
    local, size = topology.local_rank, topology.ranks_per_node
    node, nodes = topology.node, topology.nodes
    inside = node * size
    in_slice = nodes if pieces is None else 2 * pieces

    def neighbour(place: int) -> int:
        return inside + place

    def counterpart(place: int) -> int:
        return place * size + local

    steps: list[Step] = [*reduce_scatter_steps(local, size, in_slice, neighbour)]
    first = local * in_slice
    if pieces is None:
        steps += ring_steps(node, nodes, 1, counterpart, first, size - 1)
        across = 2 * (nodes - 1)
    else:
        steps += tree_steps(node, nodes, pieces, counterpart, first, size - 1)
        one, other = double_tree(nodes)
        across = 2 * max(one.height[one.root], other.height[other.root]) + pieces - 1
    steps += all_gather_steps(local, size, in_slice, neighbour, 0, size - 1 + across)
    return Plan(size * in_slice, merged(steps))
