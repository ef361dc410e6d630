"""``checkpointing-would-free``: memory limits, and activations could be recomputed."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import percent, size

from ._facts import Facts
from ._frees import checkpointing, evidence_of, freed_bytes
from ._memory import limited

__all__ = ["ID", "KIND", "find"]

ID = "checkpointing-would-free"
KIND: Literal["opportunity"] = "opportunity"

#: Freed bytes below this share of capacity are not worth a forward pass.
SHARE = 0.05


def find(facts: Facts) -> Finding | None:
    """Known activations, recomputation off, memory limits."""
    fill = limited(facts)
    prediction = checkpointing(facts, fill.rank) if fill is not None and facts.trains is not False else None
    if fill is None or prediction is None:
        return None
    freed = freed_bytes(prediction)
    if freed < SHARE * fill.capacity_bytes:
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Recomputing activations would free {size(freed)} a rank ({percent(freed / fill.capacity_bytes)} of its memory)",
        evidence=evidence_of(fill, prediction),
        recommendation=Recommendation(
            change={"checkpointing.mode": "full"},
            why="Keep each block's input and recompute the rest in the backward pass; try selective first "
            "where attention's scores are what fills memory.",
            numerics="unchanged, dropout included",
            predicted=prediction,
        ),
        severity=min(freed / fill.capacity_bytes, 1.0) * 0.5,
    )
