"""Another pipeline schedule, or other micro-batches: the recorded micro-batches' times, simulated in both.

The step becomes longer or shorter by the difference of the two simulated spans (:mod:`trine.optim.plan.simulator`): what the
simulation leaves out, messages and hooks, is in both. Ranks wait for each other's messages, so the work of all of them is
changed by the one factor that makes that difference in the replay. A backward that was recorded whole is taken to be half by
input and half by weight where a schedule tells them apart (Qi et al. 2023, section 3: of a transformer they take about as
long).
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.schedules import Shape, Work, order_of, schedule_named, schedules
from trine.optim.plan.simulator import simulate
from trine.optim.plan.whatif.graph import LINK, Graph, Pipeline, Step
from trine.optim.plan.whatif.replay import replay
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import fact
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("parallel.schedule", "parallel.chunks", "parallel.microbatches")
ORDER = 15

#: What the configuration takes, PyTorch's names and short ones, in lower case → the simulator's.
_SIMULATED = {
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "looped_bfs": "looped-bfs",
    "interleavedzerobubble": "interleaved-zb",
    "interleaved_zero_bubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
    "zbv": "zb-v",
    "dualpipev": "dualpipe-v",
}
#: Stages a rank of schedules that run several, where nothing is said.
_SEVERAL = 2
#: Replays that look for the factor, and how far from the wanted difference it may leave the step.
TRIES = 8
NEAR = 1e-3


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where no micro-batches were recorded, or the schedule cannot run this shape, or is the run's."""
    pipeline = graph.pipeline
    if pipeline is None:
        raise UsageError(
            f"{KEYS[0]}: this record holds no micro-batches of every stage: record a pipeline's run"
        )
    wanted = change.config.parallel
    before = len(pipeline.forward_s) // pipeline.ranks
    stated = fact(graph, "configuration", "parallel", "schedule")
    now = _simulated(str(stated)) if stated else ("interleaved" if before > 1 else "1f1b")
    then = now if wanted.schedule is None else _simulated(wanted.schedule)
    count = wanted.microbatches or pipeline.microbatches
    chunks = wanted.chunks if KEYS[1] in change.given else _chunks(then, before)
    if (then, chunks, count) == (now, before, pipeline.microbatches):
        raise UsageError(
            f"{KEYS[0]}: the recorded run is {now} with {_number(before, 'stage')} a rank and {_number(count, 'micro-batch')} "
            f"already{'' if stated else ', as far as can be told'}: ask for another"
        )
    old = _span_s(pipeline, now, before, pipeline.microbatches)
    # As many samples in other micro-batches: each takes as much less.
    new = _span_s(pipeline, then, chunks, count) * pipeline.microbatches / count
    both = now if then == now else f"{now} and {then}"
    graph = graph.with_note(f"simulated from the medians of the recorded micro-batches: {both}")
    if not stated:
        graph = graph.with_note(f"the record does not say its schedule: it is taken to be {now}")
    if count != pipeline.microbatches:
        graph = graph.with_note(
            "smaller micro-batches are taken to compute as efficiently, and their messages to hide"
        )
    steps = tuple(_longer(step, new - old, graph.slowdown) for step in graph.steps)
    return replace(graph, steps=steps)


def _simulated(name: str) -> str:
    """The simulator's name of a schedule, by that or by one that the configuration takes."""
    name = name.lower()
    return schedule_named(_SIMULATED.get(name, name)).name


def _chunks(schedule: str, before: int) -> int:
    """Stages a rank where nothing is said: as many as there are, where the schedule runs those."""
    if fixed := schedules()[schedule].chunks:
        return fixed
    return before if before > 1 else _SEVERAL


def _number(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


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


def _longer(step: Step, seconds: float, slowdown: float) -> Step:
    """Forward and backward of all ranks by the factor that makes the replayed step so much longer, or shorter: by secants."""
    base = replay(step, slowdown).seconds
    before, off_before = 1.0, -seconds
    factor = max(1 + seconds / base, 0.0) if base > 0 else 1.0
    for _ in range(TRIES):
        changed = _scaled(step, factor)
        off = replay(changed, slowdown).seconds - base - seconds
        if abs(off) <= NEAR * abs(seconds):
            return changed
        if factor == before or off == off_before:
            break
        slope = (off - off_before) / (factor - before)
        before, off_before, factor = factor, off, max(factor - off / slope, 0.0)
    raise UsageError(
        f"{KEYS[0]}: the simulated spans differ by {abs(seconds) * 1e3:.4g} ms, and the recorded step {step.index} of "
        f"{base * 1e3:.4g} ms does not hang on its forward and backward that far: record a few steps of a run whose ranks do "
        "nothing else"
    )


def _scaled(step: Step, factor: float) -> Step:
    """Work of forward and backward so many times as long, on hosts and on streams; messages as they are."""
    ranks = tuple(
        replace(
            each,
            tasks=tuple(
                task.times(factor) if task.phase in ("forward", "backward") and task.lane != LINK else task
                for task in each.tasks
            ),
        )
        for each in step.ranks
    )
    return replace(step, ranks=ranks)
