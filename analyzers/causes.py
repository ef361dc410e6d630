"""Which parts of a step two sides differ in, and the whole that each kind of part divides.

Phases divide the steady steps, the breakdown the traced ones, so their wholes are two numbers. Both are means,
because only the means of parts add up to the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trine.analyzers.difference import mean_parts
from trine.analyzers.run_facts import Part, RunFacts

__all__ = ["WHOLE", "Cause", "causes_of", "mean_step_ns", "wholes_of"]

#: Causes below this share of the second side's step are left out: nobody acts on them.
_SMALLEST_CAUSE = 0.005
#: Kinds in the order in which they are told.
_ORDER = ("phase", "breakdown", "idle", "collective", "kernel", "operator")
#: Kinds whose parts divide their step without a rest.
_DIVIDING = ("phase", "breakdown")
#: Kind → the kind whose whole its parts lie in. Collectives are of all selected steps.
_LIES_IN = {"idle": "breakdown", "kernel": "breakdown", "operator": "breakdown", "collective": "phase"}
#: The name of a whole among the parts.
WHOLE = "all"


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of the step on both sides, mean ns a step and rank; 0 where a side has no such part.

    ``share`` is the change over the second side's mean step, of those steps that the part is of: how much of a
    slow-down this part is. A whole (:func:`wholes_of`) is a cause named ``all``.
    """

    kind: str
    name: str
    first_ns: float
    second_ns: float
    share: float
    first_calls: float | None = None
    second_calls: float | None = None

    @property
    def change_ns(self) -> float:
        """First less second."""
        return self.first_ns - self.second_ns


def causes_of(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> tuple[Cause, ...]:
    """The parts that changed by 0.5 % of the step and more, by kind, the largest of each first."""
    means = [mean_parts(side) for side in (first, second)]
    kinds = [{kind for kind, _ in parts} for parts in means]
    wholes = {whole.kind: whole.second_ns for whole in wholes_of(first, second)}
    steady_ns = mean_step_ns(second) or 0.0
    causes = []
    for key in dict.fromkeys([*means[0], *means[1]]):
        if key[0] not in kinds[0] & kinds[1]:  # one side never looked: no change can be said
            continue
        nothing = Part(*key, ns=0.0)
        new, old = means[0].get(key, nothing), means[1].get(key, nothing)
        step_ns = _step_of(key[0], wholes, steady_ns)
        share = (new.ns - old.ns) / step_ns if step_ns else 0.0
        if abs(share) >= _SMALLEST_CAUSE:
            causes.append(Cause(*key, new.ns, old.ns, share, new.calls, old.calls))
    return tuple(sorted(causes, key=lambda cause: (_ORDER.index(cause.kind), -abs(cause.share))))


def wholes_of(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> tuple[Cause, ...]:
    """What the phases and the breakdown each divide, of those that both sides have: the sum of all their parts."""
    found = []
    sums = [_sums(mean_parts(side)) for side in (first, second)]
    for kind in _DIVIDING:
        new, old = (each.get(kind, 0.0) for each in sums)
        if new and old:
            found.append(Cause(kind, WHOLE, new, old, (new - old) / old))
    return tuple(found)


def mean_step_ns(side: Sequence[RunFacts]) -> float | None:
    """Mean of the runs' mean steady steps, slowest rank step by step; None where no run marks steps."""
    runs = [run.step_ns for run in side if run.step_ns]
    return float(np.mean([np.mean(steps) for steps in runs])) if runs else None


def _sums(parts: Mapping[tuple[str, str], Part]) -> dict[str, float]:
    return {kind: sum(part.ns for (one, _), part in parts.items() if one == kind) for kind in _DIVIDING}


def _step_of(kind: str, wholes: Mapping[str, float], steady_ns: float) -> float:
    return wholes.get(_LIES_IN.get(kind, kind), steady_ns)
