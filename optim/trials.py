"""Try changes against each other in one process, so that the machine's moods fall on all alike.

Two ways of asking what a change gains, and both are meant to be compared:

*   :func:`time_piece` times the one piece of a step that a change replaces, alone. The difference is a
    prediction: it says nothing of what the rest of the step makes of it.
*   :func:`alternate` runs whole steps of several variants in turn, one after another, in an order that changes
    each round. Slow drifts cancel in the ratio of neighbours, where runs one after the other would blame the change.

In a process group every rank runs the same variants in the same order; what is compared is the slowest rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Times", "alternate", "time_piece"]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each variant by round; position ``i`` of every list is the same round."""

    seconds: Mapping[str, tuple[float, ...]]

    def ratio(self, variant: str, against: str) -> float:
        """Median over rounds of ``variant``'s time over ``against``'s in the same round; below 1 is faster."""
        pairs = zip(self.seconds[variant], self.seconds[against], strict=True)
        return median(a / b for a, b in pairs)


def time_piece(work: Callable[[], Any], seconds: float = 0.5, least: int = 5) -> tuple[float, ...]:
    """Seconds of single calls of ``work``, after one that warms up, for about as long as said.

    ``work`` must wait for its device itself.
    """
    work()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(found) < least or (time.perf_counter() < deadline and len(found) < 200):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return tuple(found)


def alternate(
    variants: Mapping[str, Callable[[], Any]],
    seconds: float,
    *,
    warm_up: int = 1,
    least_rounds: int = 3,
    most_rounds: int = 40,
    seed: int = 0,
) -> Times:
    """Run every variant once a round until ``seconds`` are over; ``warm_up`` rounds are not counted.

    The order of a round is drawn anew each round, the same on all ranks. Rank 0's clock decides when to stop. Each
    number is the slowest rank's.
    """
    order = random.Random(seed)
    names = list(variants)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for position in range(-warm_up, most_rounds):
        order.shuffle(names)
        for name in names:
            _wait_for_device()
            begin = time.perf_counter()
            variants[name]()
            _wait_for_device()
            if position >= 0:
                rounds[name].append(time.perf_counter() - begin)
        spent = time.perf_counter() - start
        if position + 1 >= least_rounds and _agree(spent + spent / (position + 1 + warm_up) > seconds):
            break
    return Times({name: _slowest(times) for name, times in rounds.items()})


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _device() -> Any:
    import torch
    from torch import distributed

    nccl = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _grouped() -> bool:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def _agree(stop: bool) -> bool:
    """Rank 0's answer, on every rank."""
    if not _grouped():
        return stop
    import torch
    from torch import distributed

    answer = torch.tensor([int(stop)], device=_device())
    distributed.broadcast(answer, 0)
    return bool(answer.item())


def _slowest(times: list[float]) -> tuple[float, ...]:
    if not _grouped():
        return tuple(times)
    import torch
    from torch import distributed

    together = torch.tensor(times, dtype=torch.float64, device=_device())
    distributed.all_reduce(together, op=distributed.ReduceOp.MAX)
    return tuple(together.tolist())
