"""``memory-near-limit``: the next longer batch runs out of memory, or the allocator already struggles."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import percent, size

from ._facts import Facts
from ._frees import checkpointing, zero
from ._memory import Fill, fullest

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "memory-near-limit"
KIND: Literal["fault"] = "fault"

#: Peak over capacity from which on it is a fault.
SHARE = 0.92
#: Of the step, what an allocator retry puts at stake: it frees the cache and synchronises the device.
RETRY_SEVERITY = 0.10


def find(facts: Facts) -> Finding | None:
    """The fullest device is above the threshold, or its allocator had to retry."""
    fill = fullest(facts)
    if fill is None or (fill.share < SHARE and fill.retries == 0):
        return None
    where = "device" if fill.kind == "device" else "host"
    title = f"Rank {fill.rank}'s {where} memory peaks at {size(fill.used_bytes)} of {size(fill.capacity_bytes)} ({percent(fill.share)})"
    if fill.retries:
        title += f", and its allocator had to retry {fill.retries} time{'s' if fill.retries > 1 else ''}"
    memory = next(r.result.summary.memory for r in facts.ranks if r.rank == fill.rank)
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence={
            "rank": fill.rank,
            "peak_bytes": fill.used_bytes,
            "capacity_bytes": fill.capacity_bytes,
            "share": round(fill.share, 4),
            "retries": fill.retries,
            "at_peak_bytes": dict(memory.at_peak) if memory else {},
            "lower_bound": bool(memory and memory.lower_bound),
        },
        recommendation=_recommendation(facts, fill),
        severity=max(min(fill.share - SHARE, 0.08), RETRY_SEVERITY if fill.retries else 0.0),
    )


def _recommendation(facts: Facts, fill: Fill) -> Recommendation:
    if (sharded := zero(facts, fill)) is not None:
        stage, prediction = sharded
        return Recommendation(
            change={"zero.stage": stage},
            why="Each rank keeps all of the optimizer's state; shard it, at no more bytes on the wire than now.",
            numerics="unchanged",
            predicted=prediction,
        )
    if (prediction_or_none := checkpointing(facts, fill.rank)) is not None:
        return Recommendation(
            change={"checkpointing.mode": "full"},
            why="Recompute activations in the backward pass instead of keeping them; costs a forward pass.",
            numerics="unchanged, dropout included",
            predicted=prediction_or_none,
        )
    return Recommendation(
        change={"checkpointing.mode": "selective"},
        why="Recompute what is cheap to recompute, or make the micro-batch smaller and accumulate.",
        numerics="unchanged, dropout included",
        predicted=None,
    )


def healthy(facts: Facts) -> str | None:
    """The fullest device's share, when it is known and below the threshold."""
    fill = fullest(facts)
    if fill is None or fill.share >= SHARE or fill.retries:
        return None
    return f"Memory: {size(fill.used_bytes)} of {size(fill.capacity_bytes)} at the peak ({percent(fill.share)}; fault from {percent(SHARE)})"
