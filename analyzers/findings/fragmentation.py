"""``fragmentation``: the allocator holds memory that it cannot give out, and memory is short."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import Fragmentation, MemoryOwners
from trine.analyzers.units import percent, size

from ._facts import Facts
from ._gain import memory_only

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "fragmentation"
KIND: Literal["fault"] = "fault"

#: Reserved but free at the peak, as a share of capacity, from which on it is a fault ...
FREE_SHARE = 0.10
#: ... where the reserved memory itself is near the limit (or the allocator had to retry): a cache that
#: nobody needs is no fault.
RESERVED_SHARE = 0.80


#: What to do where segments have a fixed size, and where they can grow already.
_FIXED = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start; lengths that vary "
    "from step to step are the usual cause, so padding them to a few sizes helps too."
)
_GROWING = (
    "Segments can grow already (expandable_segments is on), so what is free lies in other streams' or private "
    "pools or waits for another stream: pad lengths to a few sizes, and allocate on one stream."
)


def _snapshot(facts: Facts, rank: int) -> Fragmentation | None:
    """The allocator's segments, where a memory snapshot of this rank shows them."""
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    return next((part.fragmentation for part in found.ranks if part.rank == rank), None) if found else None


def _seen(state: Fragmentation | None) -> dict[str, int | bool]:
    if state is None:
        return {}
    return {
        "free_between_blocks_bytes": state.split_bytes,
        "free_segments_bytes": state.free_bytes,
        "largest_free_bytes": state.largest_free_bytes,
        "pending_bytes": state.pending_bytes,
        "expandable_segments": state.expandable,
    }


def _worst(facts: Facts) -> tuple[int, int, int, int, int] | None:
    """(free, reserved, capacity, retries, rank) of the rank with most reserved-but-free memory.

    The difference of the two peaks is a lower bound: at the reserved peak no more was allocated.
    """
    rows = []
    for rank in facts.ranks:
        memory = rank.result.summary.memory
        if memory is None or memory.kind != "device":
            continue
        capacity = memory.capacity_bytes or facts.analysis.hardware.memory_bytes
        if memory.reserved_peak_bytes is None or memory.peak_bytes is None or not capacity:
            continue
        free = max(memory.reserved_peak_bytes - memory.peak_bytes, 0)
        rows.append((free, memory.reserved_peak_bytes, capacity, memory.retries or 0, rank.rank))
    return max(rows, default=None)


def find(facts: Facts) -> Finding | None:
    """Much reserved memory is free while memory is short."""
    worst = _worst(facts)
    if worst is None:
        return None
    free, reserved, capacity, retries, rank = worst
    short = retries > 0 or reserved >= RESERVED_SHARE * capacity
    if free < FREE_SHARE * capacity or not short:
        return None
    state = _snapshot(facts, rank)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Rank {rank}'s allocator holds {size(free)} ({percent(free / capacity)} of the device) that it cannot give out",
        evidence={
            "rank": rank,
            "reserved_but_free_bytes": free,
            "reserved_peak_bytes": reserved,
            "capacity_bytes": capacity,
            "retries": retries,
            **_seen(state),
        },
        recommendation=Recommendation(
            change={},
            why=_GROWING if state is not None and state.expandable else _FIXED,
            numerics="unchanged",
            predicted=memory_only(
                -free, "reserved peak − allocated peak", {"reserved": reserved, "free": free}
            ),
        ),
        severity=min(free / capacity, 0.2),
    )


def healthy(facts: Facts) -> str | None:
    """Reserved-but-free memory, when both peaks are known and it is no fault."""
    worst = _worst(facts)
    if worst is None or find(facts) is not None:
        return None
    free, _, capacity, _, _ = worst
    return f"Fragmentation: {size(free)} reserved but free ({percent(free / capacity)} of the device)"
