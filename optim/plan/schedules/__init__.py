"""Orders of a pipeline's work: one module a schedule or a family; the registry finds it by its ``SCHEDULES``.

    order_of("1f1b", Shape(ranks=8, chunks=1, microbatches=32))

An order says what each rank does after what; when, the simulator (:mod:`trine.optim.plan.simulator`) says.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from trine.optim.plan.schedules._order import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Action,
    Order,
    Schedule,
    Shape,
    Work,
)
from trine.record.errors import UsageError

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT",
    "KINDS",
    "WEIGHT",
    "Action",
    "Order",
    "Schedule",
    "Shape",
    "Work",
    "order_of",
    "schedule_named",
    "schedules",
]


@lru_cache(maxsize=1)
def schedules() -> Mapping[str, Schedule]:
    """Every schedule by its name."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )
    modules = [import_module(f"{__name__}.{name}") for name in names]
    return {schedule.name: schedule for module in modules for schedule in module.SCHEDULES}


def schedule_named(name: str) -> Schedule:
    """Raises ``UsageError`` with the nearest name."""
    found = schedules().get(name)
    if found is None:
        near = difflib.get_close_matches(name, list(schedules()), n=1)
        guess = f'; did you mean "{near[0]}"?' if near else ""
        raise UsageError(f'no schedule is called "{name}": one of {", ".join(schedules())}{guess}')
    return found


def order_of(name: str, shape: Shape, work: Work | None = None) -> Order:
    """A schedule's order. ``work``: what stages take, for schedules that are made for it; else all alike.

    Raises ``UsageError`` where the schedule cannot run the shape, with the nearest that it can.
    """
    schedule = schedule_named(name)
    if min(shape.ranks, shape.chunks, shape.microbatches) < 1:
        raise UsageError(f"a pipeline needs at least one rank, chunk and micro-batch, not {shape}")
    if schedule.chunks and shape.chunks != schedule.chunks:
        raise UsageError(f"{name} runs {schedule.chunks} chunks a rank, not {shape.chunks}")
    problem = schedule.problem(shape)
    if problem:
        raise UsageError(f"{name} with {shape.microbatches} micro-batches on {shape.ranks} ranks: {problem}")
    work = work or Work.even(shape.stages, 1.0, 1.0, 1.0)
    if len(work.forward_s) != shape.stages:
        raise UsageError(
            f"{shape.ranks} ranks of {shape.chunks} chunks are {shape.stages} stages, and times are given for "
            f"{len(work.forward_s)}"
        )
    return schedule.make(shape, work)
