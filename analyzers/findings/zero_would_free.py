"""``zero-would-free``: memory limits, and replicas hold what could be sharded."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import percent, size

from ._facts import Facts
from ._frees import evidence_of, freed_bytes, zero
from ._memory import limited

__all__ = ["ID", "KIND", "find"]

ID = "zero-would-free"
KIND: Literal["opportunity"] = "opportunity"

#: Freed bytes below this share of capacity change nothing.
SHARE = 0.02


def find(facts: Facts) -> Finding | None:
    """DDP on several ranks, known state bytes, memory limits."""
    fill = limited(facts)
    sharded = zero(facts, fill)
    if fill is None or sharded is None:
        return None
    stage, prediction = sharded
    freed = freed_bytes(prediction)
    if freed < SHARE * fill.capacity_bytes:
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"ZeRO-{stage} would free {size(freed)} a rank ({percent(freed / fill.capacity_bytes)} of its memory)",
        evidence=evidence_of(fill, prediction),
        recommendation=Recommendation(
            change={"zero.stage": stage},
            why="All ranks keep the same optimizer state; each can keep its part and exchange the result.",
            numerics="unchanged",
            predicted=prediction,
        ),
        severity=min(freed / fill.capacity_bytes, 1.0),
    )
