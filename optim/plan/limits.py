"""The largest micro-batch and the largest context that fit: of one layout, or of any.

Other things stay as they are, so a larger micro-batch needs a larger global batch, and a longer sequence a model that is made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.problem import Problem
from trine.optim.plan.search import Searcher

__all__ = ["Limit", "Limits", "limits_of", "limits_of_any"]

#: No more is looked for.
_MOST_SEQUENCES, _MOST_TOKENS = 2**16, 2**27


@dataclass(frozen=True, slots=True)
class Limit:
    """``value``: sequences of a micro-batch, or tokens of a sequence; ``layout`` that reaches it; ``bounded`` False: more was not
    tried."""

    value: int
    layout: dict[str, int | str]
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """``micro_batch`` in sequences at the given sequence; ``context`` in tokens at a micro-batch of one. None: not even one."""

    micro_batch: Limit | None
    context: Limit | None


def limits_of(problem: Problem, layout: Layouts) -> Limits:
    """Of one layout, all else as it is."""

    def fits_sequences(size: int) -> bool:
        return _fits(problem, layout.with_changes(micro_batch=size)) is not None

    unit = _token_unit(problem, layout)

    def fits_tokens(units: int) -> bool:
        longer = _longer(problem, units * unit)
        return _fits(longer, layout.with_changes(micro_batch=1)) is not None

    size, bounded = _largest(fits_sequences, _MOST_SEQUENCES)
    units, all_tried = _largest(fits_tokens, max(_MOST_TOKENS // unit, 1))
    row = layout.row(0)
    return Limits(
        Limit(size, {**row, "micro_batch": size}, bounded) if size else None,
        Limit(units * unit, {**row, "micro_batch": 1}, all_tried) if units else None,
    )


def limits_of_any(searcher: Searcher) -> Limits:
    """Of all shapes, with whatever recomputation serves, on the devices' own memory."""
    problem = searcher.problem
    ones = _distinct(searcher.shapes)
    held: dict[int, Layouts] = {}

    def fits_sequences(size: int) -> bool:
        found = _fits(problem, _saving(ones.with_changes(micro_batch=size)))
        if found is not None:
            held[size] = found
        return found is not None

    size, bounded = _largest(fits_sequences, _MOST_SEQUENCES)
    reached: dict[int, Layouts] = {}
    unit = problem.workload.sequence

    def fits_tokens(units: int) -> bool:
        found = _fits(_longer(problem, units * unit), _saving(ones.with_changes(micro_batch=1)))
        if found is not None:
            reached[units] = found
        return found is not None

    units, all_tried = _largest(fits_tokens, max(_MOST_TOKENS // unit, 1))
    return Limits(
        Limit(size, held[size].row(0), bounded) if size else None,
        Limit(units * unit, reached[units].row(0), all_tried) if units else None,
    )


def _token_unit(problem: Problem, layout: Layouts) -> int:
    """Sequences grow by what context and tensor ranks share evenly."""
    parts = 2 * int(layout["context"][0]) * int(layout["tensor"][0])
    return int(np.lcm(parts, 128))


def _longer(problem: Problem, sequence: int) -> Problem:
    return replace(problem, workload=problem.workload.with_changes(sequence=sequence))


def _saving(layouts: Layouts) -> Layouts:
    """Each as it is, and with all of it recomputed."""
    return Layouts.joined([layouts, layouts.with_changes(recompute="full", recomputed_layers=0)])


def _distinct(shapes: Layouts) -> Layouts:
    """One of all shapes that differ in nothing but how the batch is cut into micro-batches, with the fewest in flight."""
    names = [name for name in shapes.columns if name not in ("micro_batch", "microbatches")]
    columns = np.stack([shapes[name] for name in names])
    order = np.lexsort((shapes["microbatches"],))
    _, first = np.unique(columns[:, order], axis=1, return_index=True)
    return shapes.take(order[first])


def _fits(problem: Problem, layouts: Layouts) -> Layouts | None:
    """The leanest of these, where it fits."""
    found = memory_of(problem.workload, problem.cluster, problem.stack, layouts).peak_bytes
    least = int(np.argmin(found))
    return layouts.take([least]) if found[least] <= problem.capacity_bytes else None


def _largest(fits: Callable[[int], bool], most: int) -> tuple[int, bool]:
    """The largest number from 1 to ``most`` that fits, 0 for none, by doubling and halving; whether the next was tried."""
    if not fits(1):
        return 0, True
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    if low >= most:
        return most, False
    high = min(2 * low, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, True
