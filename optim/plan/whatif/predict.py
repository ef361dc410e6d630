"""What a change would make of a recorded step: ``what_if(path, {"precision.dtype": "bf16"})``.

The replay comes first: how far the graph's own length is from the measured one, step by step, says how far the rest can be
trusted. Then the changed graph is replayed, and the step is

    usual step · replay of the changed graph / replay of the graph

Its interval is a bootstrap over what was measured (Efron and Tibshirani 1993, chapter 13): steady steps are drawn with
replacement, and of every draw the median is multiplied by the ratio of one of the replayed steps, drawn as well. A change
that reads calibrated times is known as well as they are: it is made again with calibrations that might have been measured as
well (:attr:`OperationTimes.draws`), and the ratio is drawn with the deviation that they make. And it is known as well as the
graph, whose own length is off by so much from the steps that it stands for. All of it is drawn as factors, by their
logarithms, so that no draw is a step of no time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from trine.optim.config import Config
from trine.optim.plan.units import spell_seconds
from trine.optim.plan.whatif.build import Array, Steady, graph_of
from trine.optim.plan.whatif.graph import HOST, LINK, Graph, RankStep, Step, Task, is_pipeline, mapped
from trine.optim.plan.whatif.replay import replay
from trine.optim.plan.whatif.scatter import scatter_of
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms import Change, transforms
from trine.record.errors import UsageError
from trine.record.hardware import all_calibrated, calibrated
from trine.record.loading import load
from trine.record.model import Job

__all__ = ["Interval", "Recorded", "WhatIf", "recorded", "replayed", "what_if"]

#: Kernels of NVIDIA's that round fp32 factors to TF32.
_TF32 = re.compile(r"tf32|s1688", re.IGNORECASE)
DRAWS = 1000
#: Of the bootstrap's draws, what lies inside the interval.
LEVEL = 0.95
#: Ranks on whose step other calibrations are tried: times of a machine say of each alike.
TRIED_RANKS = 2
#: Tasks of all their replays together, about two seconds of them; but at least so many calibrations are tried.
TRIED_TASKS, LEAST_TRIED = 200_000, 4


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds; ``low`` to ``high`` holds 95 % of the bootstrap's draws around ``mid``."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer. Times in seconds a step. ``replay_errors``: of each step, relative; ``replay_error`` the median of how far
    they are off, either way.

    ``gain`` is what the step would be shorter by, negative where longer. ``notes`` are what is assumed. ``usual_error``:
    how far the graph that is changed, with its host as usual and its transfers apart, is from the usual step.
    """

    changes: Mapping[str, Any]
    basis: str
    replay_error: float
    replay_errors: Mapping[int, float]
    step: Interval
    predicted: Interval
    gain: Interval
    notes: tuple[str, ...]
    usual_error: float = 0.0

    def __str__(self) -> str:
        asked = ", ".join(f"{key} = {value}" for key, value in self.changes.items())
        off = "longer" if self.usual_error > 0 else "shorter"
        return (
            f"{asked}: {spell_seconds(self.predicted.mid)} a step instead of {spell_seconds(self.step.mid)}, "
            f"{_gained(self.gain)}; the replay is {self.replay_error:.1%} off, and the graph that is changed "
            f"{abs(self.usual_error):.1%} {off} than the usual step"
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job read once, so that many changes can be asked of it: its graph as usual, its replay, and its machine's times."""

    graph: Graph
    steady: Steady
    times: OperationTimes
    replay_errors: Mapping[int, float]
    base_s: Mapping[int, float]

    @property
    def measured(self) -> Array:
        """Seconds of the steps that a change is told of: those outside windows, else the ones that are replayed."""
        if len(self.steady.seconds):
            return self.steady.seconds
        return np.array([step.measured_s for step in self.graph.steps])

    @property
    def replay_error(self) -> float:
        """The median of how far replays are off, either way: what is too long in one and too short in another is no agreement."""
        return median(map(abs, self.replay_errors.values())) if self.replay_errors else 0.0

    @property
    def usual_error(self) -> float:
        """How far the graph's length, before anything is changed, is from the median of :attr:`measured`; relative."""
        return median(self.base_s.values()) / float(np.median(self.measured)) - 1

    def what_if(self, changes: Mapping[str, Any]) -> WhatIf:
        """Raises ``UsageError`` for keys that no transformation answers for, or that this record cannot answer."""
        times = self.times.watched()
        graph = _transformed(self.graph, changes, times)
        ratios = np.array(
            [replay(step, graph.slowdown).seconds / self.base_s[step.index] for step in graph.steps]
        )
        measured, error, deviation = self.measured, self.usual_error, 0.0
        if len(measured) == 1:
            graph = graph.with_note("one step was recorded: how steps vary is not in the interval")
        if times.asked:
            if not self.times.keeps_variation:
                graph = graph.with_note(_UNSURE)
            if self.times.doubt is not None:
                graph = graph.with_note(self.times.doubt)
            deviation = _deviation(self.graph, changes, self.times)
        before, after = _bootstrap(measured, ratios, deviation, error)
        usual = float(np.median(measured))
        predicted = usual * median(ratios.tolist())
        return WhatIf(
            dict(changes), graph.basis, self.replay_error, self.replay_errors,
            _interval(usual, before), _interval(predicted, after), _interval(usual - predicted, before - after),
            graph.notes, error,
        )  # fmt: skip


def what_if(path: str | Path | Job, changes: Mapping[str, Any]) -> WhatIf:
    """What ``changes`` would make of the step that ``path`` recorded.

    Args:
        path: a record, traces, or what :func:`trine.load` returned.
        changes: keys of the configuration (``{"precision.dtype": "bf16"}``), or ``ranks``, ``straggler`` (false),
            ``loader_wait`` (false), ``product_speed``, ``memory_speed``, ``link_speed``.

    Raises ``UsageError`` for what cannot be answered, ``UnreadableInput`` where nothing can be read.
    """
    return recorded(path).what_if(changes)


def recorded(path: str | Path | Job, times: OperationTimes | None = None) -> Recorded:
    """The graph of a job, replayed. ``times``: by default this machine's calibration for the record's device."""
    return replayed(*graph_of(path if isinstance(path, Job) else load(path)), times)


def replayed(graph: Graph, steady: Steady, times: OperationTimes | None = None) -> Recorded:
    """The same of a graph that was built already."""
    if times is None:
        times, assumed = _times_of(graph.facts)
        graph = graph.with_note(assumed) if assumed else graph
    graph = _as_multiplied(graph)
    errors = {}
    for step in graph.recorded:
        errors[step.index] = replay(step).seconds / step.measured_s - 1
    if graph.basis == "operators" and times.slowdown > 0 and _is_crowded(graph):
        graph = replace(
            graph, slowdown=times.slowdown, steps=tuple(_apart(step, times.slowdown) for step in graph.steps)
        )
        graph = graph.with_note(
            f"a second of transfer beside computing costs {times.slowdown:.2f} s of it, as calibrated"
        )
    times = times.scattered(scatter_of(graph, times))
    base = {step.index: replay(step, graph.slowdown).seconds for step in graph.steps}
    return Recorded(graph, steady, times, errors, base)


def _times_of(facts: Mapping[str, Any]) -> tuple[OperationTimes, str | None]:
    """The calibration of the record's device, and what is assumed where it is of other threads than the record's."""
    device = facts.get("device")
    if not isinstance(device, Mapping) or not device.get("name"):
        return OperationTimes(None), None
    name, threads = str(device["name"]), device.get("threads")
    if (exact := calibrated(name, threads)) is not None or not threads:
        return OperationTimes(exact), None
    near = min(
        (peaks for peaks in all_calibrated() if peaks.name == name and peaks.threads),
        key=lambda peaks: abs(log((peaks.threads or 1) / threads)),
        default=None,
    )
    if near is None:
        return OperationTimes(None), None
    return OperationTimes(near), (
        f"ratios of times are those calibrated with {near.threads} thread{'s' if near.threads != 1 else ''}; the record's ranks "
        f"have {threads}"
    )


def _as_multiplied(graph: Graph) -> Graph:
    """Products that a device has rounded to TF32, as the record allows or a kernel's name says, are products in TF32."""
    precision = graph.facts.get("precision")
    allowed = isinstance(precision, Mapping) and precision.get("float32_matmul") in ("high", "medium")

    def multiplied(task: Task) -> Task:
        wide = task.kind == "product" and task.lane != HOST and task.operator.dtype == "fp32"
        if wide and (allowed or _TF32.search(task.name)):
            return replace(task, operator=replace(task.operator, dtype="tf32"))
        return task

    return mapped(graph, lambda step: map(multiplied, step.tasks))


def _is_crowded(graph: Graph) -> bool:
    """Whether ranks compute on the host itself."""
    device = graph.facts.get("device")
    return not isinstance(device, Mapping) or device.get("type") in (None, "cpu")


def _transformed(graph: Graph, changes: Mapping[str, Any], times: OperationTimes) -> Graph:
    if not isinstance(changes, Mapping) or not changes:
        raise UsageError(
            f'what_if wants changes by key, as {{"precision.dtype": "bf16"}}, not {changes!r:.60}'
        )
    known = {key for each in transforms() for key in each.KEYS}
    for key in changes:
        if key not in known:
            raise UsageError(f"what_if has no answer for {key!r}: it knows {', '.join(sorted(known))}")
    config = Config().with_changes({key: value for key, value in changes.items() if "." in key})
    change = Change(changes, config, times)
    for each in transforms():
        if any(key in changes for key in each.KEYS):
            graph = each.apply(graph, change)
    return graph


#: Of a calibration of an earlier release.
_UNSURE = "how calibrated times vary is not in the interval: this calibration keeps no quartiles; run trine hardware --calibrate again"


def _deviation(graph: Graph, changes: Mapping[str, Any], times: OperationTimes) -> float:
    """Of the logarithm of the step with the changes, over calibrations that might have been measured as well."""
    if not times.draws:
        return 0.0
    step = graph.steps[0]
    if not is_pipeline(graph):
        step = replace(step, ranks=step.ranks[:TRIED_RANKS])
    graph = replace(graph, steps=(step,))

    def seconds(each: OperationTimes) -> float:
        return replay(_transformed(graph, changes, each).steps[0], graph.slowdown).seconds

    count = max(TRIED_TASKS // sum(len(each.tasks) for each in step.ranks), LEAST_TRIED)
    usual = seconds(times)
    off = [log(seconds(each) / usual) for each in times.draws[:count]]
    return sqrt(fmean(each**2 for each in off))


def _apart(step: Step, slowdown: float) -> Step:
    """Host time without what transfers beside it cost: the replay adds it again."""
    return replace(step, ranks=tuple(_quick(each, slowdown) for each in step.ranks))


def _quick(each: RankStep, slowdown: float) -> RankStep:
    """Tasks that ran beside this rank's transfers, by as much shorter. Times of the host's own clock."""
    found: list[Task] = []
    now, free = 0.0, 0.0
    flights: list[tuple[float, float]] = []
    for task in each.tasks:
        if task.lane == LINK:
            free = max(free, now) + task.seconds
            flights.append((free - task.seconds, free))
            found.append(task)
        elif task.lane == HOST:
            if task.kind == "wait" and task.after:
                now = max(now, free)
            beside = sum(
                max(min(end, now + task.seconds) - max(begin, now), 0.0) for begin, end in flights[-4:]
            )
            found.append(replace(task, seconds=max(task.seconds - slowdown * beside, 0.0)))
            now += task.seconds
        else:
            found.append(task)
    return replace(each, tasks=tuple(found))


def _bootstrap(measured: Array, ratios: Array, deviation: float, error: float) -> tuple[Array, Array]:
    """Medians of draws before the change, and the same draws after it, each of shape (DRAWS,).

    ``deviation``: of the ratio's logarithm, by the calibration. ``error``: of the graph, relative, either way.
    """
    random = np.random.default_rng(0)
    drawn = random.choice(measured, (DRAWS, len(measured)))
    before = np.median(drawn, axis=1)
    factors = random.choice(ratios, DRAWS) * np.exp(deviation * random.standard_normal(DRAWS))
    # What the graph has too much of, or lacks, is in both replays: of it, only the change's share is in doubt.
    return before, before * factors ** (1 + random.choice([-1, 1], DRAWS) * abs(error))


def _gained(gain: Interval) -> str:
    """A gain or a cost, and what it lies between."""
    if gain.low < 0 < gain.high:
        between = f"between a cost of {spell_seconds(-gain.low)} and a gain of {spell_seconds(gain.high)}"
        return f"{'a gain' if gain.mid >= 0 else 'a cost'} of {spell_seconds(abs(gain.mid))} ({between})"
    low, high = sorted((abs(gain.low), abs(gain.high)))
    word = "cost" if gain.mid < 0 else "gain"
    return f"a {word} of {spell_seconds(abs(gain.mid))} ({spell_seconds(low)} to {spell_seconds(high)})"


def _interval(mid: float, draws: Any) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(min(float(low), mid), mid, max(float(high), mid))
