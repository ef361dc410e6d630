"""How long collectives take: ring, tree, two-level and in-switch algorithms over the links of a cluster.

    network = Network.of(cluster)
    all_reduce_s(network, size_bytes=2**28, ranks=64, ranks_per_node=8)

Every function takes numbers or arrays, which broadcast: sizes in bytes, ``ranks`` of the group, ``ranks_per_node`` of them that
share a node (a group of consecutive ranks fills nodes; one of stride 8 has one rank a node). They return seconds. A call is
one that all groups of its kind make at once, as in training: each rank then has its own share of the node's adapters,
``network.between.bandwidth``, whatever its group's size. Where fewer send, or other groups do, see
:mod:`~trine.optim.plan.contention`.

Times are NCCL's tuner form (:mod:`~trine.optim.plan.nccl`) with few fitted scalars a link: which share of the line rate its bus
reaches, and by what latencies exceed NCCL's: those of hops between nodes, and that of starting inside one, where hops take what
the tuner says. Other libraries are a ring of Hockney's steps, α + S/β
(``LinkConstants.hop_s``). Sizes: all-reduce and broadcast, the whole vector on a rank; reduce-scatter and all-gather, the whole
vector too (what goes in, or what comes out); all-to-all, what a rank sends to all including itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trine.optim.plan import nccl
from trine.optim.plan.nccl import Floats
from trine.optim.plan.network import LINK_CONSTANTS, LinkConstants, Network
from trine.record.errors import UsageError

__all__ = [
    "ALGORITHMS",
    "LINK_CONSTANTS",
    "Algorithm",
    "LinkConstants",
    "Network",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "broadcast_s",
    "bus_of",
    "point_to_point_s",
    "reduce_scatter_s",
]

Algorithm = Literal["auto", "ring", "tree", "two_level", "in_switch"]
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "ring", "tree", "two_level", "in_switch")
Numbers = npt.ArrayLike


@dataclass(frozen=True, slots=True)
class _Group:
    """Columns: the group's size, its ranks on a node, its nodes; the bus that rings have, in bytes a second."""

    size_bytes: Floats
    ranks: Floats
    per_node: Floats
    nodes: Floats
    inside_bus: Floats
    between_bus: Floats

    @property
    def bus(self) -> Floats:
        """Of a ring through all links: the narrower. Infinite for one rank."""
        inside = np.where(self.per_node > 1, self.inside_bus, np.inf)
        return np.minimum(inside, np.where(self.nodes > 1, self.between_bus, np.inf))


def _group(network: Network, size_bytes: Numbers, ranks: Numbers, ranks_per_node: Numbers | None) -> _Group:
    per_node = network.devices_per_node if ranks_per_node is None else ranks_per_node
    size, count, each = np.broadcast_arrays(
        *(np.asarray(x, dtype=float) for x in (size_bytes, ranks, per_node))
    )
    each = np.minimum(each, count)
    nodes = np.ceil(count / np.maximum(each, 1))
    _check(network, size, count, each, nodes)
    if network.inside is None:
        inside = np.full(count.shape, np.inf)
    else:
        line = network.inside.bandwidth.bytes_per_s * network.inside_constants.bandwidth_efficiency
        inside = line * network.lanes(each)
    if network.between is None:
        between = np.full(count.shape, np.inf)
    else:
        line = network.between.bandwidth.bytes_per_s * network.between_constants.bandwidth_efficiency
        between = line * each
    return _Group(size, count, each, nodes, inside, between)


def bus_of(
    network: Network, ranks: Numbers, ranks_per_node: Numbers | None = None
) -> tuple[Floats, Floats, Floats]:
    """What a group's ring reaches of its links inside a node and between nodes, and of both together: bytes a second that
    each rank sends. Infinite where the group has no such link. Raises ``UsageError``."""
    group = _group(network, 0.0, ranks, ranks_per_node)
    inside = np.where(group.per_node > 1, group.inside_bus, np.inf)
    between = np.where(group.nodes > 1, group.between_bus, np.inf)
    return inside, between, np.minimum(inside, between)


