"""What a change would take off the peak: the whole curve is drawn again without it, and its highest point is the new peak.

Taking the bytes at the old peak alone promises too much: without activations the peak moves to where the
optimizer works, and no further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CHECKPOINTED", "LEAST_RANKS", "Freed", "freed"]

Array = npt.NDArray[Any]

#: Share of the activations that full recomputation frees: see findings/_frees.py for the source.
CHECKPOINTED = 0.7
#: Where the number of ranks is not known, ZeRO frees at least what it frees on two.
LEAST_RANKS = 2


@dataclass(frozen=True, slots=True)
class Freed:
    """A change, what it would free at the peak, and the peak that is left. ``category_bytes`` is what the change could
    touch at the old peak."""

    change: str
    freed_bytes: int
    peak_bytes: int
    category_bytes: int
    formula: str
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)


#: A change: its name, the bytes that it touches along the curve, the share of them that goes, that in words, from what.
_Option = tuple[str, Array, float, str, Mapping[str, float | int | str]]


def freed(
    categories: Sequence[str], levels: Array, totals: Array, ranks: int | None, *, replicated: bool = True
) -> tuple[Freed, ...]:
    """Every change that would free something.

    ``levels`` (categories, points) and ``totals`` (points,) are bytes along the curve, the peak among the points;
    ``ranks`` is how many hold the same replica, None where that is not known (1: nothing is replicated), ``replicated``
    whether the source says that they do.
    """
    options = _options(categories, levels, totals, ranks, replicated)
    peak = int(totals.max(initial=0))
    at = int(totals.argmax()) if len(totals) else 0
    found = []
    for name, touched, share, formula, inputs in options:
        if not touched.any():
            continue
        left = int(np.max(totals - share * touched))
        if left < peak:
            found.append(
                Freed(
                    change=name,
                    freed_bytes=peak - left,
                    peak_bytes=left,
                    category_bytes=int(touched[at]),
                    formula=f"peak − highest point of (total − {formula})",
                    inputs={"peak_bytes": peak, **inputs},
                )
            )
    return tuple(found)


def _options(
    categories: Sequence[str], levels: Array, totals: Array, ranks: int | None, replicated: bool
) -> list[_Option]:
    """Every change that is known, whether it would free something or not."""
    where = {name: levels[row] for row, name in enumerate(categories)}
    none = np.zeros_like(totals)
    activations = where.get("activations", none)
    state, gradients, parameters = (
        where.get(name, none) for name in ("optimizer_state", "gradients", "parameters")
    )
    count = ranks or LEAST_RANKS
    sharded = 1 - 1 / count
    of_ranks: dict[str, float | int | str] = {"ranks": count}
    if ranks is None:
        of_ranks["ranks_are"] = "not known, two is the least"
    elif not replicated:
        of_ranks["ranks_are"] = "all, taken to hold the same state"
    options: list[_Option] = [
        ("checkpointing", activations, CHECKPOINTED, f"activations × {CHECKPOINTED}", {}),
        ("offload activations", activations, CHECKPOINTED, f"activations × {CHECKPOINTED}", {}),
        ("offload optimizer state", state, 1.0, "optimizer state", {}),
    ]
    if count > 1:
        several = (
            ("ZeRO-1", state, "optimizer state"),
            ("ZeRO-2", state + gradients, "(optimizer state + gradients)"),
            ("ZeRO-3", state + gradients + parameters, "(optimizer state + gradients + parameters)"),
        )
        options += [
            (name, touched, sharded, f"{words} × (1 − 1 ÷ ranks)", of_ranks)
            for name, touched, words in several
        ]
    return options
