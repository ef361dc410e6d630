"""How many of a model's layers each rank of a pipeline has."""

from __future__ import annotations

from typing import Any

import numpy as np

from trine.optim.plan.columns import Column

__all__ = ["stage_layers"]


def stage_layers(layers: Any, pipeline: Any) -> tuple[Column, Column]:
    """Layers of a middle rank, and of the first and last, which have one fewer where that makes all even."""
    layers, ranks = np.asarray(layers, dtype=np.float64), np.asarray(pipeline, dtype=np.float64)
    even = layers % ranks == 0
    spared = (layers + 2) % ranks == 0
    middle = np.where(even, layers / ranks, np.where(spared, (layers + 2) / ranks, np.ceil(layers / ranks)))
    ends = np.where(even, middle, np.maximum(middle - 1, 1))
    return middle, np.where(ranks == 1, layers, ends)
