"""Two sides of a comparison, each one or several runs: is the first slower than the second, and why?

A regression needs both: the hierarchical bootstrap (runs, then steps) of the ratio of median step
times excludes 1, and the effect exceeds the minimum (5 % unless set). With one run a side nothing is
concluded, because runs differ by more than their steps do; the interval is shown all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from trine.analyzers._comparison_notes import notes_of, repeated_runs
from trine.analyzers.causes import Cause, causes_of, wholes_of
from trine.analyzers.difference import RunDifference, differ
from trine.analyzers.finding_changes import FindingChange, finding_changes
from trine.analyzers.flaws import RunFlaw, flaws_of_runs
from trine.analyzers.run_facts import METRICS, RunFacts
from trine.analyzers.statistics import MINIMUM_EFFECT, Ratio, bootstrap_median, ratio_of_medians
from trine.record.errors import NotComparable, UsageError

__all__ = [
    "MINIMUM_STEPS",
    "Cause",
    "Comparison",
    "Difference",
    "MetricChange",
    "Side",
    "Verdict",
    "compare",
    "environment_differences",
]

#: From six samples on, the 95 % interval of a median lies within them: 2 · 0.5⁶ < 0.05.
MINIMUM_STEPS = 6

#: Endings that say what a file is, not which.
_ENDINGS = re.compile(r"(?:\.(?:pt|trace|json|gz|gzip|sqlite|tar|tgz))+$")

Verdict = Literal["regression", "improvement", "no change", "inconclusive", "one run", "not judged"]


@dataclass(frozen=True, slots=True)
class Side:
    """One side. Times in ns: the median of the runs' medians, and each run's median with its interval;
    None of runs that mark no steps. ``label`` tells the side from the other in few letters; ``window_steps`` is how
    many steps the breakdown and what it divides are means of (None without one), over all runs."""

    sources: tuple[str, ...]
    steps: tuple[int, ...]
    warm_up: tuple[int, ...]
    median_ns: float | None
    run_medians_ns: tuple[tuple[float, float, float] | None, ...]  # (median, low, high) a run
    label: str = ""
    window_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that the two sides say differently about themselves."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class MetricChange:
    """Another metric on both sides: the median over runs, and all values.

    ``separate``: every run of one side lies beyond every run of the other, with several runs each.
    """

    name: str
    first: float
    second: float
    first_values: tuple[float, ...]
    second_values: tuple[float, ...]
    more_is_better: bool
    separate: bool

    @property
    def ratio(self) -> float | None:
        """First over second, None where the second is 0."""
        return self.first / self.second if self.second else None

    def worse_by(self, minimum_effect: float) -> bool:
        """Whether the runs are apart, to the worse side, by more than ``minimum_effect``."""
        if not self.separate or self.ratio is None or self.ratio <= 0:
            return False
        return (1 / self.ratio if self.more_is_better else self.ratio) > 1 + minimum_effect


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole answer. ``causes`` are ordered by size within each kind; kinds overlap each other. ``wholes`` are
    what phases and breakdown divide. ``step_time`` is None where traces hold too few steps for a verdict;
    ``difference`` says what changed; ``findings`` is None where a side's are not known. ``quality`` is what is wrong
    with the data of a run, ``repeated`` the runs of the first side that stand on the second too."""

    first: Side
    second: Side
    step_time: Ratio | None
    verdict: Verdict
    metrics: tuple[MetricChange, ...]
    causes: tuple[Cause, ...]
    wholes: tuple[Cause, ...]
    environment: tuple[Difference, ...]
    configuration: tuple[Difference, ...]
    notes: tuple[str, ...]
    difference: RunDifference
    findings: tuple[FindingChange, ...] | None = None
    quality: tuple[RunFlaw, ...] = ()
    repeated: tuple[str, ...] = ()


