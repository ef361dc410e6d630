"""Another pipeline schedule: the recorded micro-batches' times, simulated in both.

The step changes by the difference of the two simulated spans (:mod:`trine.optim.plan.simulator`): what the simulation
leaves out, messages and hooks, is in both. A backward that was recorded whole is taken to be half by input and half by
weight where a schedule tells them apart (Qi et al. 2023, section 3: of a transformer they take about as long).
"""

from __future__ import annotations

from trine.optim.plan.schedules import Shape, Work, order_of
from trine.optim.plan.simulator import simulate
from trine.optim.plan.whatif.graph import HOST, LINK, Graph, Pipeline, RankStep, Task, mapped
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import compute_lane
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("parallel.schedule", "parallel.chunks", "parallel.microbatches")
ORDER = 15


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where no micro-batches were recorded, or the schedule cannot run this shape."""
    pipeline = graph.pipeline
    if pipeline is None:
        raise UsageError(
            f"{KEYS[0]}: this record holds no micro-batches of every stage: record a pipeline's run"
        )
    wanted = change.config.parallel
    before = len(pipeline.forward_s) // pipeline.ranks
    chunks = wanted.chunks if KEYS[1] in change.given else before
    count = wanted.microbatches or pipeline.microbatches
    now = str(_stated(graph) or ("interleaved" if before > 1 else "1f1b"))
    then = wanted.schedule or now
    old = _span_s(pipeline, now, before, pipeline.microbatches)
    # As many samples in other micro-batches: each takes as much less.
    new = _span_s(pipeline, then, chunks, count) * (
        1 if count == pipeline.microbatches else pipeline.microbatches / count
    )
    graph = graph.with_note(f"{now} and {then} are simulated from the medians of the recorded micro-batches")
    return mapped(graph, lambda step: _longer(step, new - old))


def _stated(graph: Graph) -> object:
    known = graph.facts.get("pipeline")
    return known.get("schedule") if isinstance(known, dict) else None


def _span_s(pipeline: Pipeline, name: str, chunks: int, count: int) -> float:
    shape = Shape(pipeline.ranks, chunks, count)
    return simulate(order_of(name, shape, _work(pipeline, shape)), _work(pipeline, shape)).span_s()


def _work(pipeline: Pipeline, shape: Shape) -> Work:
    """Stages cut or joined to another number of them, each with its share of the whole."""
    stages = len(pipeline.forward_s)

    def cut(times: tuple[float, ...]) -> tuple[float, ...]:
        if shape.stages == stages:
            return times
        return (sum(times) / shape.stages,) * shape.stages

    weight, by_input = pipeline.weight_s, pipeline.input_s
    if not any(weight):
        weight = by_input = tuple(each / 2 for each in by_input)
    return Work(cut(pipeline.forward_s), cut(by_input), cut(weight))


def _longer(step: RankStep, seconds: float) -> list[Task]:
    """Forward and backward of a rank longer, or shorter, by what the span changes: its host by as much, and its streams as
    the one that computes, beside each other as they are."""
    inside = [task for task in step.tasks if task.phase in ("forward", "backward") and task.lane != LINK]

    def factor_of(lane: str) -> float:
        whole = sum(task.seconds for task in inside if task.lane == lane)
        return max(1 + seconds / whole, 0.0) if whole > 0 else 1.0

    host, streams = factor_of(HOST), factor_of(compute_lane(step.tasks))
    factors = {task.number: host if task.lane == HOST else streams for task in inside}
    return [task.times(factors.get(task.number, 1.0)) for task in step.tasks]
