"""What overlap costs: collectives that share links, adapters that ranks share, and compute that collectives slow.

    together(seconds, loads)                      when collectives that start together end, on links that they share
    loads_of(network, ranks, ranks_per_node)      what a group's collective takes of its ranks' links
    with_senders(network, senders, adapters)      a network of which fewer ranks a node send than it has devices
    slow_down(network, …)                         how much longer compute and the collective take side by side

Links are a device's own, so groups of other devices of a node do not disturb one another (a tensor-parallel node's eight
data-parallel groups each have an adapter), unless a node has fewer adapters than devices. What shares a link gets max–min fair
shares of it (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). Arrays broadcast; seconds and shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trine.optim.plan import nccl
from trine.optim.plan.collectives import bus_of
from trine.optim.plan.nccl import Floats
from trine.optim.plan.network import Network
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError

__all__ = ["SlowDown", "fair_rates", "loads_of", "slow_down", "together", "with_senders"]

#: Below this, a rate or a share is nothing: rounding left it.
_NOTHING = 1e-12

#: Bytes of device memory a collective moves for each byte its bus carries: the peer's write into the buffer, its read, and the
#: read (to reduce) or write (to gather) of the vector itself. The switch's multicast writes and reads the vector alone.
_MEMORY_TRAFFIC, _MEMORY_TRAFFIC_IN_SWITCH = 3.0, 2.0


def fair_rates(loads: npt.ArrayLike) -> Floats:
    """Max–min fair rates of jobs on links, 1 for a job at the pace it has alone.

    ``loads``: (jobs, links, …): what part of a link a job takes when it is alone on it, 0 to 1. Returns (jobs, …).
    All rates grow together; a job stops at 1 or when a link it uses is full. Raises ``UsageError``.
    """
    taken = np.asarray(loads, dtype=np.float64)
    if taken.ndim < 2 or (taken < 0).any() or (taken > 1 + _NOTHING).any():
        raise UsageError("loads are shares of links from 0 to 1, jobs by links")
    rates = np.zeros(taken.shape[:1] + taken.shape[2:])
    growing = np.ones(rates.shape, dtype=bool)
    for _ in range(len(taken) + taken.shape[1]):
        demand = (taken * growing[:, None]).sum(axis=0)
        left = 1 - (taken * rates[:, None]).sum(axis=0)
        room = np.where(demand > _NOTHING, left / np.maximum(demand, _NOTHING), np.inf).min(axis=0)
        step = np.where(growing, np.minimum(room, 1 - rates), np.inf).min(axis=0)
        rates = rates + np.where(growing, np.maximum(step, 0.0), 0.0)
        full = 1 - (taken * rates[:, None]).sum(axis=0) <= _NOTHING
        stopped = ((taken > _NOTHING) & full).any(axis=1) | (rates >= 1 - _NOTHING)
        growing = growing & ~stopped
        if not growing.any():
            break
    return rates


def together(seconds: npt.ArrayLike, loads: npt.ArrayLike) -> Floats:
    """When each of several collectives that start at once ends. (jobs, …) from ``seconds`` alone (jobs, …) and ``loads``
    (jobs, links, …); whenever one ends the others' shares grow. Raises ``UsageError``."""
    alone, taken = np.asarray(seconds, dtype=np.float64), np.asarray(loads, dtype=np.float64)
    if (alone < 0).any() or len(alone) != len(taken):
        raise UsageError(
            f"{len(taken)} loads do not belong to {len(alone)} collectives of at least 0 seconds"
        )
    shape = np.broadcast_shapes(alone.shape[1:], taken.shape[2:])
    left = np.broadcast_to(alone, (len(alone), *shape)).copy()
    taken = np.broadcast_to(taken, (*taken.shape[:2], *shape))
    ends, now = np.zeros_like(left), np.zeros(shape)
    for _ in range(len(left)):
        running = left > _NOTHING
        rates = fair_rates(taken * running[:, None])
        needed = np.where(running, left / np.maximum(rates, _NOTHING), np.inf)
        step = needed.min(axis=0)
        step = np.where(np.isfinite(step), step, 0.0)
        now = now + step
        # The one that ends is set to nothing: a difference would leave a rest of rounding.
        left = np.where(running & (needed > step), np.maximum(left - rates * step, 0.0), 0.0)
        ends = np.where(running & (left <= _NOTHING), now, ends)
    return ends