def _check(network: Network, size: Floats, ranks: Floats, per_node: Floats, nodes: Floats) -> None:
    if (size < 0).any() or not np.isfinite(size).all():
        raise UsageError(f"a collective's size must be at least 0 bytes, not {size.min()}")
    if not ((ranks >= 1) & (per_node >= 1)).all():
        raise UsageError(
            f"a group has at least one rank and one a node, not {ranks.min():g} and {per_node.min():g}"
        )
    if (per_node > network.devices_per_node).any():
        raise UsageError(
            f"{per_node.max():g} ranks of a group cannot share a node of {network.devices_per_node} devices"
        )
    if network.between is None and (nodes > 1).any():
        raise UsageError(
            'a group over several nodes needs a link between them: between = {bandwidth = "400 Gb/s"}'
        )


def _constants_of(network: Network, group: _Group, name: str) -> Floats:
    """A scalar of the link that governs: the one between nodes wherever a group spans some."""
    inside, between = (getattr(c, name) for c in (network.inside_constants, network.between_constants))
    return np.where(
        group.nodes > 1, np.nan if between is None else between, np.nan if inside is None else inside
    )


def _factors(network: Network, group: _Group) -> tuple[Floats, Floats]:
    """What multiplies the tuner's latency of starting, and of hops."""
    return _constants_of(network, group, "start_factor"), _constants_of(network, group, "latency_factor")


def _hop_s(network: Network, group: _Group) -> Floats:
    """α of a step of another library's ring; NaN where NCCL is meant."""
    return _constants_of(network, group, "hop_s")


def _finished(group: _Group, seconds: Floats) -> Floats:
    """Nothing is sent by one rank alone, or of no bytes."""
    return np.where((group.ranks <= 1) | (group.size_bytes <= 0), 0.0, seconds)


def _ring_s(network: Network, group: _Group, rounds: int) -> Floats:
    """``rounds`` times around: 2 an all-reduce, 1 a reduce-scatter or an all-gather. The best protocol's."""
    steps, between = rounds * (group.ranks - 1), rounds * (group.nodes - 1) * (group.nodes > 1)
    factors, hop_s = _factors(network, group), _hop_s(network, group)
    turn = rounds / 2 * _constants_of(network, group, "turn_share")
    traffic = (steps + turn) / group.ranks * group.size_bytes
    channels = nccl.channels(network.family, group.per_node, group.nodes)
    best = np.full(group.ranks.shape, np.inf)
    for protocol in network.protocols:
        latency = nccl.ring_latency_s(network.hardware, protocol, steps, between, *factors)
        if protocol == "simple" and rounds == 2:
            latency = latency * nccl.plateau(
                network.family, group.size_bytes, group.ranks, channels, group.nodes
            )
        bus = nccl.ring_bus(network.family, protocol, group.bus, channels, group.nodes)
        best = np.minimum(best, latency + traffic / bus)
    return np.where(np.isnan(hop_s), best, steps * np.nan_to_num(hop_s) + traffic / group.bus)


def _tree_s(network: Network, group: _Group) -> Floats:
    """A double binary tree (Sanders, Speck, Träff 2009): logarithmic latency, twice the vector over every bus."""
    factors, hop_s = _factors(network, group), _hop_s(network, group)
    channels = nccl.channels(network.family, group.per_node, group.nodes)
    best = np.full(group.ranks.shape, np.inf)
    for protocol in network.protocols:
        latency = nccl.tree_latency_s(network.hardware, protocol, group.per_node, group.nodes, *factors)
        bus = nccl.tree_bus(network.family, protocol, group.bus, channels, group.nodes)
        reached = bus * nccl.tree_share(protocol, group.size_bytes)
        best = np.minimum(best, latency + 2 * group.size_bytes / reached)
    plain = 2 * np.log2(group.ranks) * np.nan_to_num(hop_s) + 2 * group.size_bytes / group.bus
    return np.where(np.isnan(hop_s), best, plain)


