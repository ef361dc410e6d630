"""How full memory is, shared by the five findings that speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from trine.analyzers.results import MemorySummary

from ._facts import Facts, RankFacts

__all__ = ["LIMITED", "Fill", "fullest", "limited"]

#: From this share of capacity on memory is what limits the next change, and freeing it is worth showing.
LIMITED = 0.85


@dataclass(frozen=True, slots=True)
class Fill:
    """The fullest device, or host: peak and capacity in bytes, allocator retries, who it is."""

    rank: int
    used_bytes: int
    capacity_bytes: int
    retries: int
    kind: str

    @property
    def share(self) -> float:
        """Used of capacity, 0..1 and above where the host swaps."""
        return self.used_bytes / self.capacity_bytes


def _capacity(facts: Facts, memory: MemorySummary, rank: RankFacts) -> int | None:
    own = rank.metadata.get("device")
    declared = own.get("memory_bytes") if isinstance(own, dict) else None
    if memory.kind == "host":
        if facts.on_accelerator is not False:
            return memory.capacity_bytes  # what is declared and looked up is the device's
        return memory.capacity_bytes or declared or facts.analysis.hardware.memory_bytes
    return memory.capacity_bytes or declared or facts.analysis.hardware.memory_bytes


def _used(memory: MemorySummary) -> int | None:
    peaks = [peak for peak in (memory.reserved_peak_bytes, memory.peak_bytes) if peak is not None]
    return max(peaks) if peaks else None


def fullest(facts: Facts) -> Fill | None:
    """The device (or host: its ranks share it) nearest to its limit; None without peak or capacity."""
    fills = []
    for rank in facts.ranks:
        memory = rank.result.summary.memory
        if memory is None:
            continue
        used, capacity = _used(memory), _capacity(facts, memory, rank)
        if memory.kind == "host" and used is not None:
            host = rank.result.summary.host_name
            used = sum(
                _used(other.result.summary.memory) or 0
                for other in facts.ranks
                if other.result.summary.memory is not None and other.result.summary.host_name == host
            )
        if used is not None and capacity:
            fills.append(Fill(rank.rank, used, capacity, memory.retries or 0, memory.kind))
    return max(fills, key=lambda fill: (fill.retries > 0, fill.share), default=None)


def limited(facts: Facts) -> Fill | None:
    """:func:`fullest`, when it limits what else could be done."""
    fill = fullest(facts)
    return fill if fill is not None and (fill.share >= LIMITED or fill.retries > 0) else None
