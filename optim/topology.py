"""Which ranks share a node: what hierarchical communication and sharding groups are made from. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trine.record.errors import UsageError

__all__ = ["RANKS_PER_NODE", "Topology", "topology_of"]

#: Overrides what the launcher says: several simulated nodes on one machine, or nodes inside a larger island.
RANKS_PER_NODE = "TRINE_RANKS_PER_NODE"


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks are numbered node by node, as torchrun and MPI number them."""

    rank: int
    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """The place of this rank on its node."""
        return self.rank % self.ranks_per_node


def topology_of(rank: int, ranks: int, environment: Mapping[str, str] | None = None) -> Topology:
    """From ``TRINE_RANKS_PER_NODE``, else the launcher's ``LOCAL_WORLD_SIZE``, else one node.

    Nodes of unequal size cannot be told apart by arithmetic: where the launcher's number does not divide the ranks, all
    ranks count as one node. Raises ``UsageError`` when the variable itself does not divide them.
    """
    environment = os.environ if environment is None else environment
    stated = environment.get(RANKS_PER_NODE)
    if stated is not None:
        size = int(stated) if stated.isascii() and stated.isdigit() else 0
        if size < 1 or ranks % size:
            raise UsageError(
                f"{RANKS_PER_NODE}={stated}: it takes a whole number that divides the {ranks} ranks"
            )
        return Topology(rank, ranks, size)
    launched = environment.get("LOCAL_WORLD_SIZE", "")
    size = int(launched) if launched.isascii() and launched.isdigit() else ranks
    if size < 1 or ranks % size:
        size = ranks
    return Topology(rank, ranks, size)
