"""More or fewer ranks, each with the batch that it has: other rings, and more ranks of which one may be slow.

A ring's all-reduce of S bytes on n ranks takes 2(n−1)·α' + 2(n−1)/n·S/B (Patarasuk and Yuan, JPDC 69, 2009). The ranks
that were not recorded take the recorded ranks' steps in turn, each another one, so that their variation is what was
measured, and the step that of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Step, Task, renumbered
from trine.optim.plan.whatif.times import Link
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import require_no_pipeline, require_one_group
from trine.optim.plan.whatif.transforms._transfers import link_of
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("ranks",)
ORDER = 70

#: More than any machine has.
MOST = 1_000_000
#: Ranks that are replayed; of more, as many stand for all.
MOST_REPLAYED = 64


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` for a number that is none."""
    ranks = change.given["ranks"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST:
        raise UsageError(f"ranks: a whole number from 1 to {MOST}, not {ranks!r}")
    require_no_pipeline(graph, KEYS[0])
    before = graph.world
    if before < 2 and ranks > 1:
        raise UsageError("ranks: one rank was recorded, which says nothing of links: record two or more")
    if ranks == before:
        raise UsageError(
            f"ranks = {ranks}: the record has that many already, so nothing would change: ask for another number"
        )
    require_one_group(graph, KEYS[0])
    if not any(task.lane == LINK for each in graph.steps[0].ranks for task in each.tasks):
        raise UsageError(
            f"ranks: of what its {before} ranks exchange this record holds nothing that is on all of them: record a deep window "
            "of each rank, with its collectives"
        )
    link = link_of(graph, change.times)
    wider = link.among(ranks)

    def scaled(task: Task) -> Task:
        if task.lane != LINK or ranks == 1:
            return task
        size = task.bytes or _size_by_time(task, link)
        before_s = link.seconds(size)
        longer = wider.seconds(size) / before_s if before_s > 0 else 1.0
        return replace(task, seconds=task.seconds * longer, group=())  # of all ranks, who are others now

    steps = [_with_ranks(graph.steps, place, ranks, scaled) for place in range(len(graph.steps))]
    if any(task.lane == LINK and not task.bytes for each in graph.steps[0].ranks for task in each.tasks):
        graph = graph.with_note(
            "transfers whose sizes are not on record are taken to be as large as their time says"
        )
    graph = replace(graph, steps=tuple(steps), world=ranks)
    if ranks > MOST_REPLAYED:
        graph = graph.with_note(
            f"{MOST_REPLAYED} ranks are replayed for {ranks}: the slowest of more may be slower"
        )
    return graph.with_note(
        "every rank keeps its batch; links between more ranks are taken to be as those on record"
    )


def _size_by_time(task: Task, link: Link) -> float:
    """Bytes that the link moves in the time that a transfer took."""
    return max(task.seconds - link.alpha_s, 0.0) * link.bytes_per_s


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
