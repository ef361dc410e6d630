"""Why a layout lost, what bounds one, and how it is written: one phrase each.

lost_by(parts, best)            "+12 % pipeline bubble"
too_large(peak, parts, problem) "does not fit: 92.0 of 72.0 GiB, activations 41.3 GiB"
bound_by(parts)                 "compute 71 %, tensor communication 12 %"
"""

from __future__ import annotations

from collections.abc import Mapping

from trine.optim.plan.layouts import DEFAULTS, KINDS, OFFLOADED
from trine.optim.plan.problem import Problem
from trine.optim.plan.units import spell_bytes

__all__ = [
    "SAME",
    "batch_words",
    "bound_by",
    "host_too_small",
    "layout_words",
    "lost_by",
    "part_words",
    "too_large",
]

#: Losses below this share of the best's step are none.
SAME = 0.001

_PARTS = {
    "expert_communication": "expert all-to-alls",
    "exposed_gradients": "exposed gradient synchronisation",
    "gathers": "parameter gathers",
}


def part_words(name: str) -> str:
    """A part of a step as people call it."""
    return _PARTS.get(name, name.replace("_", " "))


def lost_by(parts: Mapping[str, float], best: Mapping[str, float]) -> str:
    """The part that grew most, as a share of the best's step; where nothing did, that."""
    whole, own = sum(best.values()), sum(parts.values())
    if own - whole < SAME * whole:
        return "as fast" if own - whole > -SAME * whole else f"{_percent((whole - own) / whole)} faster"
    name = max(parts, key=lambda part: parts[part] - best.get(part, 0.0))
    return f"+{_percent((parts[name] - best.get(name, 0.0)) / whole)} {part_words(name)}"


def bound_by(parts: Mapping[str, float]) -> str:
    """The two largest parts with their shares of the step."""
    whole = sum(parts.values())
    first, second = sorted(parts, key=lambda part: -parts[part])[:2]
    words = f"{part_words(first)} {_percent(parts[first] / whole)}"
    return f"{words}, {part_words(second)} {_percent(parts[second] / whole)}" if parts[second] > 0 else words


def too_large(peak_bytes: float, categories: Mapping[str, float], problem: Problem) -> str:
    """How far beyond the memory it is, and what takes most of it."""
    largest = max(categories, key=lambda name: categories[name])
    room = spell_bytes(problem.capacity_bytes)
    needed = spell_bytes(peak_bytes)
    if needed.partition(" ")[2] == room.partition(" ")[2]:
        needed = needed.partition(" ")[0]
    return f"does not fit: {needed} of {room}, {largest} {spell_bytes(categories[largest])}"


def host_too_small(bytes_away: float, problem: Problem) -> str:
    """What is moved to hosts, of a node, and what it has."""
    taken, room = (round(value / 2**30) for value in (bytes_away, problem.cluster.host_memory_bytes))
    return f"what is offloaded takes {taken:,} of the {room:,} GiB of a node's host"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.095 else f"{share * 100:.1f} %"


def batch_words(row: Mapping[str, int | str]) -> str:
    """How a rank's share of the batch is cut: ``"16 micro-batches of 1"``."""
    count, size = row["microbatches"], row["micro_batch"]
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {size}"


def layout_words(row: Mapping[str, int | str], *, batch: bool = True) -> str:
    """A layout without what is as usual: ``"tensor 8 · pipeline 8 · data 16 · interleaved x6 · 64 micro-batches of 1 · ZeRO 1"``."""
    found = [
        f"{name} {row[name]}"
        for name in ("tensor", "context", "expert", "pipeline", "data")
        if row[name] != 1
    ] or ["one device"]
    if row["pipeline"] != 1:
        chunks = f" x{row['chunks']}" if row["chunks"] != 1 else ""
        found.append(f"{row['schedule']}{chunks}")
    if batch:
        found.append(batch_words(row))
    if row["zero_stage"]:
        found.append(f"ZeRO {row['zero_stage']}" + (f" in groups of {row['shard']}" if row["shard"] else ""))
    if row["sequence"]:
        found.append("sequence")
    if row["recompute"] != "none":
        layers = f" {row['recomputed_layers']} layers" if row["recompute"] == "budget" else ""
        found.append(f"recompute {row['recompute']}{layers}")
    found += [f"{name.partition('_')[0]} on {row[name]}" for name in OFFLOADED if row[name] != "none"]
    for name in ("compression", "precision"):
        if row[name] != KINDS[name][DEFAULTS[name]]:
            found.append(f"{row[name]} gradients" if name == "compression" else str(row[name]))
    if row["two_level"]:
        found.append("two-level")
    if row["bucket_bytes"]:
        found.append(f"buckets of {spell_bytes(int(row['bucket_bytes']))}")
    return " · ".join(found)
