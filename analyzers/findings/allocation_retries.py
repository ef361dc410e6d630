"""``allocation-retries``: the allocator gives memory back to get new, and the device waits for it."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import MemoryOwners
from trine.analyzers.units import size

from ._facts import Facts
from ._memory import fullest
from .memory_near_limit import RETRY_SEVERITY

__all__ = ["ID", "KIND", "find"]

ID = "allocation-retries"
KIND: Literal["fault"] = "fault"

#: Fewer in a snapshot's history may be what a change of lengths needs once.
LEAST = 3


def find(facts: Facts) -> Finding | None:
    """Retries in a memory snapshot whose device is not known; where it is, ``memory-near-limit`` says it with the limit."""
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    part = max(found.ranks, key=lambda part: part.retries or 0, default=None) if found is not None else None
    if part is None or (part.retries or 0) < LEAST or fullest(facts) is not None:
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Rank {part.rank}'s allocator gave segments back {part.retries} times to get new ones, each time waiting for the device",
        evidence={
            "rank": part.rank,
            "retries": part.retries,
            "segments_allocated": part.segments_allocated,
            "segments_released": part.segments_released,
            "peak_bytes": part.peak_bytes,
            "reserved_at_peak_bytes": part.reserved_at_peak_bytes,
        },
        recommendation=Recommendation(
            change={},
            why=f"The device was full at a peak of {size(part.peak_bytes)}: lower it (see what would, under memory), or set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True so that segments of other sizes can be used again.",
            numerics="unchanged",
            predicted=None,
        ),
        severity=RETRY_SEVERITY,
    )
