"""Scaling: the same training on 1 … N devices, how much of N devices' throughput is had, and what the rest goes into.

    efficiency(n) = throughput(n) / (n / n₀ · throughput(n₀)),   n₀ the fewest devices

*Weak* scaling keeps the work of a device (each brings its own batch), *strong* scaling the work of a step (the
batch is shared out). Which of them runs are is read off the work a device does in a step, in tokens, in samples,
or, of traces, in operators' calls and compute time.

What a step should take on n devices is its time on n₀ times the ratio of the work a device does. The loss is what
it takes beyond that, and each part of the step (a phase, or a part of the breakdown) has its own.

The fit is the universal scalability law (Gunther 2008, "A general theory of computational scalability based on
rational functions", equation 4): relative capacity C(x) = x / (1 + σ(x − 1) + κ x(x − 1)) with x = n/n₀. σ is
contention: what cannot be shared out (with κ = 0 this is Amdahl's law, with σ its serial fraction); κ is
coherence: what grows with every pair of devices, and makes more of them slower from some number on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from trine.analyzers._scalability_law import Fit, fit_law
from trine.analyzers._scaling_work import Mode, Work, WorkUnit
from trine.analyzers.difference import equal_work, mean_parts, scaled
from trine.analyzers.flaws import flaws_of_runs
from trine.analyzers.run_facts import RunFacts
from trine.analyzers.shared_cores import ID as SHARED_CORES
from trine.analyzers.statistics import bootstrap_median, ratio_of_medians
from trine.analyzers.units import percent
from trine.record.errors import NotComparable, UsageError
from trine.record.model import PHASES

__all__ = ["Fit", "Mode", "PartLoss", "ScalingPoint", "ScalingResult", "scale"]

#: Sizes of one model may differ by this much: vocabularies are padded to the parallel layout.
_SAME_MODEL = 0.02
#: From so many steady steps on, the interval of a median lies within them (see ``comparison``).
_FEW_STEPS = 6

_BREAKDOWN = ("compute", "exposed_communication", "exposed_copy", "idle")
UNEVEN = "uneven_ranks"


@dataclass(frozen=True, slots=True)
class PartLoss:
    """A part of the step, mean ns: what it takes, and what it would at the fewest devices' rate.

    ``share`` is its loss over the loss of the whole step (None where that is nothing)."""

    name: str
    ns: float
    ideal_ns: float
    share: float | None

    @property
    def loss_ns(self) -> float:
        """What the part takes beyond its ideal; negative where it takes less."""
        return self.ns - self.ideal_ns


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One device count. Times in ns: median of the steady steps (slowest rank step by step) with its interval,
    over the runs of this count. ``throughput`` is in work a second, ``work_per_device`` a step's, both None where
    the work is not known. ``efficiency`` of the fewest devices is 1. ``parts`` sum to ``mean_ns``."""

    devices: int
    sources: tuple[str, ...]
    steps: int
    step_ns: float
    low_ns: float
    high_ns: float
    throughput: float
    work_per_device: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    hosts: int | None
    mean_ns: float | None
    ideal_ns: float | None
    parts: tuple[PartLoss, ...]

    @property
    def loss_ns(self) -> float | None:
        """What a step takes beyond its ideal."""
        if self.mean_ns is None or self.ideal_ns is None:
            return None
        return self.mean_ns - self.ideal_ns


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """The whole answer, points by device count. ``mode_by`` says what the mode was read off, ``partition`` whether
    parts are phases or the breakdown (None where counts have neither in common). ``notices`` are what the efficiency
    cannot be read without."""

    points: tuple[ScalingPoint, ...]
    mode: Mode
    mode_by: str
    work_unit: WorkUnit
    partition: Literal["phases", "breakdown"] | None
    fit: Fit | None
    notes: tuple[str, ...]
    notices: tuple[str, ...] = ()


def scale(
    runs: Sequence[RunFacts],
    *,
    mode: Mode | None = None,
    any_environment: bool = False,
    confidence: float = 0.95,
) -> ScalingResult:
    """Efficiency over device counts; several runs of one count are repeats.

    ``mode``: what the user says of runs whose work a step is not recorded. Raises ``NotComparable`` when all
    runs have one device count, hold no steps, train different models, or (unless ``any_environment``) ran on
    different devices; ``UsageError`` without runs.
    """
    if not runs:
        raise UsageError("there are no runs to compare; give at least two of different device counts")
    runs, said = _timed(runs)
    by_count = _by_count(runs)
    _refuse_strangers(runs, any_environment)
    fewest = min(by_count)
    work = Work(by_count, mode)
    partition = _partition(by_count)
    points = tuple(
        _point(count, by_count[count], by_count[fewest], fewest, work, partition, confidence)
        for count in sorted(by_count)
    )
    return ScalingResult(
        points=points,
        mode=work.mode,
        mode_by=work.said,
        work_unit=work.unit,
        partition=partition,
        fit=fit_law([point.devices for point in points], [point.efficiency for point in points]),
        notes=(*said, *_notes(runs, by_count, work)),
        notices=_notices(by_count),
    )


# --- what may be compared ------------------------------------------------------------------------


