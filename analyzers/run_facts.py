"""One run, reduced to what comparisons and gates need: small, and written to a baseline file as it is.

    Analysis ──measure_run──► RunFacts ─┬─ compare ──► Comparison
    baseline.json ──────────► RunFacts ─┴─ check ────► CheckResult

Raw step times are kept, not their statistics: what a comparison resamples cannot be had from a
median. The step time of a job is that of its slowest rank, step by step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trine.analyzers.flaws import Flaw, flaws_of
from trine.analyzers.results import Analysis, Breakdown, RankSummary
from trine.analyzers.statistics import find_warm_up
from trine.analyzers.steps import job_steps
from trine.record.model import MISSING, PHASES, Array, Table

__all__ = ["METRICS", "Part", "RunFacts", "Told", "Window", "lighter", "measure_run"]

#: Metric → (what it is, whether more is better). Names end in their unit; shares and MFU are of one.
METRICS: Mapping[str, tuple[str, bool]] = {
    "step_time_ns": ("median of the steady steps, slowest rank step by step", False),
    "step_time_p95_ns": ("95th percentile of the steady steps", False),
    "peak_bytes": ("most memory that any rank had allocated", False),
    "reserved_peak_bytes": ("most memory that any rank's allocator had reserved", False),
    "tokens_per_s": ("tokens of all ranks in the steady steps over their time", True),
    "samples_per_s": ("samples of all ranks in the steady steps over their time", True),
    "exposed_communication_share": ("exposed communication over the window, mean of the ranks", False),
    "idle_share": ("idle over the window, mean of the ranks", False),
    "data_share": ("time spent waiting for data over the step, mean of the ranks", False),
    "mfu": ("model FLOPs utilisation under the convention that the run chose", True),
    "mfu_palm": ("model FLOPs utilisation, PaLM's convention", True),
    "mfu_megatron": ("model FLOPs utilisation, Megatron's convention", True),
    "mfu_narayanan": ("model FLOPs utilisation, Narayanan et al. 2021, equation 3", True),
    "mfu_6n": ("model FLOPs utilisation, 6 FLOPs a parameter and token", True),
    "mfu_counted": ("model FLOPs utilisation, operators counted in the run", True),
}

#: The heaviest kernels and operators that are kept; a baseline, which lies in a repository, keeps fewer.
_MOST_NAMES = 100


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: mean ns a step and rank. ``kind`` is ``phase``, ``breakdown``, ``idle``,
    ``collective``, ``kernel`` or ``operator``; parts of different kinds overlap. ``calls`` and
    ``bytes`` are per step and rank, where the kind has them."""

    kind: str
    name: str
    ns: float
    calls: float | None = None
    bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What a breakdown covers: mean ns a unit and rank. The unit is a step where ``steps`` are marked, else the
    whole window. ``basis`` is ``device`` or ``host``."""

    ns: float
    steps: int
    ranks: int
    basis: str


@dataclass(frozen=True, slots=True)
class Told:
    """A finding of the run: ``severity`` is the share of the step at stake."""

    id: str
    kind: str
    title: str
    severity: float


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run. ``step_ns`` are its steady steps in order (ns); ``warm_up`` counts the steps left out.

    ``environment`` is the fingerprint of where it ran (None where the source does not say);
    ``configuration`` is what was trained and how. ``metrics`` are those of :data:`METRICS` that can
    be said; ``missing`` gives the reason for each of the others. ``format`` is what it was read from
    (``trine`` for a record); ``window`` what its breakdown covers; ``least_ns`` is kind of part → the least
    that was kept of it where more had to go, so that what is not listed is known to take no more. ``findings``
    is None where they are not known (baselines of older versions). ``flaws`` are the warnings and errors of its data.
    """

    source: str
    step_ns: tuple[int, ...]
    warm_up: int = 0
    environment: Mapping[str, str | int | None] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    configuration_hash: str | None = None
    commit: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    format: str = ""
    window: Window | None = None
    least_ns: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Told, ...] | None = None
    flaws: tuple[Flaw, ...] = ()


