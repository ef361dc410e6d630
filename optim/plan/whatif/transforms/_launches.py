"""What work that a change adds on a device costs its host: a launch each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from trine.optim.plan.whatif.graph import HOST, LINK, Task

__all__ = ["with_launches"]


def with_launches(tasks: Iterable[Task], recorded: Sequence[Task]) -> list[Task]:
    """``tasks`` with a launch before each kernel that ``recorded`` has not, as long as its launches usually lie apart.

    Where the host computes by itself nothing is launched.
    """
    known = {task.number for task in recorded}
    seconds = _spacing_s(recorded)
    found: list[Task] = []
    for task in tasks:
        if task.name and task.lane not in (HOST, LINK) and task.number not in known:
            launch = Task(seconds, task.phase)
            found += [launch, replace(task, after=(*task.after, launch.number))]
        else:
            found.append(task)
    return found


def _spacing_s(recorded: Sequence[Task]) -> float:
    """The host's median time before a kernel that is behind another."""
    apart = [
        task.seconds
        for task, kernel in pairwise(recorded)
        if task.lane == HOST and kernel.lane not in (HOST, LINK) and task.number in kernel.after
    ]
    return median(apart) if apart else 0.0