def _in_switch_s(network: Network, group: _Group) -> Floats:
    """Switches reduce (NVLS inside a node, SHARP between): a vector goes to them once and comes back once."""
    share = nccl.in_switch_share(network.family)
    inside_reduces = network.inside is not None and network.inside.in_switch and share > 0
    network_reduces = network.between is not None and network.between.in_switch
    usable = inside_reduces | (network_reduces & (group.nodes > 1))
    # S out and S/n in where the switch reduces and multicasts; a ring's reduce-scatter and all-gather where it does not.
    inside_traffic = (
        (1 + 1 / group.per_node) / share if inside_reduces else 2 * (group.per_node - 1) / group.per_node
    )
    sent = inside_traffic * group.size_bytes
    sent = sent + np.minimum(sent, network.inside_constants.switch_fill_bytes)
    inside_s = np.where(group.per_node > 1, sent / group.inside_bus, 0.0)
    # A tree over more than two nodes has two children: what is sent down doubles (a ring's traffic in the limit).
    rounds = np.ones_like(group.nodes) if network_reduces else 2 * (group.nodes - 1) / group.nodes
    between_s = np.where(group.nodes > 1, rounds * group.size_bytes / group.between_bus, 0.0)
    start, hops = _factors(network, group)
    latency = nccl.in_switch_latency_s(group.nodes, network_reduces=network_reduces, start=start, hops=hops)
    found = latency + np.maximum(inside_s, between_s)
    return np.where(usable & np.isnan(_hop_s(network, group)), found, np.inf)


def _two_level_s(network: Network, group: _Group) -> Floats:
    """Reduce-scatter in the node, all-reduce of a share by as many groups as ranks share a node, all-gather."""
    inside_group = replace(group, ranks=group.per_node, nodes=np.ones_like(group.nodes))
    inside_s = np.where(group.per_node > 1, 2 * _ring_s(network, inside_group, 1), 0.0)
    each = np.ones_like(group.per_node)
    between_group = replace(
        group,
        size_bytes=group.size_bytes / group.per_node,
        ranks=group.nodes,
        per_node=each,
        between_bus=group.between_bus / group.per_node,
    )
    between_s = np.minimum(_ring_s(network, between_group, 2), _tree_s(network, between_group))
    return np.where(group.nodes > 1, inside_s + between_s, inside_s)


def all_reduce_s(
    network: Network,
    size_bytes: Numbers,
    ranks: Numbers,
    ranks_per_node: Numbers | None = None,
    algorithm: Algorithm = "auto",
) -> Floats:
    """Seconds of an all-reduce of ``size_bytes``. ``ranks_per_node`` None: the group fills nodes.

    ``auto`` is what NCCL would choose: the fastest of ring, tree and, where links reduce in the switch, in-switch;
    other libraries take the ring. ``two_level`` is a program's own doing and never chosen. Raises ``UsageError``: unknown algorithm, impossible group,
    ``in_switch`` where no switch reduces.
    """
    group = _group(network, size_bytes, ranks, ranks_per_node)
    if algorithm == "ring":
        return _finished(group, _ring_s(network, group, 2))
    if algorithm == "tree":
        return _finished(group, _tree_s(network, group))
    if algorithm == "two_level":
        return _finished(group, _two_level_s(network, group))
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no all-reduce is called {algorithm!r}: one of {', '.join(ALGORITHMS)}")
    in_switch = _in_switch_s(network, group)
    if algorithm == "in_switch":
        if np.isinf(in_switch[group.ranks > 1]).any():
            raise UsageError(
                "no switch of these links reduces: set in_switch of the link, or choose ring or tree"
            )
        return _finished(group, in_switch)
    tree = np.where(np.isnan(_hop_s(network, group)), _tree_s(network, group), np.inf)
    fastest = np.minimum(_ring_s(network, group, 2), tree)
    return _finished(group, np.minimum(fastest, in_switch))


def reduce_scatter_s(
    network: Network, size_bytes: Numbers, ranks: Numbers, ranks_per_node: Numbers | None = None
) -> Floats:
    """Seconds of a reduce-scatter of ``size_bytes`` (the whole vector) by ring. Raises ``UsageError``."""
    group = _group(network, size_bytes, ranks, ranks_per_node)
    return _finished(group, _ring_s(network, group, 1))


