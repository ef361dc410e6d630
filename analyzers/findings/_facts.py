"""What rules look at: an analysis reduced to shares of a step, with its traps already stepped around.

Every share says where it came from, and is None where its signal is missing. The traps:

* **Warm-up** steps (lazy initialisation, compilation, autotuning) are left out.
* **One bad step** is an event, not a bound: a phase's share is taken without the single step in which
  that phase was longest.
* **Tiny inputs** (fewer than :data:`MIN_STEPS` steps; a trace of fewer than :data:`MIN_EVENTS` spans
  or shorter than :data:`MIN_WINDOW_NS`) say nothing about a run.
* **The typical rank** is the lower median, so one odd rank is a straggler, never "the run".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from trine.analyzers.results import Analysis, Breakdown, RankResult
from trine.analyzers.steps import sampled_steps
from trine.analyzers.unrecorded import is_unrecorded
from trine.record.model import MISSING, PHASES, Array

__all__ = ["MIN_EVENTS", "MIN_STEPS", "MIN_WINDOW_NS", "Facts", "Part", "RankFacts", "gather", "typical"]

#: Steady steps needed before the phases of a record count as evidence.
MIN_STEPS = 3
#: Spans and length a breakdown needs before it counts as evidence.
MIN_EVENTS = 100
MIN_WINDOW_NS = 2_000_000

#: How TorchInductor calls its kernels (pointwise, reductions, templates, several at once; those of torch 2.0 have no
#: kind), and Dynamo what it compiled.
_COMPILED = (
    *(f"triton_{kind}_" for kind in ("", "poi", "red", "per", "tem", "mm", "for", "spl")),
    "Torch-Compiled Region",
    "CompiledFunction",
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the step: its share (0..1) of the time looked at, and where that came from."""

    share: float
    basis: str  # "phases" (every steady step) or "breakdown" (a trace or a deep window)
    rank: int


@dataclass(frozen=True)
class RankFacts:
    """One rank. ``durations`` and ``phases`` hold its steady steps in ns; empty where unknown."""

    result: RankResult
    indexes: Array
    durations: Array
    phases: Mapping[str, Array]

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.result.rank

    @cached_property
    def unrecorded(self) -> str | None:
        """Why the rank's operators do not stand for its device's work, where that is missing."""
        return is_unrecorded(self.result.summary.quality)

    @property
    def breakdown(self) -> Breakdown | None:
        """The breakdown, when it is long enough to be evidence and not of the host in a device's stead."""
        breakdown = self.result.summary.breakdown
        if self.unrecorded is not None:
            return None
        if breakdown is None or breakdown.events < MIN_EVENTS or breakdown.window_ns < MIN_WINDOW_NS:
            return None
        return breakdown

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The record's own description; empty for foreign traces."""
        return self.result.summary.metadata

    def phase(self, name: str) -> Part | None:
        """Share of a phase over the steady steps, without the step in which it was longest."""
        if len(self.durations) < MIN_STEPS or name not in self.phases:
            return None
        values = self.phases[name]
        kept = np.arange(len(values)) != int(np.argmax(values))
        total = int(self.durations[kept].sum())
        return Part(float(values[kept].sum() / total), "phases", self.rank) if total > 0 else None

    def usual(self, name: str) -> float | None:
        """Share of a phase in the median steady step: what every step pays, not what a few do."""
        if len(self.durations) < MIN_STEPS or name not in self.phases:
            return None
        return float(np.median(self.phases[name] / self.durations))

    def window(self, pick: Callable[[Breakdown], int]) -> Part | None:
        """Share of a part of the breakdown."""
        breakdown = self.breakdown
        if breakdown is None:
            return None
        return Part(pick(breakdown) / breakdown.window_ns, "breakdown", self.rank)

    @cached_property
    def exposed(self) -> Part | None:
        """Communication that no compute hides: the larger of what the phases and a breakdown say.

        The phases cannot see a wait inside the forward pass (FSDP's all-gathers); a breakdown covers
        a few steps only. Neither ever counts hidden communication.
        """
        parts = [self.phase("exposed_communication"), self.window(lambda b: b.exposed_communication_ns)]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        phases = known[0] if known[0].basis == "phases" else None
        # The phases are the whole run's; trust them wherever they saw anything.
        return phases if phases is not None and phases.share > 0.01 else max(known, key=lambda p: p.share)

    @property
    def wait_fraction(self) -> float | None:
        """Of the time in matched collectives, the part spent waiting for other ranks (0..1)."""
        communication = self.result.communication
        if communication is None or communication.matched == 0:
            return None
        wait, transfer = communication.steady_wait_ns, communication.steady_transfer_ns
        if wait is None or transfer is None or wait + transfer == 0:
            wait, transfer = communication.wait_ns, communication.transfer_ns
        return wait / (wait + transfer) if wait + transfer > 0 else None


