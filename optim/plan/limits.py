"""The largest micro-batch and the largest context that fit: of one layout, or of any.

Other things stay as they are, so a larger micro-batch needs a larger global batch, and a longer sequence a model that is made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trine.optim.plan.layouts import OFFLOADED, Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.memory_traits import memory_spread
from trine.optim.plan.problem import Problem
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings

__all__ = ["Limit", "Limits", "any_words", "limits_of", "limits_of_any"]

#: No more is looked for.
_MOST_SEQUENCES, _MOST_TOKENS = 2**16, 2**27


@dataclass(frozen=True, slots=True)
class Limit:
    """``value``: sequences of a micro-batch, or tokens of a sequence; ``layout`` that reaches it; ``bounded`` False: more was not
    tried. ``low`` and ``high``: what fits if the memory is at the high or the low end of its own interval; 0: not even one."""

    value: int
    low: int
    high: int
    layout: dict[str, int | str]
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """``micro_batch`` in sequences at the given sequence; ``context`` in tokens at a micro-batch of one. None: not even one."""

    micro_batch: Limit | None
    context: Limit | None


#: Whether so many (sequences, or units of tokens) fit where memory is so many times what is predicted: the layout that does.
_Fits = Callable[[int, float], Layouts | None]


def limits_of(problem: Problem, layout: Layouts) -> Limits:
    """Of one layout, all else as it is."""
    unit = _token_unit(problem, layout)
    return _limits(problem, lambda size: layout.with_changes(micro_batch=size), unit)


def limits_of_any(searcher: Searcher) -> Limits:
    """Of all shapes, with whatever recomputation serves; on the devices' own memory but for what pins move elsewhere."""
    problem = searcher.problem
    leanest = problem.choices("recompute", ("none", "full"))
    pins = {"recompute": leanest, **dict.fromkeys(OFFLOADED, (0,)), **problem.pins}
    every, _ = savings(replace(problem, pins=pins), _distinct(searcher.shapes), ("recompute", *OFFLOADED))
    return _limits(problem, lambda size: every.with_changes(micro_batch=size), problem.workload.sequence)


def any_words(problem: Problem) -> str:
    """Of which layouts :func:`limits_of_any` is."""
    moves = any(max(problem.pins.get(column, (0,))) > 0 for column in OFFLOADED)
    return "of any layout" if moves else "of any layout without offload"


def _limits(problem: Problem, of_size: Callable[[int], Layouts], unit: int) -> Limits:
    """``of_size``: the layouts to choose from, with micro-batches of so many sequences; ``unit``: of tokens."""

    def sequences(size: int, factor: float) -> Layouts | None:
        return _fits(problem, of_size(size), factor)

    def tokens(units: int, factor: float) -> Layouts | None:
        return _fits(_longer(problem, units * unit), of_size(1), factor)

    return Limits(_limit(sequences, _MOST_SEQUENCES, 1), _limit(tokens, max(_MOST_TOKENS // unit, 1), unit))


def _limit(fits: _Fits, most: int, unit: int) -> Limit | None:
    """The largest number of units that fits, with its interval."""
    spread = memory_spread()
    value, layout, bounded = _largest(fits, most, 1.0)
    if layout is None:
        return None
    low, high = (_largest(fits, most, factor)[0] for factor in (spread.high, spread.low))
    return Limit(value * unit, low * unit, high * unit, layout.row(0), bounded)


def _token_unit(problem: Problem, layout: Layouts) -> int:
    """Sequences grow by what context and tensor ranks share evenly."""
    parts = 2 * int(layout["context"][0]) * int(layout["tensor"][0])
    return int(np.lcm(parts, 128))


def _longer(problem: Problem, sequence: int) -> Problem:
    return replace(problem, workload=problem.workload.with_changes(sequence=sequence))


def _distinct(shapes: Layouts) -> Layouts:
    """One of all shapes that differ in nothing but how the batch is cut into micro-batches, with the fewest in flight."""
    names = [name for name in shapes.columns if name not in ("micro_batch", "microbatches")]
    columns = np.stack([shapes[name] for name in names])
    order = np.lexsort((shapes["microbatches"],))
    _, first = np.unique(columns[:, order], axis=1, return_index=True)
    return shapes.take(order[first])


def _fits(problem: Problem, layouts: Layouts, factor: float) -> Layouts | None:
    """The leanest of these, where it fits with ``factor`` times what is predicted."""
    if not len(layouts):
        return None
    found = memory_of(problem.workload, problem.cluster, problem.stack, layouts).needed_bytes
    least = int(np.argmin(found))
    return layouts.take([least]) if factor * found[least] <= problem.capacity_bytes else None


def _largest(fits: _Fits, most: int, factor: float) -> tuple[int, Layouts | None, bool]:
    """The largest number from 1 to ``most`` that fits, 0 for none, by doubling and halving; what reaches it; whether the next
    was tried."""
    low, reached = 1, fits(1, factor)
    if reached is None:
        return 0, None, True
    while low < most:
        high = min(2 * low, most)
        more = fits(high, factor)
        if more is None:
            break
        low, reached = high, more
    else:
        return most, reached, False
    while high - low > 1:
        middle = (low + high) // 2
        more = fits(middle, factor)
        low, high, reached = (low, middle, reached) if more is None else (middle, high, more)
    return low, reached, True
