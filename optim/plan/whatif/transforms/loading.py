"""Batches that are there when they are asked for: no wait for the loader, or workers that load beside the step.

With n workers a batch is ready every (time to load one) / n; what is shorter than the rest of the step hides behind it.
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.whatif.graph import HOST, Graph, RankStep, Step, Task, mapped
from trine.optim.plan.whatif.replay import replay
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import fact, refuse_neutral
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("data.workers", "loader_wait")
ORDER = 90


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` for a number of workers that is none."""
    if "loader_wait" in change.given:
        if change.given["loader_wait"] not in (False, 0):
            raise UsageError("loader_wait: give false (or 0): the step without waiting for the loader")
        return mapped(graph, lambda step: _loaded(step, 0.0))
    workers = change.config.data.workers
    if not isinstance(workers, int):
        raise UsageError("data.workers: a what-if wants a number; auto is decided as the run begins")
    if had := fact(graph, "loader", "workers"):
        raise UsageError(
            f"data.workers: the recorded run loads with {had} {'worker' if had == 1 else 'workers'} already, and what it "
            "waits for is not what loading takes: record one with data.workers = 0"
        )
    if workers == 0:
        refuse_neutral(graph, change, KEYS)
    graph = graph.with_note("loader workers are taken to have cores of their own")
    return replace(graph, steps=tuple(_beside(step, workers, graph.slowdown) for step in graph.steps))


def _beside(step: Step, workers: int, slowdown: float) -> Step:
    """A step that waits for what loading takes longer than the rest of it, which other changes may have changed."""
    whole = replace(step, ranks=tuple(replace(each, tasks=tuple(_loaded(each, 0.0))) for each in step.ranks))
    rest = replay(whole, slowdown).seconds

    def waiting(each: RankStep) -> RankStep:
        data = each.phase_s()["data"]
        factor = max(data / workers - rest, 0.0) / data if data > 0 else 0.0
        return replace(each, tasks=tuple(_loaded(each, factor)))

    return replace(step, ranks=tuple(waiting(each) for each in step.ranks))


def _loaded(step: RankStep, factor: float) -> list[Task]:
    return [task.times(factor) if task.phase == "data" and task.lane == HOST else task for task in step.tasks]
