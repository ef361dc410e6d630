"""What a reader of a comparison must know beside its numbers: how far they carry, and where they seem to disagree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from trine.analyzers.causes import mean_step_ns
from trine.analyzers.difference import RunDifference
from trine.analyzers.run_facts import RunFacts
from trine.analyzers.statistics import Ratio
from trine.analyzers.units import duration

__all__ = ["notes_of", "repeated_runs"]

#: Two changes of one step that differ by more than this share of it are not the same change.
_UNLIKE = 0.05
#: A change of this share of a step has a direction; two that point apart are told from here on.
_DIRECTED = 0.01


def notes_of(
    first: Sequence[RunFacts],
    second: Sequence[RunFacts],
    ratio: Ratio | None,
    difference: RunDifference,
    minimum_steps: int,
) -> tuple[str, ...]:
    """All notes, those about the verdict first."""
    notes = [_about_verdict(first, second, ratio, minimum_steps), _about_repeats(first, second)]
    silent = [run.source for run in (*first, *second) if not any(run.environment.values())]
    if silent:
        notes.append(f"{silent[0]} does not say where it ran, so environments were not compared")
    kinds = [{part.kind for run in side for part in run.parts} for side in (first, second)]
    if not kinds[0] & kinds[1]:
        notes.append("the two sides have no part of the step in common, so no cause can be named")
    if ratio is not None:
        notes.append(_median_and_mean(first, second))
    notes.append(_traced_and_steady(first, second, difference))
    return (*(note for note in notes if note), *difference.notes)


def repeated_runs(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> tuple[str, ...]:
    """Runs of the first side that stand on the second too, by their step times: no two runs whose steps vary agree in
    each to the nanosecond. A path does not tell, since CI records every run into the same folder."""
    known = {run.step_ns for run in second if len(set(run.step_ns)) > 1}
    return tuple(run.source for run in first if run.step_ns in known)


def _about_verdict(
    first: Sequence[RunFacts], second: Sequence[RunFacts], ratio: Ratio | None, minimum_steps: int
) -> str:
    if ratio is None:
        short = min((*first, *second), key=lambda run: len(run.step_ns))
        steps = len(short.step_ns)
        held = f"{steps} steady step{'s' if steps > 1 else ''}" if steps else "no steps that can be timed"
        return (
            f"{PurePath(short.source).name or short.source} holds {held}, and a verdict needs {max(minimum_steps, 1)}: what changed is shown,"
            " and whether it is more than chance is not said"
        )
    if not ratio.several:
        return (
            "one run a side shows only what varies inside a run, so nothing is concluded;"
            " give three or more runs a side, taken in turn"
        )
    return "two runs a side leave false alarms likelier than three or more do" if min(ratio.runs) == 2 else ""


def _about_repeats(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> str:
    repeated = repeated_runs(first, second)
    if not repeated:
        return ""
    more = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
    stand = "stand" if more else "stands"
    return (
        f"{repeated[0]}{more} {stand} on both sides (the same step times, to the nanosecond), and a run held against itself"
        " shows no change"
    )


def _median_and_mean(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> str:
    """That the medians, which the verdict compares, changed otherwise than the means, which divide into parts."""
    means = mean_step_ns(first), mean_step_ns(second)
    medians = [float(np.median([np.median(run.step_ns) for run in side])) for side in (first, second)]
    if means[0] is None or means[1] is None:
        return ""
    by_mean, by_median = means[0] - means[1], medians[0] - medians[1]
    if not _unlike(by_mean, by_median, medians[1]):
        return ""
    return (
        f"the median of the steady steps changed by {_signed(by_median)}, their mean by {_signed(by_mean)}: a few slow"
        " steps, or one slow run, move a mean and no median; the verdict compares medians, and what is divided into parts are means"
    )


def _traced_and_steady(
    first: Sequence[RunFacts], second: Sequence[RunFacts], difference: RunDifference
) -> str:
    """That the traced steps changed otherwise than all steady steps did, where that is so."""
    traced, steady = difference.change_ns, (mean_step_ns(first), mean_step_ns(second))
    divided = any(part.kind == "breakdown" for part in difference.partition)
    if traced is None or not divided or difference.unit.name != "step":
        return ""
    if steady[0] is None or steady[1] is None or not _unlike(steady[0] - steady[1], traced, steady[1]):
        return ""
    words = [_signed(ns) for ns in (steady[0] - steady[1], traced)]
    return (
        f"the mean of all steady steps changed by {words[0]}, that of the traced steps (which the breakdown, idle time, kernels and"
        f" operators are of) by {words[1]}: tracing slows a step, or warm-up is among them; the steady steps decide"
    )


def _unlike(one: float, other: float, step_ns: float) -> bool:
    """Whether two changes of a step are far apart, or point to opposite sides."""
    apart = one * other < 0 and min(abs(one), abs(other)) > _DIRECTED * step_ns
    return apart or abs(one - other) > _UNLIKE * step_ns


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else ''}{duration(ns)}"