def device_count(run: RunFacts) -> int:
    """Devices of a run: one a rank, all ranks of the world."""
    world = run.environment.get("world_size")
    if isinstance(world, int) and world > 0:
        return world
    return run.window.ranks if run.window is not None else 1


def _timed(runs: Sequence[RunFacts]) -> tuple[list[RunFacts], tuple[str, ...]]:
    """The runs with step times; where one marks no steps, windows of equal work stand for steps on all sides."""
    silent = [run for run in runs if not run.step_ns]
    if not silent:
        return list(runs), ()
    base = min(runs, key=device_count)
    units = [equal_work(mean_parts([run]), mean_parts([base])) for run in runs]
    if base.window is None or any(
        unit is None or run.window is None for unit, run in zip(units, runs, strict=True)
    ):
        raise NotComparable(
            f"{silent[0].source} holds no steps that can be timed, so its throughput is not known; record it with"
            " trine run, or mark steps in the trace (profiler.step(), or an NVTX range named step 12)"
        )
    timed = [
        _as_one_step(run, unit.ratio or 1.0)
        for run, unit in zip(runs, units, strict=True)
        if unit is not None
    ]
    uncertain = max(unit.uncertainty or 0.0 for unit in units if unit is not None)
    said = (
        f"{PurePath(silent[0].source).name} marks no steps, so for all runs a step is as much work as the window of"
        f" {PurePath(base.source).name} holds, by the calls of its kernels; where windows were cut leaves that uncertain"
        f" by {percent(uncertain)}"
    )
    return timed, (said,)


def _as_one_step(run: RunFacts, ratio: float) -> RunFacts:
    """A run whose window counts as one step of the base's work."""
    assert run.window is not None
    whole = run.window.ns / ratio
    parts = tuple(scaled(part, 1 / ratio) for part in run.parts if part.kind != "phase")
    metrics = {name: value for name, value in run.metrics.items() if not name.endswith("_per_s")}
    return replace(run, step_ns=(round(whole),), parts=parts, metrics=metrics)


def _by_count(runs: Sequence[RunFacts]) -> dict[int, list[RunFacts]]:
    by_count: dict[int, list[RunFacts]] = defaultdict(list)
    for run in runs:
        by_count[device_count(run)].append(run)
    if len(by_count) < 2:
        only = next(iter(by_count))
        runs_are = f"all {len(runs)} runs are" if len(runs) > 1 else "the one run is"
        raise NotComparable(
            f"{runs_are} on {only} device{'s' if only > 1 else ''}; scaling needs runs on different"
            " numbers of devices (several of one number are compared with trine compare)"
        )
    return dict(by_count)


def _refuse_strangers(runs: Sequence[RunFacts], any_environment: bool) -> None:
    first = runs[0]
    for run in runs[1:]:
        for name in ("class", "parameters"):
            one, other = (_mapping(each.configuration.get("model")).get(name) for each in (first, run))
            if not _alike(one, other):
                raise NotComparable(
                    f"the runs train different models: {name} is {one} in {first.source} and {other} in {run.source};"
                    " scaling compares one model over device counts"
                )
        if any_environment:
            continue
        one, other = first.environment.get("device"), run.environment.get("device")
        if one and other and one != other:
            raise NotComparable(
                f"the runs are on different devices: {one} in {first.source} and {other} in {run.source};"
                " run all on one kind, or pass --any-environment to see them anyway"
            )
        if not _seem_one_program(first, run):
            raise NotComparable(
                f"{first.source} and {run.source} do not seem to train one model: their kernels and operators do not"
                " run in one proportion; pass --any-environment if they do"
            )


def _seem_one_program(first: RunFacts, second: RunFacts) -> bool:
    """Whether what ran agrees, of runs that do not both say what they train."""
    if all(_mapping(run.configuration.get("model")).get("parameters") for run in (first, second)):
        return True
    one, other = mean_parts([first]), mean_parts([second])
    shown = [{kind for kind, _ in parts} & {"kernel", "operator"} for parts in (one, other)]
    return not shown[0] & shown[1] or equal_work(one, other) is not None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= _SAME_MODEL * max(abs(one), abs(other))
    return bool(one == other)


# --- points --------------------------------------------------------------------------------------


def _partition(by_count: Mapping[int, Sequence[RunFacts]]) -> Literal["phases", "breakdown"] | None:
    """Phases where all counts have them: they cover every step, a breakdown the few that were traced."""
    kinds = [{part.kind for run in runs for part in run.parts} for runs in by_count.values()]
    common = set.intersection(*kinds)
    return "phases" if "phase" in common else "breakdown" if "breakdown" in common else None


