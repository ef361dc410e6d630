"""What blocking calls cost, from the replay of the critical path: shared by the rules that must not count it twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trine.analyzers.studies.critical_path import KEY, Entry, PathPart

from ._facts import Facts, RankFacts, typical

__all__ = ["DISTURBED_TIMES", "Replayed", "blocking", "replayed_of", "step_ns_of"]

#: A deep window whose steps take this many times the usual ones shows the profiler, not the program.
DISTURBED_TIMES = 1.5


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rank's path over its traced steps: shares (0..1) of its length that would go if blocking calls did not
    wait, or if the host took no time between launches; ``calls`` are the blocking calls, costliest first."""

    rank: int
    blocking: float
    host: float
    calls: tuple[Entry, ...]
    steps: int


def step_ns_of(breakdown: Any) -> float:
    """Length of a step of a breakdown's window, ns."""
    return float(breakdown.window_ns / max(len(breakdown.steps), 1))


def replayed_of(facts: Facts, rank: RankFacts) -> Replayed | None:
    """What the replay of a rank says; None without device work, or where the profiler distorted it."""
    parts: Sequence[PathPart] = rank.result.summary.parts.get(KEY, ())
    parts = [part for part in parts if part.on_device]
    length = sum(part.length_ns for part in parts)
    breakdown = rank.breakdown
    if not length or breakdown is None or breakdown.basis != "device":
        return None
    usual_ns = facts.step_ns if len(rank.durations) else None
    if usual_ns and step_ns_of(breakdown) > DISTURBED_TIMES * usual_ns:
        return None
    calls = [entry for part in parts for entry in part.entries if entry.kind == "blocking"]
    return Replayed(
        rank.rank,
        1 - sum(part.without_blocking_ns for part in parts) / length,
        1 - sum(part.without_host_ns for part in parts) / length,
        tuple(sorted(calls, key=lambda entry: -(entry.gain_ns or 0))),
        sum(part.step_count for part in parts),
    )


def blocking(facts: Facts) -> Replayed | None:
    """The typical rank's replay, by what its blocking calls cost."""
    if "blocking" not in facts.memo:
        found = [one for rank in facts.ranks if (one := replayed_of(facts, rank)) is not None]
        facts.memo["blocking"] = typical(found, lambda one: one.blocking)
    kept: Replayed | None = facts.memo["blocking"]
    return kept
