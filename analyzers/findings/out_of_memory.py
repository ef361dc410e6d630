"""``out-of-memory``: an allocation failed, and a memory snapshot has it."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import Failure, MemoryOwners, RankMemory
from trine.analyzers.units import percent, size

from ._facts import Facts

__all__ = ["ID", "KIND", "find"]

ID = "out-of-memory"
KIND: Literal["fault"] = "fault"

#: Reserved and unused bytes, as a share of what was asked for, from which on fragmentation is why it failed.
FRAGMENTED_SHARE = 1.0
#: A failure ends most runs.
SEVERITY = 1.0


def find(facts: Facts) -> Finding | None:
    """The last failure of the rank with the highest peak among those that failed."""
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    part = next((part for part in found.ranks if part.failures), None) if found is not None else None
    if found is None or part is None:
        return None
    failure = part.failures[-1]
    unusable = (
        failure.unused_bytes is not None
        and failure.unused_bytes >= FRAGMENTED_SHARE * failure.requested_bytes
    )
    most = max(part.categories, key=lambda name: _bytes(part, name), default=None)
    title = f"Rank {part.rank} ran out of memory: {size(failure.requested_bytes)} were asked for"
    title += f" by {failure.owner}" if failure.owner else ""
    title += f", {size(failure.free_bytes)} were free" if failure.free_bytes is not None else ""
    if unusable and failure.unused_bytes is not None:
        title += f", while {size(failure.unused_bytes)} lay reserved and in pieces"
    elif most is not None and part.peak_bytes:
        title += f"; most of the peak is {most.replace('_', ' ')} ({percent(_bytes(part, most) / part.peak_bytes)})"
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence={
            "rank": part.rank,
            "failures": len(part.failures),
            "requested_bytes": failure.requested_bytes,
            "free_bytes": failure.free_bytes,
            "reserved_bytes": failure.reserved_bytes,
            "reserved_but_unused_bytes": failure.unused_bytes,
            "peak_bytes": part.peak_bytes,
            "at_peak_bytes": {name: _bytes(part, name) for name in part.categories},
        },
        recommendation=_recommendation(found, part, failure, unusable),
        severity=SEVERITY,
    )


def _bytes(part: RankMemory, category: str) -> int:
    at = max(range(len(part.totals)), key=lambda place: part.totals[place])
    return part.levels[part.categories.index(category)][at]


def _recommendation(
    found: MemoryOwners, part: RankMemory, failure: Failure, unusable: bool
) -> Recommendation:
    state = part.fragmentation
    if unusable and not (state is not None and state.expandable):
        return Recommendation(
            change={},
            why="Enough was reserved, but in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start.",
            numerics="unchanged",
            predicted=Prediction(
                None,
                None,
                -(failure.unused_bytes or 0),
                "reserved − allocated when it failed",
                {"reserved_bytes": failure.reserved_bytes or 0},
            ),
        )
    frees = {each.change: each for each in found.frees} if found.ranks[0].rank == part.rank else {}
    best = max(
        (frees[name] for name in ("checkpointing", "ZeRO-2", "offload optimizer state") if name in frees),
        key=lambda each: each.freed_bytes,
        default=None,
    )
    if best is None:
        return Recommendation(
            change={"checkpointing.mode": "selective"},
            why="Recompute what is cheap to recompute, or make the micro-batch smaller and accumulate.",
            numerics="unchanged, dropout included",
            predicted=None,
        )
    change: dict[str, object] = {
        "checkpointing": {"checkpointing.mode": "full"},
        "ZeRO-2": {"zero.stage": 2},
        "offload optimizer state": {"offload.optimizer": "cpu"},
    }[best.change]  # type: ignore[assignment]
    return Recommendation(
        change=change,
        why=f"Of what could be moved or made again this lowers the peak most, to {size(best.peak_bytes)}.",
        numerics="unchanged",
        predicted=Prediction(None, None, -best.freed_bytes, best.formula, dict(best.inputs)),
    )
