"""Repeated blocks, found by their products: a model's layers multiply the same shapes again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from trine.optim.plan.whatif.graph import HOST, LINK, RankStep, Task
from trine.record.errors import UsageError

__all__ = ["Block", "blocks_of", "compute_lane", "require_operators"]


@dataclass(frozen=True, slots=True)
class Block:
    """Forward tasks [first, last) of a step's tasks, and autograd's largest number among them."""

    first: int
    last: int
    sequence: int


def require_operators(basis: str, key: str) -> None:
    """Raise ``UsageError`` where a record holds no operators."""
    if basis == "phases":
        raise UsageError(
            f"{key} changes single operators, and this record has no deep window: record one (windows=(10, 12) of "
            "trine.profile, its default), or give traces"
        )


def compute_lane(tasks: Sequence[Task]) -> str:
    """Where products run: the host, or the stream with most of their time."""
    lanes: dict[str, float] = {}
    for task in tasks:
        if task.kind == "product" and task.lane != LINK:
            lanes[task.lane] = lanes.get(task.lane, 0.0) + task.seconds
    return max(lanes, key=lambda lane: lanes[lane], default=HOST)


def blocks_of(step: RankStep) -> list[Block]:
    """Blocks of the forward, at least two alike; empty where none repeat."""
    tasks = step.tasks
    places = [place for place, task in enumerate(tasks) if task.phase == "forward" and task.kind == "product"]
    shapes = [tasks[place].operator.product for place in places]
    first, period, repeats = _repetition(tuple(shapes))
    if repeats < 2:
        return []
    bounds = [places[first + period * number] for number in range(repeats)]
    length = bounds[-1] - bounds[-2]
    # What lies before a block's first product (its norm) is taken from behind the block: as long, and the same work.
    bounds.append(min(bounds[-1] + length, len(tasks)))
    found = []
    for begin, end in pairwise(bounds):
        numbers = [task.sequence for task in tasks[begin:end] if task.phase == "forward"]
        found.append(Block(begin, end, max(numbers, default=-1)))
    return found


@lru_cache(maxsize=64)  # ranks and steps multiply alike
def _repetition(shapes: tuple[object, ...]) -> tuple[int, int, int]:
    """(first, period, repeats) of the run that covers most, of the shortest period and the earliest."""
    codes: dict[object, int] = {}
    numbers = np.array([codes.setdefault(shape, len(codes)) for shape in shapes])
    best = (0, 0, 0)
    for period in range(1, len(numbers) // 2 + 1):
        unlike = np.flatnonzero(numbers[:-period] != numbers[period:])
        bounds = np.concatenate(([-1], unlike, [len(numbers) - period]))
        # A stretch of so many that equal what comes a period later is one repeat and as many more as periods fit in.
        repeats = (np.diff(bounds) - 1) // period + 1
        place = int(repeats.argmax())
        if repeats[place] > 1 and repeats[place] * period > best[1] * best[2]:
            best = (int(bounds[place]) + 1, period, int(repeats[place]))
    return best
