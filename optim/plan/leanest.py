"""The layout of a search that needs the least of a device's memory, and why even that does not fit.

A shape's bound (``Searcher.leanest_bytes``) takes every saving at once, which the software may not run together, so what
has the lowest bound need not be the leanest: shapes are expanded in order of their bounds until none can be below what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.layouts import OFFLOADED
from trine.optim.plan.memory import MemoryEstimate, memory_of
from trine.optim.plan.reasons import host_too_small, too_large
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings, savings_words

__all__ = ["Leanest", "leanest", "leanest_words"]

#: Shapes that are expanded at a time.
_BATCH = 200
_EVERY = ("recompute", *OFFLOADED)


@dataclass(frozen=True, slots=True)
class Leanest:
    """``needed_bytes``: of a device, the least of any layout whose hosts hold what is moved there, infinite where none do.
    ``peak_bytes``: the least whatever they hold, and ``parts`` of it by category; ``away_bytes``: the least that a node's host
    has to hold of those that fit a device, None where none does."""

    needed_bytes: float
    peak_bytes: float
    parts: dict[str, float]
    away_bytes: float | None


def leanest(searcher: Searcher) -> Leanest | None:
    """Of all layouts that a search can reach; None where there are none."""
    problem, bounds = searcher.problem, searcher.leanest_bytes
    order = np.argsort(bounds, kind="stable")
    found: Leanest | None = None
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        if found is not None and bounds[batch[0]] >= found.needed_bytes:
            break
        every, _ = savings(problem, searcher.shapes.take(batch), _EVERY)
        if len(every):
            memory = memory_of(problem.workload, problem.cluster, problem.stack, every)
            found = _less(found, _of(memory, problem.capacity_bytes))
    return found


def leanest_words(searcher: Searcher) -> str:
    """Why nothing fits: of the leanest layout, how much it lacks and what takes most."""
    problem, found = searcher.problem, leanest(searcher)
    if found is None:
        return savings_words(problem, searcher.shapes.take([int(np.argmin(searcher.leanest_bytes))]))
    if found.away_bytes is not None:
        return host_too_small(found.away_bytes, problem)
    return f"the leanest layout {too_large(found.peak_bytes, found.parts, problem)}"


def _of(memory: MemoryEstimate, room_bytes: float) -> Leanest:
    least = int(np.argmin(memory.peak_bytes))
    within = memory.peak_bytes <= room_bytes
    away: Column = memory.host_bytes + memory.remote_bytes
    return Leanest(
        float(memory.needed_bytes.min()),
        float(memory.peak_bytes[least]),
        {name: float(column[least]) for name, column in memory.parts.items()},
        float(away[within].min()) if within.any() else None,
    )


def _less(one: Leanest | None, other: Leanest) -> Leanest:
    if one is None:
        return other
    slim = one if one.peak_bytes <= other.peak_bytes else other
    away = [each.away_bytes for each in (one, other) if each.away_bytes is not None]
    return Leanest(
        min(one.needed_bytes, other.needed_bytes),
        slim.peak_bytes,
        slim.parts,
        min(away) if away else None,
    )
