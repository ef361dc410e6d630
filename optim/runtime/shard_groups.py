"""``parallel.shard = "auto"``: how many ranks share one copy of the model's state, from measured links and memory.

Shards over all ranks need the least memory and send every gathered byte over the slowest link. Shards inside a node
keep gathering there, and only each shard's gradient crosses, but hold as many copies as there are nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from trine.optim.techniques.zero import bytes_per_parameter

if TYPE_CHECKING:
    from trine.optim.runtime.links import Links
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Decision", "automatic_shards", "decide"]

#: Of a device's memory, what parameters, gradients and optimizer may hold; the rest is for activations.
STATE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Decision:
    """How many ranks a shard group has, and why, with the numbers that decided."""

    shards: int
    why: str


def decide(
    stage: int, ranks: int, ranks_per_node: int, links: Links | None, model_bytes: int, capacity_bytes: float
) -> Decision:
    """Inside the node where that is faster and fits, else over all ranks. Pure arithmetic.

    ``model_bytes`` are the parameters' (S); the optimizer's state counts twice that, as Adam's. ``links`` are the
    all-reduce's, T(S) = α + S/β. An all-gather or a reduce-scatter moves half an all-reduce's bytes: a step of stage 3
    gathers twice and scatters once (1.5 all-reduces), of stage 2 gathers and scatters (1), of stage 1 gathers beside
    an all-reduce that is the same either way (0.5). Across nodes each shard's gradient is all-reduced: S / shards.
    """
    if ranks_per_node in (1, ranks) or links is None or links.inside is None or links.across is None:
        return Decision(
            ranks, f"all {ranks}: " + ("one node" if ranks_per_node == ranks else "one rank a node")
        )
    units = {1: 0.5, 2: 1.0, 3: 1.5}[stage]
    over_all = units * links.whole.seconds(model_bytes)
    crossing = links.across.seconds(model_bytes / ranks_per_node) if stage >= 2 else 0.0
    in_node = units * links.inside.seconds(model_bytes) + crossing
    held = bytes_per_parameter(stage, ranks_per_node, 1, 1, 2) * model_bytes
    said = (
        f"{over_all * 1e3:.2f} ms a step over all, {in_node * 1e3:.2f} ms inside nodes of {ranks_per_node}; there "
        f"{held / 2**20:.1f} MiB of state a rank, {STATE_SHARE * capacity_bytes / 2**20:.0f} MiB for it; "
        f"all: {links.whole}; inside: {links.inside}; across: {links.across}"
    )
    if held > STATE_SHARE * capacity_bytes:
        return Decision(ranks, f"all {ranks}, since a node's share of copies does not fit: {said}")
    if in_node < over_all:
        return Decision(ranks_per_node, f"inside nodes, which is faster: {said}")
    return Decision(ranks, f"all {ranks}, which is faster: {said}")


def automatic_shards(assembly: Assembly) -> Decision:
    """:func:`decide` from what is measured here; the same on every rank. Collective over all ranks."""
    from trine.optim.runtime.links import node_links

    facts = assembly.facts
    size = facts.topology.ranks_per_node
    links = None
    if size not in (1, facts.ranks):
        links = node_links("all_reduce", facts.device, facts.topology)
    model_bytes = sum(p.numel() * p.element_size() for p in assembly.model.parameters())
    capacity = torch.tensor(_capacity_bytes(assembly), dtype=torch.float64, device=facts.device)
    distributed.all_reduce(capacity, op=distributed.ReduceOp.MIN)
    return decide(assembly.config.zero.stage, facts.ranks, size, links, model_bytes, float(capacity))


def _capacity_bytes(assembly: Assembly) -> float:
    stated, facts = assembly.config.offload.device_bytes, assembly.facts
    if stated is not None:
        return float(stated)
    if facts.device_type == "cuda":
        return float(torch.cuda.get_device_properties(facts.device).total_memory)
    from trine.optim.runtime.memory_fit import available_host_bytes

    return available_host_bytes() / facts.topology.ranks_per_node
