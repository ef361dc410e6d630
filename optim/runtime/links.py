"""What messages cost between ranks: latency α and bandwidth β, measured, and the same numbers on every rank.

T(S) = α + S/β (Hockney, Parallel Computing 20, 1994) for one operation on one process group. A calibration of this
machine (``trine hardware --calibrate``) is taken where it is about the same operation, backend and number of ranks;
else the operation is timed on the spot, in about a third of a second, once for each group. Whatever decides by these
numbers decides alike on every rank, because they are agreed before they are returned.

    all_reduce   the backend's own, S bytes in place
    broadcast    the backend's own, S bytes from the group's first rank
    shift        every rank sends S bytes to the next and receives as many from the one before: a step of a ring
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from trine.optim.runtime.groups import node_groups
from trine.optim.topology import Topology
from trine.record.hardware import calibrated, fit_latency_bandwidth, processor_name

__all__ = ["Link", "Links", "Operation", "link_of", "node_links"]

Operation = Literal["all_reduce", "broadcast", "shift"]

#: A measurement stops before the size that would pass this, but not before three sizes are known.
BUDGET_S = 0.3
SIZES_BYTES = tuple(2**exponent for exponent in (3, 13, 16, 19, 21, 23))
REPEATS = 6

ON_THE_SPOT = "measured on the spot"
CALIBRATED = "trine hardware --calibrate"


@dataclass(frozen=True, slots=True)
class Link:
    """One operation on one group: T(S) = ``alpha_s`` + S / ``bytes_per_s``, S in bytes."""

    alpha_s: float
    bytes_per_s: float
    backend: str
    ranks: int
    source: str

    def seconds(self, size_bytes: float) -> float:
        """Predicted time of the operation on ``size_bytes``."""
        return self.alpha_s + size_bytes / self.bytes_per_s

    def __str__(self) -> str:
        return (
            f"α {self.alpha_s * 1e6:.0f} µs, β {self.bytes_per_s / 1e9:.2f} GB/s "
            f"({self.backend}, {self.ranks} ranks, {self.source})"
        )


@dataclass(frozen=True, slots=True)
class Links:
    """One operation over all ranks, inside a node and across nodes; the slowest node's, agreed by all ranks."""

    whole: Link
    inside: Link | None  # None: one rank a node
    across: (
        Link | None
    )  # None: one node. Measured with every rank of a node sending, as two-level exchange has it


_MEASURED: WeakKeyDictionary[distributed.ProcessGroup, dict[tuple[str, str], Link]] = WeakKeyDictionary()


def link_of(
    operation: Operation, device: torch.device, group: distributed.ProcessGroup | None = None
) -> Link:
    """The link of ``operation`` over ``group`` (default: all ranks) for tensors on ``device``; kept for later calls.

    Collective over the group, in the set-up: on a device it waits for it. The group has at least two ranks.
    """
    group = distributed.distributed_c10d._get_default_group() if group is None else group
    kept = _MEASURED.setdefault(group, {})
    key = (operation, device.type)
    if key not in kept:
        kept[key] = _from_calibration(operation, device, group) or _measure(operation, device, group)
    return kept[key]


def node_links(operation: Operation, device: torch.device, topology: Topology) -> Links:
    """The links of ``operation`` over all ranks, inside a node and across nodes. Collective over all ranks."""
    groups = node_groups(topology)
    whole = link_of(operation, device)
    parts = [groups.inside, groups.across]
    return Links(whole, *(None if part is None else _agreed(operation, device, part) for part in parts))


# --- parts -------------------------------------------------------------------------------------


def _agreed(operation: Operation, device: torch.device, part: distributed.ProcessGroup) -> Link:
    """The slowest of the parallel groups' links: all ranks are in one of them, and all wait for the slowest."""
    own = link_of(operation, device, part)
    worst = _largest([own.alpha_s, 1 / own.bytes_per_s], device, None)
    return Link(worst[0], 1 / worst[1], own.backend, own.ranks, own.source)


def _backend(device: torch.device, group: distributed.ProcessGroup) -> str:
    # A group made without naming a backend has one a kind of device, and ``get_backend`` says "undefined".
    return str(group._get_backend(device).name())


def _largest(
    values: list[float], device: torch.device, group: distributed.ProcessGroup | None
) -> list[float]:
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=group)
    found: list[float] = agreed.tolist()
    return found


def _from_calibration(
    operation: Operation, device: torch.device, group: distributed.ProcessGroup
) -> Link | None:
    """This machine's calibration, if all ranks are on one machine and its first rank has one that matches."""
    if operation != "all_reduce":
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    peaks = calibrated(name)
    collective = peaks.collective if peaks else {}
    backend, ranks = _backend(device, group), group.size()
    matches = collective.get("backend") == backend and collective.get("ranks") == ranks
    # 48 bits of the host's name are exact in float64.
    host = float(int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big"))
    if group.rank() == 0 and matches:
        own = [host, -host, float(collective["alpha_s"]), float(collective["bytes_per_s"])]
    else:
        own = [host, -host, 0.0, 0.0]
    highest, lowest, alpha, beta = _largest(own, device, group)
    if highest != -lowest or alpha <= 0.0 or beta <= 0.0:
        return None
    return Link(alpha, beta, backend, ranks, CALIBRATED)


def _measure(operation: Operation, device: torch.device, group: distributed.ProcessGroup) -> Link:
    """The fastest of :data:`REPEATS` at growing sizes, each as the slowest rank saw it, by least squares."""
    began = time.perf_counter()
    sizes: list[int] = []
    seconds: list[float] = []
    for size in SIZES_BYTES:
        run = _prepared(operation, size, device, group)
        run()  # connections, communicators, first touch of memory
        times = [_timed(run, device) for _ in range(REPEATS)]
        *slowest, elapsed = _largest([*times, time.perf_counter() - began], device, group)
        sizes.append(size)
        seconds.append(min(slowest))
        if len(sizes) >= 3 and elapsed + (REPEATS + 1) * seconds[-1] * 4 > BUDGET_S:
            break
    alpha, beta = fit_latency_bandwidth(sizes, seconds)
    return Link(alpha, beta, _backend(device, group), group.size(), ON_THE_SPOT)


def _prepared(
    operation: Operation, size: int, device: torch.device, group: distributed.ProcessGroup
) -> Callable[[], Any]:
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    if operation == "all_reduce":
        return lambda: distributed.all_reduce(tensor, group=group)
    if operation == "broadcast":
        return lambda: distributed.broadcast(tensor, group=group, group_src=0)
    received = torch.zeros_like(tensor)
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()

    def shift() -> None:
        send = distributed.P2POp(distributed.isend, tensor, group=group, group_peer=after)
        receive = distributed.P2POp(distributed.irecv, received, group=group, group_peer=before)
        for work in distributed.batch_isend_irecv([send, receive]):
            work.wait()

    return shift


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds. A device is waited for: this is the set-up, not a step."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
