"""What transformations of the exchange of gradients share: transfers, their links, and hosts that wait for them.

A transfer that is new in the step is as much slower than calibrated as the recorded all-reduces of gradients were
(:func:`contention`): the calibration is of an idle link inside this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from trine.optim.plan.whatif.graph import HOST, LINK, Graph, RankStep, Task, fresh
from trine.optim.plan.whatif.operators import TRANSFER, WAIT
from trine.optim.plan.whatif.times import Link, OperationTimes
from trine.record.errors import UsageError
from trine.record.hardware import fit_latency_bandwidth

__all__ = [
    "contention",
    "exchanging",
    "is_gradient",
    "link_of",
    "replaced",
    "replicas",
    "require_exchange",
    "require_replicas",
    "slowed",
    "transfer",
    "waiting",
]

#: What copies a gradient into its bucket, and divides it by the ranks.
BUCKET_COPY = "torch::distributed::reducer::mul_out"


def is_gradient(task: Task) -> bool:
    """Whether a task is an all-reduce of gradients."""
    return task.of_gradients


def exchanging(tasks: Iterable[Task]) -> tuple[int, ...]:
    """The ranks with which a rank reduces most of its gradients; empty where its record names no group."""
    largest = max(filter(is_gradient, tasks), key=lambda task: task.bytes, default=None)
    return largest.group if largest else ()


def replicas(graph: Graph) -> int:
    """How many ranks reduce gradients together; all where no group is named."""
    return len(exchanging(graph.steps[0].ranks[0].tasks)) or graph.world


def require_exchange(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where no step reduces gradients by an all-reduce."""
    tasks = [task for step in graph.steps for each in step.ranks for task in each.tasks if task.lane == LINK]
    if any(is_gradient(task) for task in tasks):
        return
    if any(task.carries("reduce_scatter") for task in tasks):
        why = "gradients are reduced by reduce-scatters, to shards: ask it of a record of plain replicas"
    elif graph.world > 1:
        why = "none was found behind backward: ask it of a record of replicas with their collectives"
    else:
        why = "one rank exchanges nothing: record two or more"
    raise UsageError(f"{key} changes the all-reduce of gradients, and this record has none; {why}")


def require_replicas(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where the recorded run shards its parameters, which cannot be taken out of its steps."""
    if _gathers_parameters(graph.steps[0].ranks[0].tasks):
        raise UsageError(
            f"{key}: the recorded run gathers its parameters, of which each rank has a shard, and that cannot be taken out of "
            "its steps: ask it of a record of plain replicas"
        )


def _gathers_parameters(tasks: Sequence[Task]) -> bool:
    """Whether ranks that share gradients give each other about as many bytes in forward and backward."""
    group = exchanging(tasks)
    gathered = [
        task.bytes
        for task in tasks
        if task.carries("all_gather")
        and task.phase in ("forward", "backward")
        and (not group or task.group in ((), group))
    ]
    reduced = sum(task.bytes for task in filter(is_gradient, tasks))
    return bool(gathered) and (0 in gathered or 2 * sum(gathered) >= reduced)


def link_of(graph: Graph, times: OperationTimes, dtype: str = "fp32") -> Link:
    """An all-reduce's link between as many ranks as reduce gradients together: calibrated in ``dtype``, else the record's own,
    where its sizes say enough.

    Raises ``UsageError`` where neither is known.
    """
    ranks = replicas(graph)
    try:
        return times.link("all_reduce", dtype).among(ranks)
    except UsageError:
        pass
    found = {
        (task.bytes, task.seconds)
        for step in graph.steps
        for each in step.ranks
        for task in each.tasks
        if is_gradient(task) and task.seconds > 0
    }
    sizes = [size for size, _ in found]
    if not sizes or max(sizes) < 4 * min(sizes):
        raise UsageError(
            "the all-reduce's latency and bandwidth are not known: run trine hardware --calibrate where the record is from"
        )
    alpha, beta = fit_latency_bandwidth(sizes, [seconds for _, seconds in found])
    return Link(alpha, beta, ranks)


def contention(step: Sequence[Task], link: Link, beside: bool = True) -> float:
    """How many times as long as on an idle link this step's gradients took; 1 where they say nothing.

    ``beside``: with the step's work beside them, which takes cores and memory from those that move bytes. Without it those
    count that left once all gradients were there, of which there is always one.
    """
    last = max((place for place, task in enumerate(step) if task.gradient_bytes), default=-1)
    behind = [task for task in step[last + 1 :] if is_gradient(task)]
    taken = [task for task in step if is_gradient(task)] if beside or not behind else behind
    ideal = sum(link.seconds(task.bytes) for task in taken)
    spent = sum(task.seconds for task in taken)
    return spent / ideal if ideal > 0 and spent > 0 else 1.0


def slowed(link: Link, factor: float) -> Link:
    """A link on which all takes ``factor`` times as long."""
    return Link(link.alpha_s * factor, link.bytes_per_s / factor, link.ranks)


def transfer(
    seconds: float,
    operation: str,
    size: float,
    key: str,
    after: Iterable[int],
    phase: str = "backward",
    group: tuple[int, ...] = (),
) -> Task:
    """A collective of every rank of ``group`` that has one of the same ``key``; an all-reduce is of gradients."""
    return Task(
        seconds, phase, LINK, TRANSFER, operation, tuple(after), issued=operation,
        key=f"{key} from {group[0]}" if group else key, group=group, of_gradients=operation == "all_reduce",
        bytes=int(size),
    )  # fmt: skip


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
