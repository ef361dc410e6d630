"""What transformations of the exchange of gradients share: transfers, their links, and hosts that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from trine.optim.plan.whatif.graph import HOST, LINK, Graph, RankStep, Task, fresh
from trine.optim.plan.whatif.operators import TRANSFER, WAIT
from trine.optim.plan.whatif.times import Link, OperationTimes
from trine.record.errors import UsageError
from trine.record.hardware import fit_latency_bandwidth

__all__ = ["contention", "link_of", "replaced", "require_exchange", "transfer", "waiting"]

#: What copies a gradient into its bucket, and divides it by the ranks.
BUCKET_COPY = "torch::distributed::reducer::mul_out"
#: Smaller transfers are flags and counts, not gradients.
LEAST_BYTES = 4096


def is_gradient(task: Task) -> bool:
    """Whether a task is an all-reduce of gradients."""
    return (
        task.lane == LINK
        and "all_reduce" in task.issued.replace("allreduce", "all_reduce").lower()
        and (task.bytes >= LEAST_BYTES)
    )


def require_exchange(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where no step reduces gradients."""
    if not any(is_gradient(task) for step in graph.steps for each in step.ranks for task in each.tasks):
        raise UsageError(
            f"{key} changes the all-reduce of gradients, and this record has none: it needs two ranks or more"
        )


def link_of(graph: Graph, times: OperationTimes, operation: str = "all_reduce") -> Link:
    """The calibrated link between as many ranks as the run has; of an all-reduce also the record's own, where its sizes say enough.

    Raises ``UsageError`` where neither is known.
    """
    try:
        return times.link(operation).among(graph.world)
    except UsageError:
        if operation != "all_reduce":
            raise
    found = {
        (task.bytes, task.seconds)
        for step in graph.steps
        for each in step.ranks
        for task in each.tasks
        if is_gradient(task)
    }
    sizes = [size for size, _ in found]
    if not sizes or max(sizes) < 4 * min(sizes):
        raise UsageError(
            "the all-reduce's latency and bandwidth are not known: run trine hardware --calibrate where the record is from"
        )
    alpha, beta = fit_latency_bandwidth(sizes, [seconds for _, seconds in found])
    return Link(alpha, beta, graph.world)


def contention(step: Sequence[Task], link: Link) -> float:
    """How many times as long as on an idle link this step's gradients took."""
    taken = [task for task in step if is_gradient(task)]
    ideal = sum(link.seconds(task.bytes) for task in taken)
    return sum(task.seconds for task in taken) / ideal if ideal > 0 else 1.0


def transfer(
    seconds: float, operation: str, size: float, key: str, after: Iterable[int], phase: str = "backward"
) -> Task:
    """A collective of every rank that has one of the same ``key``."""
    return Task(
        seconds, phase, LINK, TRANSFER, operation, tuple(after), issued=operation, key=key, bytes=int(size)
    )


def waiting(after: Iterable[int], phase: str, lane: str = HOST) -> Task:
    """The host, or a stream, until those have ended."""
    return Task(0.0, phase, lane, operator=WAIT, after=tuple(after), number=fresh())


def replaced(step: RankStep, gone: Callable[[Task], bool], instead: Sequence[int]) -> tuple[Task, ...]:
    """Without some transfers; the last that waited for one of them waits for ``instead``, the others go on at once."""
    numbers = {task.number for task in step.tasks if gone(task)}
    last = max(
        (place for place, task in enumerate(step.tasks) if numbers.intersection(task.after)), default=-1
    )

    def kept(place: int, task: Task) -> Task:
        if not numbers.intersection(task.after):
            return task
        others = tuple(number for number in task.after if number not in numbers)
        return replace(task, after=(*others, *(instead if place == last else ())))

    return tuple(kept(place, task) for place, task in enumerate(step.tasks) if task.number not in numbers)
