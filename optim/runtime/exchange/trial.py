"""A short trial of each all-reduce, by which its prediction is corrected.

α and β of single messages leave out what an all-reduce as a whole meets: ranks that share processors, nodes that share
a network card, the cost of starting many messages. So each candidate is run at two sizes, all in turn within each
repetition, and its predictions are multiplied by measured / predicted, interpolated between the two sizes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import distributed

from trine.optim.runtime.exchange.selection import Costs, Range, Selected

__all__ = ["corrected"]

REPEATS = 4
SMALL_BYTES = 8 * 2**10
LARGE_BYTES = 4 * 2**20
#: Of predicted time at the large size, all candidates and repetitions together; smaller sizes are tried beyond it.
BUDGET_S = 0.5


def corrected(costs: Costs, names: Sequence[str], largest_bytes: int, device: torch.device) -> Costs:
    """``costs`` with factors from a trial of ``names`` at a small and a large size. Collective over all ranks."""
    world = distributed.distributed_c10d._get_default_group()
    sums = {name: Selected([Range(1, name, 0.0)], costs, costs.topology, world) for name in names}
    factors: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for size in (SMALL_BYTES, _large(costs, names, largest_bytes)):
        flat = torch.zeros(size // 4, dtype=torch.float32, device=device)
        times = []
        for _ in range(REPEATS + 1):  # the first one makes connections
            for name in names:
                distributed.all_reduce(flat[:1])  # all begin together
                times.append(_timed(sums[name], flat))
        agreed = torch.tensor(times, dtype=torch.float64, device=device)
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)  # each run as its slowest rank saw it
        fastest = agreed.view(REPEATS + 1, len(names))[1:].min(dim=0).values.tolist()
        for name, seconds in zip(names, fastest, strict=True):
            factors[name].append((float(size), seconds / costs.seconds(name, size)))
    return replace(costs, factors={name: tuple(points) for name, points in factors.items()})


def _large(costs: Costs, names: Sequence[str], largest_bytes: int) -> int:
    size = LARGE_BYTES
    while size > 4 * SMALL_BYTES and (
        size > largest_bytes or (REPEATS + 1) * sum(costs.seconds(name, size) for name in names) > BUDGET_S
    ):
        size //= 2
    return size


def _timed(run: Selected, flat: torch.Tensor) -> float:
    if flat.device.type != "cpu":
        torch.accelerator.synchronize(flat.device)
    began = time.perf_counter()
    run(flat)
    if flat.device.type != "cpu":
        torch.accelerator.synchronize(flat.device)
    return time.perf_counter() - began
