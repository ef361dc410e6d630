"""NCCL's tuner: what it expects of an algorithm and a protocol, from the constants in ``nccl.csv``.

NCCL chooses between ring and tree, and between its protocols LL, LL128 and Simple, by an expected time
t = latency + S / bandwidth (github.com/NVIDIA/nccl, ``src/graph/tuning.cc``). The form holds far better than its stock
constants: measured latencies and bandwidths are its own times a factor a link (:class:`~trine.optim.plan.collectives.LinkConstants`),
one on what starting takes (``start``) and one on what messages take (``hops``).

Everything here is in seconds and bytes a second, and broadcasts over arrays: ``ranks`` of a group, ``nodes`` they lie on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from trine.optim.plan._tables import packaged_rows

__all__ = [
    "PROTOCOLS",
    "Floats",
    "Hardware",
    "Protocol",
    "channels",
    "in_switch_latency_s",
    "in_switch_share",
    "message_bus",
    "plateau",
    "ring_bus",
    "ring_latency_s",
    "tree_bus",
    "tree_latency_s",
    "tree_share",
]

Floats = npt.NDArray[np.float64]
#: What multiplies a latency of the tuner's.
Factor = Floats | float
Protocol = Literal["ll", "ll128", "simple"]
#: What a hop goes through, as the tuner distinguishes it.
Hardware = Literal["nvlink", "pci"]

PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")

#: Shares of the bus that protocols and trees leave to the payload (tuning.cc): LL carries a flag with every 4 bytes,
#: LL128 with every 120, trees lose to their fan-in.
_LL_SHARE, _LL128_SHARE, _TREE_SHARE, _TREE_LL_SHARE = 0.5, 0.92, 0.92, 1 / 3.8
_TREE_LL128_SHARE_ONE_NODE, _TREE_LL128_SHARE = 7 / 9, 120 / 128
#: LL's 8-byte stores do not reach what the tuner grants them: with a quarter of it, logged all-reduces of 64 KB to 256 KB on
#: A100 and H100 nodes, one and several, are met (``benchmarks/planner_collectives.py``).
_LL_REACHED = 0.25
#: Ring and Simple between nodes: from 64 B a rank and channel on, latency grows at once (tuning.cc, "plateau").
_PLATEAU_BYTES = 64.0
_PLATEAU_FACTOR, _PLATEAU_FACTOR_BEFORE_AMPERE = 1.4, 1.9
_SCALES = {"us": 1e-6, "GB/s": 1e9, "count": 1.0, "fraction": 1.0}


@lru_cache(maxsize=1)
def _constants() -> Mapping[tuple[str, str, str], Mapping[str, float]]:
    """(constant, where, algorithm) → protocol → value, in seconds and bytes a second."""
    return {
        (row["constant"], row["where"], row["algorithm"]): {
            protocol: float(row[protocol]) * _SCALES[row["unit"]] if row[protocol] else math.nan
            for protocol in PROTOCOLS
        }
        for row in packaged_rows("nccl.csv")
    }


def _value(constant: str, where: str, algorithm: str, protocol: Protocol) -> float:
    return _constants()[constant, where, algorithm][protocol]


def _by_nodes(constant: str, family: str, algorithm: str, protocol: Protocol, nodes: Floats) -> Floats:
    """A constant that has a column for one node, two, and more. Infinite where the tuner knows no such device."""
    found = [
        next(
            (
                _value(constant, where, algorithm, protocol)
                for where in (f"{family}/{count}", f"any/{count}")
                if (constant, where, algorithm) in _constants()
            ),
            math.inf,
        )
        for count in (1, 2, 4)
    ]
    return np.asarray(np.select([nodes <= 1, nodes <= 2], found[:2], found[2]), dtype=np.float64)


def channels(family: str, per_node: Floats, nodes: Floats) -> Floats:
    """Channels of a collective: as many streaming multiprocessors (or compute units) as NCCL takes from compute.

    Between nodes so many an adapter, and an adapter for each of a group's ranks on a node.
    """
    known = _constants().get(("channels", f"{family}/1", ""), _constants()["channels", "ampere/1", ""])
    between = per_node * _value("channels_per_adapter", "network", "", "simple")
    return np.where(nodes > 1, between, known["simple"])


def message_bus(family: str, bus: Floats, ranks: Floats, nodes: Floats) -> Floats:
    """Bytes a second of one message between two ranks of a communicator of ``ranks``.

    A communicator shares its channels out among all peers that a rank may send to, so one message has few of them, and a
    channel copies no faster than under LL128.
    """
    most, all_of_them, least = (
        _value("message_channels", where, "", "simple") for where in ("most", "any", "least")
    )
    count = np.clip(all_of_them / 2 ** np.ceil(np.log2(np.maximum(ranks, 1))), least, most)
    return np.asarray(np.minimum(bus, count * _by_nodes("channel_bandwidth", family, "ring", "ll128", nodes)))


def ring_latency_s(
    hardware: Hardware,
    protocol: Protocol,
    steps: Floats,
    between: Floats,
    start: Factor = 1.0,
    hops: Factor = 1.0,
) -> Floats:
    """Of a ring of ``steps`` hops, ``between`` of which cross nodes; others then cost at least the network's posting."""
    inside_s = _value("hop_latency", hardware, "ring", protocol)
    posting_s = _value("ring_overhead", "network", "ring", protocol)
    hop_s = np.where(between > 0, max(inside_s, posting_s), inside_s)
    network_s = _value("hop_latency", "network", "ring", protocol)
    base_s = _value("base_latency", "", "ring", protocol)
    return np.asarray(start * base_s + hops * ((steps - between) * hop_s + between * network_s))