def measure_run(analysis: Analysis) -> RunFacts:
    """Reduce an analysis to :class:`RunFacts`. Never raises on what a run lacks: it is in ``missing``."""
    summaries = [rank.summary for rank in analysis.ranks]
    indexes, durations = job_steps([summary.steps for summary in summaries])
    steady = _steady(analysis, indexes, durations)
    metadata = _metadata(analysis)
    configuration = _configuration(metadata)
    metrics, missing = _metrics(analysis, summaries, indexes[steady], durations[steady])
    named, least_ns = _named_parts(summaries)
    return RunFacts(
        source=analysis.source.path,
        step_ns=tuple(int(ns) for ns in durations[steady]),
        warm_up=int(len(durations) - steady.sum()),
        environment=_environment(analysis, summaries, metadata),
        configuration=configuration,
        configuration_hash=_hash(configuration) if configuration else None,
        commit=_text(metadata.get("commit")),
        metrics=metrics,
        missing=missing,
        parts=(
            *_phase_parts(summaries, indexes[steady]),
            *_breakdown_parts(summaries),
            *_collective_parts(analysis),
            *named,
        ),
        format=analysis.source.format,
        window=_window(summaries),
        least_ns=least_ns,
        findings=tuple(Told(one.id, one.kind, one.title, one.severity) for one in analysis.findings),
        flaws=flaws_of(analysis.data_quality),
    )


def lighter(run: RunFacts, most_names: int) -> RunFacts:
    """The run with only the heaviest kernels and operators."""
    kept: list[Part] = []
    least_ns = dict(run.least_ns)
    for kind in dict.fromkeys(part.kind for part in run.parts):
        parts = [part for part in run.parts if part.kind == kind]
        if kind in _NAMED and len(parts) > most_names:
            parts = sorted(parts, key=lambda part: -part.ns)[:most_names]
            least_ns[kind] = parts[-1].ns
        kept += parts
    return replace(run, parts=tuple(kept), least_ns=least_ns)


def _steady(analysis: Analysis, indexes: Array, durations: Array) -> Array:
    """Mask of the steps that are neither warm-up nor a leftover of rolled-up detail."""
    mask = np.ones(len(durations), dtype=bool)
    if analysis.step_statistics is not None:
        mask &= ~np.isin(indexes, np.array(analysis.step_statistics.warm_up, dtype=np.int64))
    else:
        mask[: find_warm_up(durations)] = False
    for rank in analysis.ranks:
        rolled_up = rank.summary.metadata.get("rolled_up")
        if isinstance(rolled_up, Mapping):
            # Of these only the slowest are left in detail: they would make the run look slower.
            mask &= (indexes < rolled_up["first"]) | (indexes > rolled_up["last"])
    return np.asarray(mask)


def _metadata(analysis: Analysis) -> dict[str, Any]:
    """What the source says of the run: the lowest rank's own word over the job's."""
    own = analysis.ranks[0].summary.metadata if analysis.ranks else {}
    return {**analysis.source.metadata, **own}


# --- metrics -----------------------------------------------------------------------------------


def _metrics(
    analysis: Analysis, summaries: list[RankSummary], indexes: Array, durations: Array
) -> tuple[dict[str, float], dict[str, str]]:
    metrics: dict[str, float] = {}
    missing: dict[str, str] = {}

    def put(name: str, value: float | None, reason: str) -> None:
        if value is None or not np.isfinite(value):
            missing[name] = reason
        else:
            metrics[name] = value

    steps = "the source marks no steps, or all of them are warm-up"
    put("step_time_ns", float(np.median(durations)) if len(durations) else None, steps)
    put("step_time_p95_ns", float(np.quantile(durations, 0.95)) if len(durations) else None, steps)
    memory = [summary.memory for summary in summaries if summary.memory is not None]
    nothing = "no rank recorded its memory"
    put("peak_bytes", _most([m.peak_bytes for m in memory]), nothing)
    put("reserved_peak_bytes", _most([m.reserved_peak_bytes for m in memory]), nothing)
    for column in ("tokens", "samples"):
        value = _throughput(summaries, column, indexes, durations)
        put(f"{column}_per_s", value, f"no steady step says how many {column} it had")
    for name, value in _shares(summaries, indexes).items():
        put(name, value, "neither a breakdown nor phases of the steps say it")
    mfu = analysis.mfu
    put("mfu", mfu.value if mfu else None, "the run chose no convention, or the device's peak is unknown")
    for name in METRICS:
        if name.startswith("mfu_"):
            value = mfu.range.get(name.removeprefix("mfu_")) if mfu else None
            put(name, value, "the model's FLOPs or the device's peak are unknown")
    return metrics, missing


