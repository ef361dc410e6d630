"""The gate: may this change land? Runs against a baseline, against absolute budgets, or both.

Against a baseline a check fails when the comparison calls a regression (see
:mod:`trine.analyzers.comparison`), or when every run needs more memory than every run of the baseline
and the effect exceeds the minimum. A budget is absolute: the median of the runs holds it or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trine.analyzers.comparison import MINIMUM_STEPS, Comparison, MetricChange, compare
from trine.analyzers.flaws import RunFlaw, flaws_of_runs
from trine.analyzers.run_facts import METRICS, RunFacts
from trine.analyzers.statistics import MINIMUM_EFFECT
from trine.record.errors import UsageError

__all__ = ["CheckResult", "Outcome", "State", "check"]

State = Literal["pass", "fail", "inconclusive"]

#: Metrics that are compared with a baseline besides the step time. Throughput is the step time again.
_COMPARED = ("peak_bytes", "reserved_peak_bytes")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check. ``expected`` is the limit, or the baseline's value; ``found`` the value now (None where
    it cannot be said); ``values`` those of the runs; ``reason`` says in words what decided."""

    id: str
    metric: str
    state: State
    expected: float
    found: float | None
    values: tuple[float, ...]
    at_least: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All checks of one call; ``comparison`` where a baseline was given; ``quality`` is what is wrong with the data."""

    outcomes: tuple[Outcome, ...]
    comparison: Comparison | None
    runs: tuple[str, ...]
    quality: tuple[RunFlaw, ...] = ()

    def count(self, state: State) -> int:
        """Number of checks in ``state``."""
        return sum(outcome.state == state for outcome in self.outcomes)

    def exit_code(self, *, strict: bool = False, warn_only: bool = False) -> int:
        """0 pass; 1 when a check failed or, under ``strict``, was inconclusive; 0 under ``warn_only``."""
        failed = self.count("fail") or (strict and self.count("inconclusive"))
        return 1 if failed and not warn_only else 0


def check(
    runs: Sequence[RunFacts],
    *,
    baseline: Sequence[RunFacts] = (),
    budget: Mapping[str, float] | None = None,
    minimum_effect: float = MINIMUM_EFFECT,
    minimum_steps: int = MINIMUM_STEPS,
    any_environment: bool = False,
) -> CheckResult:
    """Check ``runs`` against ``baseline``, ``budget``, or both.

    Raises ``NotComparable`` when the baseline and the runs cannot be compared, ``UsageError`` when
    there are no runs or nothing to check them against.
    """
    if not runs:
        raise UsageError("there are no runs to check; give at least one")
    if not baseline and not budget:
        raise UsageError("nothing to check against; give --baseline, --budget or both")
    comparison = None
    outcomes: list[Outcome] = []
    if baseline:
        comparison = compare(
            runs,
            baseline,
            minimum_effect=minimum_effect,
            minimum_steps=minimum_steps,
            any_environment=any_environment,
            judged=True,
        )
        against_baseline = [_step_time(comparison)]
        against_baseline += [
            _memory(change, minimum_effect) for change in comparison.metrics if change.name in _COMPARED
        ]
        if len(comparison.repeated) == len(runs):
            against_baseline = [_of_itself(outcome) for outcome in against_baseline]
        outcomes += against_baseline
    outcomes += [_budget(name, limit, runs) for name, limit in (budget or {}).items()]
    return CheckResult(
        tuple(outcomes), comparison, tuple(run.source for run in runs), flaws_of_runs((*runs, *baseline))
    )


def _step_time(comparison: Comparison) -> Outcome:
    states: dict[str, State] = {
        "regression": "fail",
        "inconclusive": "inconclusive",
        "one run": "inconclusive",
    }
    expected = comparison.second.median_ns
    assert comparison.step_time is not None and expected is not None  # what cannot be judged was refused
    effect = comparison.step_time.minimum_effect
    reasons = {
        "regression": f"slower than the baseline by more than {effect:.0%}, and surely so",
        "improvement": f"faster than the baseline by more than {effect:.0%}",
        "no change": f"no slow-down of more than {effect:.0%}",
        "inconclusive": f"the runs scatter too much to exclude a slow-down of {effect:.0%}",
        "one run": "one run a side proves nothing, since runs differ by more than their steps do",
    }
    return Outcome(
        id="baseline/step_time_ns",
        metric="step_time_ns",
        state=states.get(comparison.verdict, "pass"),
        expected=expected,
        found=comparison.first.median_ns,
        values=tuple(found[0] for found in comparison.first.run_medians_ns if found is not None),
        at_least=False,
        reason=reasons[comparison.verdict],
    )


def _of_itself(outcome: Outcome) -> Outcome:
    """The outcome of runs that the baseline was written from: whatever it says, nothing was checked."""
    return replace(
        outcome,
        state="inconclusive",
        reason="the baseline is of these very runs, so no change could show; write it from known-good runs",
    )


def _memory(change: MetricChange, minimum_effect: float) -> Outcome:
    several = min(len(change.first_values), len(change.second_values)) >= 2
    grown = change.ratio is not None and change.ratio > 1 + minimum_effect
    if change.worse_by(minimum_effect):
        state: State = "fail"
        reason = f"every run needs more than every run of the baseline, by more than {minimum_effect:.0%}"
    elif grown and not several:
        state, reason = (
            "inconclusive",
            f"more than {minimum_effect:.0%} above the baseline, with one run a side",
        )
    elif grown:
        state, reason = (
            "inconclusive",
            f"more than {minimum_effect:.0%} above the baseline, but the runs overlap",
        )
    else:
        state, reason = "pass", f"no growth of more than {minimum_effect:.0%}"
    return Outcome(
        id=f"baseline/{change.name}",
        metric=change.name,
        state=state,
        expected=change.second,
        found=change.first,
        values=change.first_values,
        at_least=False,
        reason=reason,
    )


def _budget(name: str, limit: float, runs: Sequence[RunFacts]) -> Outcome:
    _, more_is_better = METRICS[name]
    values = tuple(run.metrics[name] for run in runs if name in run.metrics)
    found = float(np.median(values)) if values else None
    if found is None:
        state: State = "inconclusive"
        reason = f"cannot be said: {runs[0].missing.get(name, 'the run does not say it')}"
    else:
        held = found >= limit if more_is_better else found <= limit
        state = "pass" if held else "fail"
        reason = "within the budget" if held else f"{'below' if more_is_better else 'above'} the budget"
        if len(values) < len(runs):
            reason += f"; {len(runs) - len(values)} of {len(runs)} runs do not say it"
    return Outcome(
        id=f"budget/{name}",
        metric=name,
        state=state,
        expected=limit,
        found=found,
        values=values,
        at_least=more_is_better,
        reason=reason,
    )