def compare(
    first: Sequence[RunFacts],
    second: Sequence[RunFacts],
    *,
    minimum_effect: float = MINIMUM_EFFECT,
    confidence: float = 0.95,
    minimum_steps: int = MINIMUM_STEPS,
    any_environment: bool = False,
    judged: bool = False,
) -> Comparison:
    """Compare ``first`` (usually the new) with ``second`` (usually the old).

    Traces of a few steps, or of none, give no verdict, yet what changed in them can be said. Records must
    hold enough steps, and with ``judged`` (for gates) everything must.

    Raises ``NotComparable`` when a run has fewer than ``minimum_steps`` steady steps, unless it is a trace
    that may go unjudged; when the environments differ and ``any_environment`` is false; or when two traces
    have nothing in common that could be compared. ``UsageError`` on a side without runs.
    """
    if not first or not second:
        raise UsageError("a side of the comparison has no runs; give at least one on each")
    if not 0 < minimum_effect < 1:
        raise UsageError(f"the minimum effect must lie between 0 and 1, not {minimum_effect}; 0.05 is 5 %")
    environment = environment_differences(first, second)
    if environment and not any_environment:
        raise NotComparable(_different_environments(environment))
    for run in (*first, *second):
        if judged or not _is_trace(run):
            _require_steps(run, minimum_steps)
    enough = all(len(run.step_ns) >= max(minimum_steps, 1) for run in (*first, *second))
    ratio = None
    if enough:
        ratio = ratio_of_medians(
            [run.step_ns for run in first],
            [run.step_ns for run in second],
            minimum_effect=minimum_effect,
            confidence=confidence,
        )
    difference = differ(first, second)
    if ratio is None and difference.first_ns is None:
        raise NotComparable(_nothing_in_common(first, second, minimum_steps))
    labels = _labels([run.source for run in first], [run.source for run in second])
    return Comparison(
        first=_side(first, confidence, labels[0]),
        second=_side(second, confidence, labels[1]),
        step_time=ratio,
        verdict="not judged" if ratio is None else _verdict(ratio),
        metrics=_metric_changes(first, second),
        causes=causes_of(first, second) if ratio is not None else (),
        wholes=wholes_of(first, second) if ratio is not None else (),
        environment=environment,
        configuration=_configuration_differences(first, second),
        notes=notes_of(first, second, ratio, difference, minimum_steps),
        difference=difference,
        findings=finding_changes(first, second),
        quality=flaws_of_runs((*first, *second)),
        repeated=repeated_runs(first, second),
    )


def _is_trace(run: RunFacts) -> bool:
    return run.format not in ("", "trine")


def _nothing_in_common(first: Sequence[RunFacts], second: Sequence[RunFacts], minimum_steps: int) -> str:
    short = next(run for run in (*first, *second) if len(run.step_ns) < max(minimum_steps, 1))
    return (
        f"{short.source} has {len(short.step_ns)} steady steps, too few to compare, and the two sides have no breakdown"
        " in common either; record more steps, or trace device work on both sides"
    )


def _require_steps(run: RunFacts, minimum_steps: int) -> None:
    if len(run.step_ns) >= max(minimum_steps, 1):
        return
    left_out = f" ({run.warm_up} more are warm-up)" if run.warm_up else ""
    way_out = "record more steps" + (f", or pass --min-steps {len(run.step_ns)}" if run.step_ns else "")
    raise NotComparable(
        f"{run.source} has {len(run.step_ns)} steady steps{left_out}, too few to compare"
        f" (at least {max(minimum_steps, 1)} are needed); {way_out}"
    )


def _side(runs: Sequence[RunFacts], confidence: float, label: str) -> Side:
    medians = tuple(bootstrap_median(run.step_ns, confidence) if run.step_ns else None for run in runs)
    known = [found[0] for found in medians if found is not None]
    windows = [run.window.steps for run in runs if run.window is not None]
    return Side(
        sources=tuple(run.source for run in runs),
        steps=tuple(len(run.step_ns) for run in runs),
        warm_up=tuple(run.warm_up for run in runs),
        median_ns=float(np.median(known)) if known else None,
        run_medians_ns=medians,
        label=label,
        window_steps=sum(windows) if windows else None,
    )


