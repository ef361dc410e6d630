"""Leaks across steps: what is alive at the end of each step, by the place that allocated it, and grows.

Memory differs within a step by gigabytes, and between the same points of two steps by nothing: what grows
there grows for good. A place leaks where its bytes grow from step to step nearly always, and by enough to
matter. The growth is the median of the slopes between all pairs of steps (Theil 1950, Sen 1968), which a
third of odd steps cannot move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MIN_STEPS", "Growth", "ends_by_gradients", "growing", "growing_levels", "median_slope"]

Array = npt.NDArray[Any]

#: Step ends that must be seen, warm-up left out.
MIN_STEPS = 5
#: So many are enough (a short trace has no more) where each step adds the same, within this share.
FEW_STEPS, EVEN_SHARE = 4, 0.05
#: The first step fills caches and makes optimizer state.
WARM_UP = 1
#: Of the steps, the share in which a place must have grown.
STEADY = 0.8
#: Growth over the steps seen that counts: bytes, and as a share of the largest total.
LEAST_BYTES = 1 << 20
LEAST_SHARE = 0.005
#: Step ends that are looked at; of more, as many evenly spread.
_MOST_STEPS = 64
#: Gradients are there at this share of their most, and gone at that: a step ended between.
_THERE, _GONE = 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Growth:
    """A place (or the whole, -1) that grows: ``per_step_bytes`` between the first and last of ``steps`` step ends."""

    place: int
    per_step_bytes: float
    first_bytes: int
    last_bytes: int
    steps: int


def growing(place: Array, size: Array, start_ns: Array, end_ns: Array, ends_ns: Array) -> list[Growth]:
    """Places that grow, the fastest first.

    ``place`` (allocations,) numbers who allocated, ``size`` bytes, ``start_ns`` and ``end_ns`` when each lived (the
    end past every step where it was not released), ``ends_ns`` (steps,) the steps' ends, ascending. Empty
    where fewer than :data:`FEW_STEPS` steps are left after warm-up; with fewer than :data:`MIN_STEPS`, only places
    that grow evenly.
    """
    kept, stride = _looked_at(ends_ns)
    if not len(kept) or not len(place):
        return []
    names, number = np.unique(place, return_inverse=True)
    levels = np.zeros((len(names), len(kept)), dtype=np.float64)
    for column, when in enumerate(kept):
        alive = (start_ns <= when) & (end_ns > when)
        levels[:, column] = np.bincount(number[alive], weights=size[alive], minlength=len(names))
    return _grown(names, levels, stride)


def growing_levels(place: Array, levels: Array, time_ns: Array, ends_ns: Array) -> list[Growth]:
    """The same of a curve: ``levels`` (places, times) are the bytes alive after each of ``time_ns``, ascending."""
    kept, stride = _looked_at(ends_ns)
    rows = np.searchsorted(time_ns, kept, side="right") - 1
    return _grown(place, levels[:, rows].astype(np.float64), stride) if len(kept) else []


def ends_by_gradients(time_ns: Array, gradients: Array) -> Array:
    """Ends of steps where nothing marks them: when the ``gradients`` (times,), in bytes, were there and are gone.

    Empty where they stay, as with ``zero_grad(set_to_none=False)``. Batches that accumulate are one step.
    """
    most = float(gradients.max(initial=0))
    there, gone = gradients >= _THERE * most, gradients <= _GONE * most
    rows = np.flatnonzero(there | gone) if most > 0 else np.empty(0, dtype=np.int64)
    return time_ns[rows[1:][there[rows[:-1]] & gone[rows[1:]]]]


def _looked_at(ends_ns: Array) -> tuple[Array, int]:
    """The step ends that are looked at, every how many-th; none where there are too few."""
    ends = ends_ns[WARM_UP:]
    if len(ends) < FEW_STEPS:
        return ends[:0], 1
    stride = -(-len(ends) // _MOST_STEPS)
    return ends[::stride], stride


def _grown(names: Array, levels: Array, stride: int) -> list[Growth]:
    """Rows of ``levels`` (places, steps) that grow, the fastest first."""
    total = levels.sum(axis=0)
    least = max(LEAST_BYTES, LEAST_SHARE * float(total.max()))
    if total[-1] - total[0] < least:
        return []  # what one place gains another gives back
    found = []
    for row in np.flatnonzero(levels[:, -1] - levels[:, 0] >= least).tolist():
        level = levels[row]
        steps = np.diff(level)
        if (steps > 0).mean() < STEADY or (steps < 0).mean() > 1 - STEADY:
            continue
        if levels.shape[1] < MIN_STEPS and steps.max() - steps.min() > EVEN_SHARE * steps.max():
            continue
        slope = median_slope(level) / stride
        if slope > 0:
            found.append(
                Growth(int(names[row]), slope, int(level[0]), int(level[-1]), (len(level) - 1) * stride + 1)
            )
    return sorted(found, key=lambda growth: -growth.per_step_bytes)


def median_slope(values: Array) -> float:
    """Median of the slopes between all pairs of evenly spaced values, shape (n,), n ≥ 2."""
    first, second = np.triu_indices(len(values), 1)
    return float(np.median((values[second] - values[first]) / (second - first)))
