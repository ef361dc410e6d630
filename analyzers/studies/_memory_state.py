"""What a rank on the host had allocated before the profiler's first event: the model's state, which its record knows the size of.

PyTorch's profiler counts the host's memory from its own start, and a window starts in the middle of a run: parameters
and the optimizer's state are older, and in no event. A device's allocator knows its totals, where nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["STATE", "Curve", "with_state"]

Array = npt.NDArray[np.int64]

#: Categories whose size a record's own metadata have.
STATE = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True, slots=True)
class Curve:
    """``levels`` (categories, points) of ``categories``, and ``before``: bytes by category that were added to every point."""

    categories: tuple[str, ...]
    levels: Array
    before: Mapping[str, int]


def with_state(categories: tuple[str, ...], levels: Array, known: Mapping[str, int]) -> Curve:
    """The curve with as much of the ``known`` state below it as its highest levels lack."""
    highest = {name: int(level.max(initial=0)) for name, level in zip(categories, levels, strict=True)}
    before = {name: known.get(name, 0) - highest.get(name, 0) for name in STATE}
    before = {name: lacking for name, lacking in before.items() if lacking > 0}
    points = levels.shape[1]
    where = dict(zip(categories, levels, strict=True))
    for name, lacking in before.items():
        where[name] = where.get(name, np.zeros(points, dtype=np.int64)) + lacking
    order = [*(name for name in STATE if name in before and name not in categories), *categories]
    stacked = np.array([where[name] for name in order]).reshape(len(order), points)
    return Curve(tuple(order), stacked, before)