def _labels(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """What tells the sides apart: the shortest tail of their paths that does, less what both have in common; where
    none does (CI records every run into one folder), new and old."""
    labels = _label(first, second), _label(second, first)
    if labels[0] == labels[1]:
        return "new", "old"
    start = _shared(*labels)
    end = _shared(labels[0][start:][::-1], labels[1][start:][::-1])
    rest = tuple(label[start : len(label) - end].rstrip("_-./ ") for label in labels)
    telling = all(any(letter.isalpha() for letter in one) for one in rest)
    return (rest[0], rest[1]) if telling else labels


def _shared(one: str, other: str) -> int:
    """How many letters two names share at their beginning, whole words only."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    return max((one.rfind(mark, 0, length) + 1 for mark in "_-/ "), default=0)


def _label(own: Sequence[str], others: Sequence[str]) -> str:
    for depth in (1, 2, 3):
        names = [_tail(source, depth) for source in own]
        if not set(names) & {_tail(source, depth) for source in others}:
            break
    more = f" +{len(own) - 1}" if len(own) > 1 else ""
    return f"{names[0]}{more}"


def _tail(source: str, depth: int) -> str:
    """The last parts of a path, without the endings of traces and baselines."""
    tail = "/".join(PurePath(source).parts[-depth:]) or source
    return _ENDINGS.sub("", tail) or tail


def _verdict(ratio: Ratio) -> Verdict:
    if not ratio.several:
        return "one run"
    if ratio.slower:
        return "regression"
    if ratio.faster:
        return "improvement"
    return "no change" if ratio.conclusive else "inconclusive"


# --- environment and configuration -------------------------------------------------------------


def environment_differences(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> tuple[Difference, ...]:
    """Keys of the environment on which runs that say something differ, between the sides or within one.

    ``first`` and ``second`` of a difference are what each side says: a value, or several in one text.
    """
    differences = []
    for name in dict.fromkeys(key for run in (*first, *second) for key in run.environment):
        said = [_known(side, name) for side in (first, second)]
        if len(set(said[0]) | set(said[1])) > 1:
            differences.append(Difference(name, *(_one_or_all(values) for values in said)))
    return tuple(difference for difference in differences if difference.first is not None)


def _known(side: Sequence[RunFacts], name: str) -> list[Any]:
    return [run.environment[name] for run in side if run.environment.get(name) is not None]


def _one_or_all(values: list[Any]) -> Any:
    unique = list(dict.fromkeys(values))
    if not unique:
        return None
    return unique[0] if len(unique) == 1 else " and ".join(str(value) for value in unique)


def _different_environments(differences: Sequence[Difference]) -> str:
    said = "; ".join(f"{d.name} is {d.first} against {d.second}" for d in differences)
    return (
        f"the runs come from different environments: {said};"
        " run both sides on the same machines and versions, or pass --any-environment to see them anyway"
    )


def _configuration_differences(
    first: Sequence[RunFacts], second: Sequence[RunFacts]
) -> tuple[Difference, ...]:
    """Configuration keys, as dotted paths, that differ between the first runs of the sides."""
    flat = [_flatten(side[0].configuration) for side in (first, second)]
    if not flat[0] or not flat[1]:
        return ()
    keys = sorted(set(flat[0]) | set(flat[1]))
    return tuple(
        Difference(key, flat[0].get(key), flat[1].get(key))
        for key in keys
        if flat[0].get(key) != flat[1].get(key)
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            # A baseline went through JSON, which has no tuples.
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


# --- metrics -------------------------------------------------------------------------------------


def _metric_changes(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> tuple[MetricChange, ...]:
    changes = []
    for name, (_, more_is_better) in METRICS.items():
        new, old = (
            tuple(run.metrics[name] for run in side if name in run.metrics) for side in (first, second)
        )
        if not new or not old:
            continue
        apart = min(new) > max(old) or max(new) < min(old)
        several = min(len(new), len(old)) >= 2
        medians = float(np.median(new)), float(np.median(old))
        changes.append(MetricChange(name, *medians, new, old, more_is_better, apart and several))
    return tuple(changes)