def _point(
    count: int,
    runs: Sequence[RunFacts],
    base: Sequence[RunFacts],
    fewest: int,
    work: Work,
    partition: Literal["phases", "breakdown"] | None,
    confidence: float,
) -> ScalingPoint:
    step, low, high = _step_time(runs, confidence)
    ratio = ratio_of_medians(
        [run.step_ns for run in runs], [run.step_ns for run in base], confidence=confidence
    )
    of_work = work.ratio(count, fewest)
    mine, ideal = _parts(runs, partition), _parts(base, partition)
    whole = sum(mine.values()) if mine else None
    whole_ideal = sum(ideal.values()) * of_work if ideal else None
    loss = whole - whole_ideal if whole is not None and whole_ideal is not None else 0.0
    own = count == fewest
    return ScalingPoint(
        devices=count,
        sources=tuple(run.source for run in runs),
        steps=sum(len(run.step_ns) for run in runs),
        step_ns=step,
        low_ns=low,
        high_ns=high,
        throughput=work.per_device[count] * count / (step / 1e9),
        work_per_device=work.per_device[count],
        efficiency=1.0 if own else of_work / ratio.ratio,
        efficiency_low=1.0 if own else of_work / ratio.high,
        efficiency_high=1.0 if own else of_work / ratio.low,
        hosts=_hosts(runs),
        mean_ns=whole,
        ideal_ns=whole_ideal,
        parts=tuple(
            PartLoss(
                name,
                ns,
                ideal.get(name, 0.0) * of_work,
                (ns - ideal.get(name, 0.0) * of_work) / loss if loss else None,
            )
            for name, ns in mine.items()
        ),
    )


def _step_time(runs: Sequence[RunFacts], confidence: float) -> tuple[float, float, float]:
    """Median of the runs' medians, and an interval: of one run its steps', of several the runs' and steps'."""
    if len(runs) == 1:
        return bootstrap_median(runs[0].step_ns, confidence)
    median = float(np.median([np.median(run.step_ns) for run in runs]))
    # Against a constant the ratio of medians is the median itself, in units of the constant.
    ratio = ratio_of_medians([run.step_ns for run in runs], [[median]], confidence=confidence)
    return median, ratio.low * median, ratio.high * median


def _parts(runs: Sequence[RunFacts], partition: Literal["phases", "breakdown"] | None) -> dict[str, float]:
    """Parts of a step, mean ns of the ranks; with phases also how much the slowest rank takes beyond the mean."""
    if partition is None:
        return {}
    kind, names = ("phase", PHASES) if partition == "phases" else ("breakdown", _BREAKDOWN)
    means = mean_parts(runs)
    parts = {name: means[kind, name].ns for name in names if (kind, name) in means}
    if partition == "phases":
        slowest = float(np.mean([np.mean(run.step_ns) for run in runs]))
        parts[UNEVEN] = max(slowest - sum(parts.values()), 0.0)
    return parts


def _hosts(runs: Sequence[RunFacts]) -> int | None:
    known = [hosts for run in runs if isinstance(hosts := run.environment.get("hosts"), int)]
    return max(known, default=None)


# --- notes ---------------------------------------------------------------------------------------


def _notices(by_count: Mapping[int, Sequence[RunFacts]]) -> tuple[str, ...]:
    """Counts at which ranks took turns on cores: what is lost there is not the program's."""
    said = {
        count: flaw.message
        for count, runs in sorted(by_count.items())
        for run in runs
        for flaw in run.flaws
        if flaw.id == SHARED_CORES
    }
    if not said:
        return ()
    held = "; ".join(f"on {count} devices, {message}" for count, message in said.items())
    return (
        f"{held[:1].upper()}{held[1:]}. Throughput cannot grow there in proportion to ranks, whatever the program does.",
    )


_STEPS_NOTE = {
    "weak": "no run says how many tokens or samples a step holds, so throughput counts each device's steps",
    "strong": "no run says how many tokens or samples a step holds, so throughput counts steps",
    "mixed": "no run says how many tokens or samples a step holds",
}


def _notes(runs: Sequence[RunFacts], by_count: Mapping[int, Sequence[RunFacts]], work: Work) -> list[str]:
    notes = []
    if work.assumed:
        notes.append(
            "no run says how many tokens or samples a step holds, and its compute time does not tell either: each"
            " device is taken to keep its batch (weak scaling); pass --mode strong if the batch is shared out"
        )
    elif work.unit == "steps":
        notes.append(
            "no run says how many tokens or samples a step holds, so throughput is in steps of the fewest devices' work"
        )
    if work.mode == "mixed":
        notes.append(
            "the work of a device changes from count to count, so this is neither weak nor strong scaling alone"
        )
    if all(len(each) == 1 for each in by_count.values()):
        notes.append(
            "one run a count: intervals show what varies inside a run, and runs differ by more; repeat each count"
        )
    short = min(runs, key=lambda run: len(run.step_ns))
    if len(short.step_ns) < _FEW_STEPS:
        steps = len(short.step_ns)
        notes.append(f"{short.source} has only {steps} steady step{'s' if steps > 1 else ''}")
    versions = {name: {run.environment[name] for run in runs if run.environment.get(name)} for name in ("device", "torch", "driver", "cuda", "nccl", "backend")}  # fmt: skip
    apart = [
        f"{name} ({', '.join(sorted(map(str, values)))})"
        for name, values in versions.items()
        if len(values) > 1
    ]
    if apart:
        notes.append(f"the runs differ in more than the number of devices: {'; '.join(apart)}")
    notes += [each.words for each in flaws_of_runs(runs) if each.flaw.id != SHARED_CORES]
    return notes
