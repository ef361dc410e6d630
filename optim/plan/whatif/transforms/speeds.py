"""Faster hardware: products, memory or links so many times as fast."""

from __future__ import annotations

from trine.optim.plan.whatif.graph import Graph, mapped
from trine.optim.plan.whatif.transforms import Change
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("product_speed", "memory_speed", "link_speed")
ORDER = 75

#: Beyond these factors a step is one kind of work alone, and numbers overflow.
MOST_TIMES = 1e6

_KINDS = {"product_speed": "product", "memory_speed": "memory", "link_speed": "transfer"}


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` for a speed that no machine has, or where the record holds no such work."""
    for key, kind in _KINDS.items():
        if key not in change.given:
            continue
        speed = change.given[key]
        if (
            not isinstance(speed, int | float)
            or isinstance(speed, bool)
            or not 1 / MOST_TIMES <= speed <= MOST_TIMES
        ):
            raise UsageError(f"{key}: how many times as fast, from a millionth to a million, not {speed!r}")
        if speed == 1:
            raise UsageError(f"{key} = 1: as fast as it is, so nothing would change: ask for another number")
        if not any(task.kind == kind for task in graph.steps[0].ranks[0].tasks):
            raise UsageError(f"{key}: this record holds no {kind} to be timed")
        graph = mapped(
            graph,
            lambda step, kind=kind, speed=speed: [  # type: ignore[misc]
                task.times(1 / speed) if task.kind == kind else task for task in step.tasks
            ],
        )
    return graph