def all_gather_s(
    network: Network, size_bytes: Numbers, ranks: Numbers, ranks_per_node: Numbers | None = None
) -> Floats:
    """Seconds of an all-gather to ``size_bytes`` (the whole vector): a reduce-scatter's. Raises ``UsageError``."""
    return reduce_scatter_s(network, size_bytes, ranks, ranks_per_node)


def all_to_all_s(
    network: Network, size_bytes: Numbers, ranks: Numbers, ranks_per_node: Numbers | None = None
) -> Floats:
    """Seconds of an all-to-all of which each rank sends ``size_bytes``, a share to each. Raises ``UsageError``.

    Messages to the node's own ranks and to others' go over links of their own at the same time; a rank's adapter carries
    (n − r)/n of what it sends. A send starts a message a peer, eight at a time (NCCL's groups of sends).
    """
    group = _group(network, size_bytes, ranks, ranks_per_node)
    inside, between = network.inside_constants, network.between_constants
    share = group.size_bytes / group.ranks
    inside_s = (group.per_node - 1) * share / (group.inside_bus * inside.all_to_all_efficiency)
    between_s = (
        (group.ranks - group.per_node)
        * share
        / (group.between_bus / group.per_node * between.all_to_all_efficiency)
    )
    peers = group.ranks - 1
    rounds = np.ceil(peers / 8)
    one_s = _message_latency_s(network, group)
    hop_s = _hop_s(network, group)
    latency = np.where(np.isnan(hop_s), one_s * rounds, peers * np.nan_to_num(hop_s))
    return _finished(group, latency + np.maximum(inside_s, between_s))


def _message_latency_s(network: Network, group: _Group) -> Floats:
    """Of one message under Simple: a ring of one hop."""
    one, across = np.ones_like(group.ranks), np.where(group.nodes > 1, 1.0, 0.0)
    return nccl.ring_latency_s(network.hardware, "simple", one, across, *_factors(network, group))


def point_to_point_s(
    network: Network, size_bytes: Numbers, inside: npt.ArrayLike = False, ranks: Numbers = 2
) -> Floats:
    """Seconds from one rank to another; ``inside``: both on one node. ``ranks``: of the group whose communicator carries it:
    the more, the fewer of its channels one message has. Raises ``UsageError``."""
    within = np.asarray(inside, dtype=bool)
    if within.any() and network.devices_per_node < 2:
        raise UsageError("two ranks cannot share a node of one device")
    group = _group(network, size_bytes, np.where(within, 2, 2), np.where(within, 2, 1))
    hop_s = _hop_s(network, group)
    latency = np.where(np.isnan(hop_s), _message_latency_s(network, group), np.nan_to_num(hop_s))
    shared = nccl.message_bus(network.family, group.bus, np.asarray(ranks, dtype=float), group.nodes)
    return _finished(group, latency + group.size_bytes / np.where(np.isnan(hop_s), shared, group.bus))


def broadcast_s(
    network: Network, size_bytes: Numbers, ranks: Numbers, ranks_per_node: Numbers | None = None
) -> Floats:
    """Seconds of a broadcast from one rank by a ring that pipelines: its hops once, the vector once."""
    group = _group(network, size_bytes, ranks, ranks_per_node)
    steps, between = group.ranks - 1, (group.nodes - 1) * (group.nodes > 1)
    factors, hop_s = _factors(network, group), _hop_s(network, group)
    channels = nccl.channels(network.family, group.per_node, group.nodes)
    best = np.full(group.ranks.shape, np.inf)
    for protocol in network.protocols:
        latency = nccl.ring_latency_s(network.hardware, protocol, steps, between, *factors)
        bus = nccl.ring_bus(network.family, protocol, group.bus, channels, group.nodes)
        best = np.minimum(best, latency + group.size_bytes / bus)
    plain = np.log2(np.maximum(group.ranks, 1)) * np.nan_to_num(hop_s) + group.size_bytes / group.bus
    return _finished(group, np.where(np.isnan(hop_s), best, plain))
