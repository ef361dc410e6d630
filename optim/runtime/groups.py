"""Process groups made from the topology: the ranks of a node, and their counterparts on the other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import distributed

from trine.optim.topology import Topology

__all__ = ["NodeGroups", "end_group", "node_groups"]


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """This rank's two groups; ``None`` where the group would hold one rank alone."""

    inside: distributed.ProcessGroup | None  # the ranks of its node
    across: distributed.ProcessGroup | None  # the ranks of the same local number, one a node


#: Of the default group: groups end with it, and a second start of the job must not meet the first one's.
_MADE: WeakKeyDictionary[distributed.ProcessGroup, dict[int, NodeGroups]] = WeakKeyDictionary()


def node_groups(topology: Topology) -> NodeGroups:
    """Made once for each number of ranks on a node. Collective: every rank calls it at the same place."""
    world = distributed.distributed_c10d._get_default_group()
    made = _MADE.setdefault(world, {})
    size = topology.ranks_per_node
    if size not in made:
        nodes = [list(range(first, first + size)) for first in range(0, topology.ranks, size)]
        counterparts = [list(range(local, topology.ranks, size)) for local in range(size)]
        made[size] = NodeGroups(_own(nodes, topology.rank), _own(counterparts, topology.rank))
    return made[size]


def end_group(group: distributed.ProcessGroup) -> None:
    """Destroy a group that was made here; one that has ended with the default group is left alone."""
    if distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map:
        distributed.destroy_process_group(group)


def _own(groups: list[list[int]], rank: int) -> distributed.ProcessGroup | None:
    """Every rank makes every group, in this order, and keeps the one that it is in."""
    own = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = distributed.new_group(ranks)
        if rank in ranks:
            own = group
    return own
