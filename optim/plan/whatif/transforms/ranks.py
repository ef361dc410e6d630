"""More or fewer ranks, each with the batch that it has: other rings, and more ranks of which one may be slow.

A ring's all-reduce of S bytes on n ranks takes 2(n−1)·α' + 2(n−1)/n·S/B (Patarasuk and Yuan, JPDC 69, 2009). The ranks
that were not recorded take the recorded ranks' steps in turn, each another one, so that their variation is what was
measured, and the step that of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Step, Task, renumbered
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import require_no_pipeline
from trine.optim.plan.whatif.transforms._transfers import link_of
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("ranks",)
ORDER = 70

#: Ranks that are replayed; of more, as many stand for all.
MOST_REPLAYED = 64


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` for a number that is none."""
    ranks = change.given["ranks"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks: a whole number, 1 or more, not {ranks!r}")
    require_no_pipeline(graph, KEYS[0])
    before = graph.world
    if before < 2 and ranks > 1:
        raise UsageError("ranks: one rank was recorded, which says nothing of links: record two or more")
    if ranks == before:
        return graph
    link = link_of(graph, change.times)
    wider = link.among(ranks)

    def scaled(task: Task) -> Task:
        if task.lane != LINK or ranks == 1:
            return task
        return task.times(wider.seconds(max(task.bytes, 1)) / link.seconds(max(task.bytes, 1)))

    steps = [_with_ranks(graph.steps, place, ranks, scaled) for place in range(len(graph.steps))]
    graph = replace(graph, steps=tuple(steps), world=ranks)
    if ranks > MOST_REPLAYED:
        graph = graph.with_note(
            f"{MOST_REPLAYED} ranks are replayed for {ranks}: the slowest of more may be slower"
        )
    return graph.with_note(
        "every rank keeps its batch; links between more ranks are taken to be as those on record"
    )


def _with_ranks(steps: tuple[Step, ...], place: int, ranks: int, scaled: Callable[[Task], Task]) -> Step:
    pool = [each for step in (*steps[place:], *steps[:place]) for each in step.ranks]
    count = min(ranks, MOST_REPLAYED)
    chosen = [pool[number % len(pool)] for number in range(count)]
    shared = set.intersection(*({task.key for task in each.tasks if task.lane == LINK} for each in chosen))
    return Step(
        steps[place].index,
        tuple(_copy(each, number, shared, scaled, count) for number, each in enumerate(chosen)),
    )


def _copy(
    step: RankStep, rank: int, shared: set[str], scaled: Callable[[Task], Task], count: int
) -> RankStep:
    kept = (task for task in step.tasks if task.lane != LINK or (count > 1 and task.key in shared))
    return replace(step, rank=rank, tasks=tuple(renumbered(scaled(task) for task in kept)))