@dataclass(frozen=True)
class Facts:
    """The job. ``step_ns`` is the median steady step on the slowest path; where a source marks no
    steps it is the window, and ``unit`` says so."""

    analysis: Analysis
    ranks: tuple[RankFacts, ...]
    step_ns: int | None
    unit: str  # "step" or "window"
    steps: int  # steady steps that were seen; 0 where none are marked

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.analysis.source.world_size or max(len(self.ranks), 1)

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Description of the run: the first rank's own, over what the source says of the job."""
        own = self.ranks[0].metadata if self.ranks else {}
        return {**self.analysis.source.metadata, **own}

    def about(self, *path: str) -> Any:
        """A nested value of the metadata, or None."""
        value: Any = self.metadata
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What several rules share and only one should work out; thousands of ranks make it worth it."""
        return {}

    @cached_property
    def on_accelerator(self) -> bool | None:
        """Whether the work ran on a device other than the CPU; None when nothing says."""
        kind = self.about("device", "type")
        if isinstance(kind, str):
            return kind != "cpu"
        if any(rank.unrecorded is not None for rank in self.ranks):
            return True
        bases = {b.basis for r in self.ranks if (b := r.result.summary.breakdown) is not None}
        return None if not bases else "device" in bases

    @cached_property
    def trains(self) -> bool | None:
        """Whether a backward pass was seen; None when nothing could have shown it."""
        if any(len(rank.durations) for rank in self.ranks):
            return any(int(rank.phases["backward"].sum()) > 0 for rank in self.ranks if rank.phases)
        named = [row.name for rank in self.ranks for row in rank.result.summary.operators]
        if not named:
            return None
        return any("Backward" in name or name.startswith("autograd::") for name in named)

    @cached_property
    def compiled(self) -> bool:
        """Whether the model, or a part of it, is compiled: as the record says, or as TorchInductor's kernels and Dynamo's
        regions show."""
        if self.about("compile"):
            return True
        seen = (rank.result.summary for rank in self.ranks)
        return any(row.name.startswith(_COMPILED) for one in seen for row in (*one.kernels, *one.operators))

    def part(self, read: Callable[[RankFacts], Part | None]) -> Part | None:
        """A part of the step on the typical rank; None when no rank can tell."""
        known = [part for rank in self.ranks if (part := read(rank)) is not None]
        return typical(known, lambda part: part.share)

    def step_part_ns(self, share: float) -> int:
        """A share of the step in ns (0 without a step time)."""
        return round(share * (self.step_ns or 0))

    @cached_property
    def configuration(self) -> Mapping[str, Any]:
        """The Trine configuration this run was made with; empty when there was none."""
        configuration = self.metadata.get("configuration")
        return configuration if isinstance(configuration, Mapping) else {}

    @cached_property
    def beyond_data(self) -> dict[str, int]:
        """Degrees of the configuration's parallelism that is not data parallel, by name, where there is any."""
        degrees = self.configuration.get("parallel")
        if not isinstance(degrees, Mapping):
            return {}
        names = ("pipeline", "expert", "context", "tensor")
        return {
            name: degrees[name] for name in names if isinstance(degrees.get(name), int) and degrees[name] > 1
        }


def typical(items: Sequence[T], key: Callable[[T], float]) -> T | None:
    """The lower median by ``key``; None of nothing."""
    return sorted(items, key=key)[(len(items) - 1) // 2] if items else None


def _rank_facts(result: RankResult) -> RankFacts:
    steps = sampled_steps(result.summary.steps, result.summary.metadata)
    empty = np.zeros(0, dtype=np.int64)
    if steps is None or not len(steps):
        return RankFacts(result, empty, empty, {})
    statistics = result.summary.step_statistics
    warm_up = statistics.warm_up if statistics is not None else ()
    duration = steps["end_ns"] - steps["start_ns"]
    phases = {name: steps[f"phase_{name}_ns"] for name in PHASES}
    known = np.all([column != MISSING for column in phases.values()], axis=0)
    kept = known & ~np.isin(steps["index"], warm_up) & (duration > 0)
    picked = {name: column[kept] for name, column in phases.items()} if kept.any() else {}
    return RankFacts(result, steps["index"][kept], duration[kept], picked)


def _step_time(analysis: Analysis) -> tuple[int | None, str, int]:
    statistics = analysis.step_statistics
    if statistics is not None and statistics.count > 0:
        return statistics.median_ns, "step", statistics.count
    windows = [b for rank in analysis.ranks if (b := rank.summary.breakdown) is not None and b.window_ns > 0]
    if not windows:
        return None, "step", 0
    longest = max(windows, key=lambda breakdown: breakdown.window_ns)
    if longest.steps:
        return longest.window_ns // len(longest.steps), "step", len(longest.steps)
    return longest.window_ns, "window", 0


def gather(analysis: Analysis) -> Facts:
    """Reduce an analysis to what rules look at."""
    step_ns, unit, steps = _step_time(analysis)
    return Facts(analysis, tuple(_rank_facts(rank) for rank in analysis.ranks), step_ns, unit, steps)