def loads_of(network: Network, ranks: npt.ArrayLike, ranks_per_node: npt.ArrayLike | None = None) -> Floats:
    """(2, …): what a group's large collective takes of its ranks' links inside the node and to other nodes, 0 to 1.

    A ring through both goes at the pace of the narrower: a data-parallel ring over slow adapters leaves most of NVLink
    to a tensor-parallel collective beside it.
    """
    inside, between, bus = bus_of(network, ranks, ranks_per_node)
    sent = np.where(np.isfinite(bus), bus, 0.0)
    return np.stack([sent / inside, sent / between])


def with_senders(network: Network, senders: int, adapters: int) -> Network:
    """A network of which ``senders`` ranks of a node send at once through its ``adapters``.

    ``network.between`` is a device's share when all of the node's send. Fewer have more, up to an adapter each; ranks
    spread over adapters evenly. With an adapter a device nothing changes. Raises ``UsageError``.
    """
    devices = network.devices_per_node
    if network.between is None or not 1 <= senders <= devices or not 1 <= adapters <= devices:
        raise UsageError(
            f"from 1 to {devices} ranks of a node send, through 1 to {devices} adapters, "
            f"over a link between nodes: not {senders} through {adapters}"
        )
    gain = devices / adapters / -(-senders // adapters)
    wider = Bandwidth(network.between.bandwidth.bytes_per_s * gain)
    return replace(network, between=replace(network.between, bandwidth=wider))


@dataclass(frozen=True, slots=True)
class SlowDown:
    """How much longer work takes while the other kind runs beside it: 0.2 is a fifth longer.

    ``matmul``: kernels that multiprocessors bound. ``memory``: kernels that memory bounds. ``compute``: their mixture.
    ``communication``: the collective.
    """

    matmul: Floats
    memory: Floats
    compute: Floats
    communication: Floats


def slow_down(
    network: Network,
    memory: Bandwidth,
    units: int,
    ranks: npt.ArrayLike,
    ranks_per_node: npt.ArrayLike | None = None,
    memory_bound: float = 0.25,
) -> SlowDown:
    """Of a training step's compute beside a group's large collective.

    A channel of NCCL keeps a multiprocessor to itself (NVIDIA/nccl#689): of ``units``, matmuls have the rest. Its traffic
    shares ``memory``: what needs more than is there is served in proportion. The simulator takes ``compute`` and
    ``communication`` as its :class:`~trine.optim.plan.simulator.Contention`. ``memory_bound``: the part of compute's time
    that kernels take which memory bounds. Published: 18.9 % on average and 40 % at most on nodes of four A100, H100, MI210
    and MI250 (arXiv 2507.03114); a matmul of just one wave takes a second (NVIDIA developer forum 337991), which an average
    does not show. Raises ``UsageError``.
    """
    if units < 1 or not 0 <= memory_bound <= 1:
        raise UsageError(
            f"at least one unit and a share from 0 to 1 are needed, not {units} and {memory_bound}"
        )
    _, between, bus = bus_of(network, ranks, ranks_per_node)
    nodes = np.where(np.isfinite(between), 2.0, 1.0)
    idle = ~np.isfinite(bus)
    count = np.asarray(ranks, dtype=float)
    each = network.devices_per_node if ranks_per_node is None else np.asarray(ranks_per_node, dtype=float)
    channels = np.where(idle, 0.0, nccl.channels(network.family, np.minimum(each, count), nodes))
    channels = np.minimum(channels, units - 1)
    reduces = network.inside is not None and network.inside.in_switch
    traffic = _MEMORY_TRAFFIC_IN_SWITCH if reduces else _MEMORY_TRAFFIC
    share = np.minimum(traffic * np.where(idle, 0.0, bus) / memory.bytes_per_s, 1.0)
    matmul = channels / (units - channels)
    mixed = (1 - memory_bound) * matmul + memory_bound * share
    return SlowDown(matmul, share, mixed, memory_bound * share)
