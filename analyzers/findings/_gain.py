"""Predicted gains: the step's dependency graph changed and replayed, else Amdahl's law on the measured partition.

Where a rule names the change of configuration and the record holds operators or kernels, the step is replayed with it
(:mod:`trine.analyzers.studies.what_if`), and the interval is a bootstrap over the measured steps. Elsewhere a change
that speeds a part of the step up by a factor ``k`` gains ``part × (1 − 1/k)`` and leaves the rest as it is (Amdahl,
AFIPS 1967). The interval comes from three factors. Where they are from stands in ``docs/findings.md``; none is measured on
this run, so the formula calls it an estimate and gives its range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trine.analyzers.results import Gain, Prediction
from trine.analyzers.studies import result_of
from trine.analyzers.studies.what_if import KEY, WhatIfs

from ._facts import Facts

__all__ = ["OPPORTUNITY_SHARE", "faster", "memory_only", "predict", "worth_it"]

#: The formula of a gain that was replayed.
REPLAYED = "usual step − usual step × replay with the change ÷ replay (docs/whatif.md); 95 % of draws of steps and calibrations"
#: An opportunity shows only from this predicted share of the step on (design: "A healthy run gets no fault").
OPPORTUNITY_SHARE = 0.05


def faster(low: float, mid: float, high: float) -> tuple[float, float, float]:
    """Fractions of a part that speed-ups by these factors save: ``1 − 1/k`` each."""
    return (1 - 1 / low, 1 - 1 / mid, 1 - 1 / high)


def predict(
    facts: Facts,
    stake_ns: float,
    saved: tuple[float, float, float],
    formula: str,
    inputs: Mapping[str, float | int | str],
    peak_bytes_change: int | None = None,
    change: Mapping[str, Any] | None = None,
    most_ns: float | None = None,
) -> Prediction | None:
    """Gain per step when the fractions ``saved`` (low, mid, high) of ``stake_ns`` go away.

    Negative fractions are a cost. ``change`` is what is recommended: where the step can be replayed with it, the gain is
    the replay's, no more than ``most_ns``, and Amdahl's stands among the inputs. None when the step time is unknown: a gain
    without a step has no use.
    """
    if facts.step_ns is None or facts.step_ns <= 0:
        return None
    step = facts.step_ns
    if change and (found := _replayed(facts, change)) is not None:
        amdahl = round(stake_ns * sorted(saved)[1])
        words = {
            f"{facts.unit}_time_ns": step,
            "at_stake_ns": round(stake_ns),
            "amdahl_gain_ns": amdahl,
            **inputs,
        }
        gain, error = found
        if most_ns is not None:
            gain = Gain(*(min(each, round(most_ns)) for each in (gain.low, gain.mid, gain.high)))
        after = Gain(step - gain.high, step - gain.mid, step - gain.low)
        words["replay_error"] = round(error, 4)
        return Prediction(gain, after, peak_bytes_change, REPLAYED, words)
    low, mid, high = sorted(min(round(stake_ns * fraction), step) for fraction in saved)
    words = {f"{facts.unit}_time_ns": step, "at_stake_ns": round(stake_ns), **inputs}
    after = Gain(step - high, step - mid, step - low)
    return Prediction(Gain(low, mid, high), after, peak_bytes_change, formula + _range(saved), words)


def _range(saved: tuple[float, float, float]) -> str:
    """Factors that no replay of this run stands behind, in words."""
    is_cost = sorted(saved)[1] < 0
    low, mid, high = (f"{100 * each:.3g}" for each in sorted(-each if is_cost else each for each in saved))
    of = "as a cost, of that time" if is_cost else "of what is at stake"
    return f" (an estimate: {mid} % {of}, from {low} to {high} %)"


def _replayed(facts: Facts, change: Mapping[str, Any]) -> tuple[Gain, float] | None:
    """The gain by replay, as a share of the step that is reported, and the replay's error."""
    study = result_of(facts.analysis, KEY, WhatIfs)
    if study is None or not facts.step_ns:
        return None
    memo = facts.memo.setdefault("replayed", {})
    key = repr(sorted(change.items()))
    if key not in memo:
        memo[key] = study.ask(change)
    answer = memo[key]
    if answer is None or answer.step.mid <= 0:
        return None
    scale = facts.step_ns / answer.step.mid
    low, mid, high = (round(getattr(answer.gain, name) * scale) for name in ("low", "mid", "high"))
    return Gain(low, mid, min(high, facts.step_ns)), answer.replay_error


def memory_only(peak_bytes_change: int, formula: str, inputs: Mapping[str, float | int | str]) -> Prediction:
    """A change that frees memory and leaves the step time as it is, as far as this run can say."""
    return Prediction(None, None, peak_bytes_change, formula, inputs)


def worth_it(facts: Facts, prediction: Prediction | None) -> bool:
    """Whether the mid gain is at least :data:`OPPORTUNITY_SHARE` of the step."""
    if prediction is None or prediction.gain_ns is None or not facts.step_ns:
        return False
    return prediction.gain_ns.mid >= OPPORTUNITY_SHARE * facts.step_ns
