"""``memory-leak``: memory grows from step to step, for good."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import MemoryOwners, median_slope
from trine.analyzers.units import size
from trine.record.model import MISSING

from ._facts import Facts, RankFacts

__all__ = ["ID", "KIND", "find"]

ID = "memory-leak"
KIND: Literal["fault"] = "fault"

#: Over this many more steps the growth must reach a share of the peak; slower than that no run ends of it.
AHEAD_STEPS, AHEAD_SHARE = 1000, 0.01

#: Without the allocator's events, from samples of a device: the run is cut into stretches of equal length, of
#: which the lowest sample each counts. As many stretches, samples in each, and steps at least.
STRETCHES, SAMPLES_EACH, LEAST_STEPS = 8, 5, 30
#: Of the stretches, the share that must lie above the one before, and the growth in all.
STEADY, GROWN_BYTES, GROWN_SHARE = 0.85, 64 << 20, 0.02
#: Stretches at the start that fill caches.
WARM_UP_STRETCHES = 1


@dataclass(frozen=True, slots=True)
class _Growth:
    rank: int
    per_step_bytes: float
    first_bytes: int
    last_bytes: int
    steps: int
    peak_bytes: int
    basis: str
    owner: str | None = None
    category: str | None = None
    stack: tuple[str, ...] = ()


def find(facts: Facts) -> Finding | None:
    """The fastest growth, when it matters within :data:`AHEAD_STEPS` steps."""
    if facts.trains is False:
        return None  # generation grows by a token's keys and values each step, as it should
    growths = [*_by_owner(facts), *(one for rank in facts.ranks if (one := _from_samples(rank)) is not None)]
    # Where the owner is known it is worth more than the sum without one.
    worst = max(growths, key=lambda growth: (growth.owner is not None, growth.per_step_bytes), default=None)
    if worst is None or worst.per_step_bytes * AHEAD_STEPS < AHEAD_SHARE * worst.peak_bytes:
        return None
    capacity = _capacity(facts, worst.rank)
    left = None if capacity is None else max(int((capacity - worst.peak_bytes) / worst.per_step_bytes), 0)
    where = f", held by {worst.owner}" if worst.owner else ""
    title = f"Rank {worst.rank}'s memory grows by {size(worst.per_step_bytes)} a step{where}"
    if left is not None and left < 1_000_000:
        title += f"; at this rate it is full in about {left:,} steps"
    evidence = {
        "rank": worst.rank,
        "per_step_bytes": round(worst.per_step_bytes),
        "first_bytes": worst.first_bytes,
        "last_bytes": worst.last_bytes,
        "steps": worst.steps,
        "peak_bytes": worst.peak_bytes,
        "basis": worst.basis,
    }
    if worst.owner:
        evidence |= {"owner": worst.owner, "category": worst.category, "stack": list(worst.stack[:6])}
    if left is not None:
        evidence["steps_left"] = left
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence=evidence,
        recommendation=Recommendation(
            change={},
            why="Something keeps each step's tensors. The usual causes: a loss or output added to a list or a sum "
            "with its graph (use .item() or .detach()), a cache without a bound, retain_graph=True."
            + (
                ""
                if worst.owner
                else " A snapshot (torch.cuda.memory._record_memory_history) names the line."
            ),
            numerics="unchanged",
            predicted=None,
        ),
        severity=min(0.5, worst.per_step_bytes * AHEAD_STEPS / max(worst.peak_bytes, 1)),
    )


def _capacity(facts: Facts, rank: int) -> int | None:
    memory = next((r.result.summary.memory for r in facts.ranks if r.rank == rank), None)
    return (memory.capacity_bytes if memory is not None else None) or facts.analysis.hardware.memory_bytes


def _by_owner(facts: Facts) -> list[_Growth]:
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    return [
        _Growth(
            part.rank,
            leak.per_step_bytes,
            leak.first_bytes,
            leak.last_bytes,
            leak.steps,
            part.peak_bytes,
            "allocations alive at the end of each step",
            leak.owner or _unnamed(leak.category),
            leak.category,
            leak.stack,
        )
        for part in (found.ranks if found is not None else ())
        if facts.trains or {"gradients", "activations"} & set(part.categories)
        for leak in part.leaks[:1]
    ]


def _unnamed(category: str) -> str:
    """Words for an owner of which only the category is known."""
    if category == "unattributed":
        return "an owner without a stack"
    return f"an owner without a stack, category {category.replace('_', ' ')}"


def _from_samples(rank: RankFacts) -> _Growth | None:
    """Growth of a device's allocated memory over the run, from periodic samples."""
    memory, steps = rank.result.summary.memory, rank.result.summary.steps
    if memory is None or memory.kind != "device" or memory.peak_bytes is None or steps is None:
        return None
    ends = steps["end_ns"][steps["end_ns"] != MISSING]
    if len(ends) < LEAST_STEPS or len(memory.series) < STRETCHES * SAMPLES_EACH:
        return None
    if rank.result.summary.format != "trine":
        return None  # a trace's own events tell who holds it, or that nobody grows
    time = np.array([point[0] for point in memory.series])
    level = np.array([point[1] for point in memory.series], dtype=np.float64)
    stretch = np.linspace(0, len(time), STRETCHES + 1).astype(int)
    lowest = np.array([level[a:b].min() for a, b in itertools.pairwise(stretch)])
    lowest = lowest[WARM_UP_STRETCHES:]
    grown = lowest[-1] - lowest[0]
    if grown < max(GROWN_BYTES, GROWN_SHARE * memory.peak_bytes) or (np.diff(lowest) > 0).mean() < STEADY:
        return None
    first = int(stretch[WARM_UP_STRETCHES])
    count = int(((ends > time[first]) & (ends <= time[-1])).sum())
    if count < LEAST_STEPS // 2:
        return None
    per_step = median_slope(lowest) * len(lowest) / count
    return _Growth(
        rank.rank,
        per_step,
        int(lowest[0]),
        int(lowest[-1]),
        count,
        memory.peak_bytes,
        "lowest samples over the run",
    )
