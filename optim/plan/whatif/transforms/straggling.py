"""No straggler: every rank computes as the median rank does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_high

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Step
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import require_no_pipeline
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("straggler",)
ORDER = 80


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` for a single rank."""
    if change.given["straggler"] not in (False, 0):
        raise UsageError("straggler: give false (or 0): the step with every rank as fast as the median one")
    require_no_pipeline(graph, KEYS[0])
    if len(graph.steps[0].ranks) < 2:
        raise UsageError(
            f"straggler: {graph.basis} of one rank alone were recorded, which waits for nobody in them: give traces of more "
            "ranks; whom they wait for, trine analyze says without"
        )
    # Of all steps the middle one: a rank that is late once has been unlucky, and no straggler; and in a step whose hosts all wait
    # for the late rank's work, none is faster than it.
    by_step = [_shares(step) for step in graph.steps]
    factors = [median_high(of_rank) for of_rank in zip(*by_step, strict=True)]
    return replace(graph, steps=tuple(_even(step, factors) for step in graph.steps))


def _even(step: Step, factors: Sequence[float]) -> Step:
    def changed(each: RankStep, factor: float) -> RankStep:
        tasks = tuple(task if task.lane == LINK else task.times(factor) for task in each.tasks)
        return replace(each, tasks=tasks)

    return replace(step, ranks=tuple(changed(*each) for each in zip(step.ranks, factors, strict=True)))


def _shares(step: Step) -> list[float]:
    """What the median rank takes of each rank's time; 1 where it is no slower."""
    own = [_own_s(each) for each in step.ranks]
    usual = sorted(own)[(len(own) - 1) // 2]
    return [min(usual / seconds, 1.0) if seconds > 0 else 1.0 for seconds in own]


def _own_s(step: RankStep) -> float:
    """What a rank takes by itself: its longest lane, transfers apart."""
    lanes: dict[str, float] = {}
    for task in step.tasks:
        if task.lane != LINK:
            lanes[task.lane] = lanes.get(task.lane, 0.0) + task.seconds
    return max(lanes.values(), default=0.0)
