"""Predicted gains: Amdahl's law on the measured partition.

A change that speeds a part of the step up by a factor ``k`` gains ``part × (1 − 1/k)`` and leaves the
rest as it is (Amdahl, AFIPS 1967). The interval comes from three factors, each with its source in the
formula; it is a statement about this run, not about hardware in general.
"""

from __future__ import annotations

from collections.abc import Mapping

from trine.analyzers.results import Gain, Prediction

from ._facts import Facts

__all__ = ["OPPORTUNITY_SHARE", "faster", "memory_only", "predict", "worth_it"]

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
) -> Prediction | None:
    """Gain per step when the fractions ``saved`` (low, mid, high) of ``stake_ns`` go away.

    Negative fractions are a cost. None when the step time is unknown: a gain without a step has no use.
    """
    if facts.step_ns is None or facts.step_ns <= 0:
        return None
    step = facts.step_ns
    low, mid, high = sorted(min(round(stake_ns * fraction), step) for fraction in saved)
    words = {f"{facts.unit}_time_ns": step, "at_stake_ns": round(stake_ns), **inputs}
    after = Gain(step - high, step - mid, step - low)
    return Prediction(Gain(low, mid, high), after, peak_bytes_change, formula, words)


def memory_only(peak_bytes_change: int, formula: str, inputs: Mapping[str, float | int | str]) -> Prediction:
    """A change that frees memory and leaves the step time as it is, as far as this run can say."""
    return Prediction(None, None, peak_bytes_change, formula, inputs)


def worth_it(facts: Facts, prediction: Prediction | None) -> bool:
    """Whether the mid gain is at least :data:`OPPORTUNITY_SHARE` of the step."""
    if prediction is None or prediction.gain_ns is None or not facts.step_ns:
        return False
    return prediction.gain_ns.mid >= OPPORTUNITY_SHARE * facts.step_ns