def plateau(family: str, size_bytes: Floats, ranks: Floats, count: Floats, nodes: Floats) -> Floats:
    """What multiplies the latency of an all-reduce by ring and Simple."""
    factor = _PLATEAU_FACTOR_BEFORE_AMPERE if family == "volta" else _PLATEAU_FACTOR
    reached = (nodes > 1) & (size_bytes >= _PLATEAU_BYTES * ranks * count)
    return np.where(reached, factor, 1.0)


def tree_latency_s(
    hardware: Hardware,
    protocol: Protocol,
    per_node: Floats,
    nodes: Floats,
    start: Factor = 1.0,
    hops: Factor = 1.0,
) -> Floats:
    """Of a double binary tree over nodes, a chain inside each: up and down again."""
    inside_s = _value("hop_latency", hardware, "tree", protocol)
    network_s = _value("hop_latency", "network", "tree", protocol)
    base_s = _value("base_latency", "", "tree", protocol)
    there_s = (per_node - 1) * inside_s + np.log2(nodes) * network_s
    return np.asarray(start * base_s + hops * 2 * there_s)


def in_switch_latency_s(
    nodes: Floats, *, network_reduces: bool, start: Factor = 1.0, hops: Factor = 1.0
) -> Floats:
    """Of NVLS inside a node, which is mostly starting; between nodes its switches reduce too, or a tree does."""
    inside_s = start * _value("hop_latency", "nvlink", "in_switch", "simple")
    if network_reduces:
        network_s = np.where(nodes > 1, _value("hop_latency", "network", "in_switch", "simple"), 0.0)
    else:
        network_s = 2 * np.log2(nodes) * _value("hop_latency", "network", "in_switch_tree", "simple")
    return np.asarray(inside_s + hops * network_s)


def in_switch_share(family: str) -> float:
    """Of the link's bandwidth, where the switch reduces; 0 for families whose switches do not."""
    found = _constants().get(("in_switch_share", family, "in_switch"))
    return 0.0 if found is None else found["simple"]


def ring_bus(family: str, protocol: Protocol, bus: Floats, count: Floats, nodes: Floats) -> Floats:
    """Bytes a second of a ring's bus that carry payload under a protocol; ``bus``: what links give; ``count``: channels."""
    if protocol == "ll":
        most = _by_nodes("low_latency_bandwidth", family, "", "ll", nodes)
        return _LL_REACHED * np.minimum(bus * _LL_SHARE, most)
    if protocol == "ll128":
        most = count * _by_nodes("channel_bandwidth", family, "ring", "ll128", nodes)
        return np.minimum(bus * _LL128_SHARE, most)
    return bus


def tree_bus(family: str, protocol: Protocol, bus: Floats, count: Floats, nodes: Floats) -> Floats:
    """The same of a double tree, before :func:`tree_share`."""
    found: Floats = np.minimum(
        bus * _TREE_SHARE, count * _by_nodes("channel_bandwidth", family, "tree", "simple", nodes)
    )
    if protocol == "ll":
        most = _by_nodes("low_latency_bandwidth", family, "", "ll", nodes)
        return _LL_REACHED * np.minimum(found * _TREE_LL_SHARE, most)
    if protocol == "ll128":
        share = np.where(nodes <= 1, _TREE_LL128_SHARE_ONE_NODE, _TREE_LL128_SHARE)
        most = count * _by_nodes("channel_bandwidth", family, "tree", "ll128", nodes)
        return np.minimum(found * share, most)
    return found


@lru_cache(maxsize=len(PROTOCOLS))
def _tree_shares(protocol: Protocol) -> tuple[Floats, Floats]:
    found = sorted(
        (math.log2(float(where)), values[protocol])
        for (constant, where, _), values in _constants().items()
        if constant == "tree_share"
    )
    exponents, shares = zip(*found, strict=True)
    return np.asarray(exponents), np.asarray(shares)


def tree_share(protocol: Protocol, size_bytes: Floats) -> Floats:
    """What medium messages reach of a tree's bandwidth (tuning.cc, correction table), between its powers of two by
    interpolation: its steps would let a longer message take less time."""
    exponents, shares = _tree_shares(protocol)
    return np.asarray(np.interp(np.log2(np.maximum(size_bytes, 1.0)), exponents, shares))