def _most(values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(max(known)) if known else None


def _throughput(summaries: list[RankSummary], column: str, indexes: Array, durations: Array) -> float | None:
    total, known = 0, False
    for table in _steady_tables(summaries, indexes):
        values = table[column]
        if (values == MISSING).any():
            return None
        total, known = total + int(values.sum()), True
    time_ns = int(durations.sum())
    return total / (time_ns / 1e9) if known and time_ns > 0 else None


def _shares(summaries: list[RankSummary], indexes: Array) -> dict[str, float | None]:
    phases = _mean_phases(summaries, indexes)
    step = sum(phases.values())
    from_phases = {name: ns / step for name, ns in phases.items()} if step > 0 else {}
    breakdowns = [s.breakdown for s in summaries if s.breakdown is not None and s.breakdown.window_ns > 0]

    def of_window(part: str) -> float | None:
        if not breakdowns:
            return None
        return float(np.mean([getattr(b, part) / b.window_ns for b in breakdowns]))

    exposed = of_window("exposed_communication_ns")
    return {
        "exposed_communication_share": (
            exposed if exposed is not None else from_phases.get("exposed_communication")
        ),
        "idle_share": of_window("idle_ns"),
        "data_share": from_phases.get("data"),
    }


# --- parts of a step ---------------------------------------------------------------------------


def _steady_tables(summaries: list[RankSummary], indexes: Array) -> Iterator[Table]:
    for summary in summaries:
        if summary.steps is not None and len(summary.steps):
            rows = summary.steps.select(np.isin(summary.steps["index"], indexes))
            if len(rows):
                yield rows


def _mean_phases(summaries: list[RankSummary], indexes: Array) -> dict[str, float]:
    """Phase → mean ns a steady step and rank; empty where a rank has no phases."""
    means = []
    for table in _steady_tables(summaries, indexes):
        columns = np.stack([table[f"phase_{name}_ns"] for name in PHASES])
        if (columns == MISSING).any():
            return {}
        means.append(columns.mean(axis=1))
    if not means:
        return {}
    return dict(zip(PHASES, (float(ns) for ns in np.mean(means, axis=0)), strict=True))


def _phase_parts(summaries: list[RankSummary], indexes: Array) -> Iterator[Part]:
    for name, ns in _mean_phases(summaries, indexes).items():
        yield Part("phase", name, ns)


def _window_steps(breakdown: Breakdown) -> int:
    return max(len(breakdown.steps), 1)


def _breakdown_parts(summaries: list[RankSummary]) -> Iterator[Part]:
    breakdowns = [summary.breakdown for summary in summaries if summary.breakdown is not None]
    # A rank without a breakdown, or on another basis, would shift the mean of the others.
    if not breakdowns or len({b.basis for b in breakdowns}) > 1:
        return
    for name in ("compute", "exposed_communication", "exposed_copy", "idle"):
        ns = np.mean([getattr(b, f"{name}_ns") / _window_steps(b) for b in breakdowns])
        yield Part("breakdown", name, float(ns))
    for name in ("data", "host", "sync", "dependency", "bubble", "other"):
        yield Part(
            "idle", name, float(np.mean([getattr(b.idle, name) / _window_steps(b) for b in breakdowns]))
        )


def _collective_parts(analysis: Analysis) -> Iterator[Part]:
    """Transfer and wait of each operation by group size: group names differ from run to run."""
    steps = max(analysis.source.steps, 1)
    totals: dict[tuple[str, int], list[float]] = {}
    groups: dict[tuple[str, int], set[str]] = {}
    for row in analysis.collectives:
        key = (row.op, len(row.ranks))
        transfer, wait, calls, size = totals.setdefault(key, [0.0, 0.0, 0.0, 0.0])
        totals[key] = [
            transfer + row.transfer_ns,
            wait + row.wait_ns / max(len(row.ranks), 1),
            calls + row.calls,
            size + (row.bytes or 0),
        ]
        groups.setdefault(key, set()).add(row.group)
    for key, (transfer, wait, calls, size) in sorted(totals.items()):
        share = steps * len(groups[key])  # several groups of one size work side by side
        name = f"{key[0]} over {key[1]} ranks"
        yield Part("collective", f"{name}: transfer", transfer / share, calls / share, size / share)
        yield Part("collective", f"{name}: wait for others", wait / share, calls / share)


_NAMED = {"kernel": "kernels", "operator": "operators"}


def _named_parts(summaries: list[RankSummary]) -> tuple[list[Part], dict[str, float]]:
    """Kernels and operators by name, mean a step and rank, the heaviest of each kind; and the least that was kept."""
    ranks = [summary for summary in summaries if summary.breakdown is not None]
    found: list[Part] = []
    least_ns: dict[str, float] = {}
    for kind, attribute in _NAMED.items():
        totals: dict[str, list[float]] = {}
        cut = 0.0
        for summary in ranks:
            assert summary.breakdown is not None
            share = _window_steps(summary.breakdown) * len(ranks)
            rows = getattr(summary, attribute)
            for row in rows:
                time, calls = totals.get(row.name, (0.0, 0.0))
                totals[row.name] = [time + row.total_ns / share, calls + row.calls / share]
            if len(rows) >= _MOST_NAMES:  # a summary keeps no more either
                cut = max(cut, rows[-1].total_ns * len(ranks) / share)
        heaviest = sorted(totals.items(), key=lambda item: -item[1][0])
        if len(heaviest) > _MOST_NAMES:
            cut = max(cut, heaviest[_MOST_NAMES][1][0])
        if cut:
            least_ns[kind] = cut
        found += [Part(kind, name, time, calls) for name, (time, calls) in heaviest[:_MOST_NAMES]]
    return found, least_ns


def _window(summaries: list[RankSummary]) -> Window | None:
    breakdowns = [summary.breakdown for summary in summaries if summary.breakdown is not None]
    if not breakdowns or len({b.basis for b in breakdowns}) > 1:
        return None
    return Window(
        ns=float(np.mean([b.window_ns / _window_steps(b) for b in breakdowns])),
        steps=min(len(b.steps) for b in breakdowns),
        ranks=len(breakdowns),
        basis=breakdowns[0].basis,
    )


# --- environment and configuration -------------------------------------------------------------


def _environment(
    analysis: Analysis, summaries: list[RankSummary], metadata: Mapping[str, Any]
) -> dict[str, str | int | None]:
    """Where it ran. Two runs compare only if what both say here is equal."""
    device, versions = _mapping(metadata, "device"), _mapping(metadata, "versions")
    names = sorted({info.name for summary in summaries for info in summary.devices if info.name})
    hosts = {summary.host_name for summary in summaries if summary.host_name}
    return {
        "device": _text(device.get("name")) or " + ".join(names) or analysis.hardware.name,
        "device_type": _text(device.get("type")),
        "devices": _number(device.get("count")),
        "threads": _number(device.get("threads")),
        "world_size": analysis.source.world_size,
        "hosts": len(hosts) or None,
        "backend": _text(metadata.get("backend")),
        **{name: _text(versions.get(name)) for name in ("driver", "torch", "cuda", "hip", "nccl")},
    }


def _configuration(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What was trained and how, of the keys that a record has."""
    keys = (
        "model",
        "precision",
        "optimizer",
        "loader",
        "data_parallel",
        "accumulation",
        "compile",
        "attention",
        "configuration",
    )
    found = {key: metadata[key] for key in keys if metadata.get(key) is not None}
    model = found.get("model")
    if isinstance(model, Mapping):
        # Sizes of gradients and states are what was measured, not what was asked for.
        found["model"] = {key: value for key, value in model.items() if not key.endswith("_bytes")}
    return found


def _hash(configuration: Mapping[str, Any]) -> str:
    text = json.dumps(configuration, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mapping(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = metadata.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
