"""How many of a model's layers each rank, or each stage, of a pipeline has."""

from __future__ import annotations

from typing import Any

import numpy as np

from trine.optim.plan.columns import Column

__all__ = ["stage_counts", "stage_layers"]


def stage_layers(layers: Any, stages: Any) -> tuple[Column, Column]:
    """Layers of a middle stage, and of the first and last, which have one fewer where that makes all even (an embedding or a
    head in its place: then perhaps none), or where all layers have a place still."""
    layers, count = np.asarray(layers, dtype=np.float64), np.asarray(stages, dtype=np.float64)
    even = layers % count == 0
    spared = (layers + 2) % count == 0
    middle = np.where(even, layers / count, np.where(spared, (layers + 2) / count, np.ceil(layers / count)))
    fewer = np.where(spared, middle - 1, np.maximum(middle - 1, 1))
    holds = (count - 2) * middle + 2 * fewer >= layers
    ends = np.where(even | ~holds, middle, fewer)
    return middle, np.where(count == 1, layers, ends)


def stage_counts(layers: int, stages: int) -> list[int]:
    """Layers of each stage in turn: as :func:`stage_layers` has them, the last of the fullest with one fewer until they add up."""
    middle, ends = (int(count) for count in stage_layers(layers, stages))
    counts = [ends, *[middle] * (stages - 2), ends][:stages]
    fullest = [stage for stage, count in enumerate(counts) if count == max(counts)]
    for stage in fullest[len(fullest) - (sum(counts) - layers) :]:
        counts[stage] -= 1
    return counts
