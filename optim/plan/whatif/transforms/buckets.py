"""Buckets of another size: gradients leave in the order in which they became ready, a bucket at a time.

DistributedDataParallel sends a bucket once it holds its cap or more, and rebuilds buckets in the order of readiness after
the first step (Li et al., VLDB 2020, section 3.2; torch/csrc/distributed/c10d/reducer.cpp). A stated cap holds for the
first bucket too; left alone, the first holds 1 MiB and the others 25.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trine.optim.plan.whatif.graph import Graph, RankStep, Task, fresh, mapped
from trine.optim.plan.whatif.times import Link
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import fact, refuse_known, require_no_pipeline
from trine.optim.plan.whatif.transforms._transfers import (
    contention,
    exchanging,
    is_gradient,
    link_of,
    replaced,
    require_exchange,
    require_replicas,
    slowed,
    transfer,
)
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("communication.bucket_mib", "communication.first_bucket_mib", "communication.overlap")
ORDER = 50

_MIB = 2**20
_DEFAULT_MIB = 25.0


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the record has no all-reduces, or does not say when gradients were ready."""
    if change.config.zero.stage > 1:
        raise UsageError(
            f"{KEYS[0]} and zero.stage = {change.config.zero.stage} are not answered together: shards are reduced by modules, not "
            "in buckets"
        )
    require_replicas(graph, KEYS[0])
    _require_buckets(graph)
    require_exchange(graph, KEYS[0])
    require_no_pipeline(graph, KEYS[0])
    wanted = change.config.communication
    if wanted.bucket_mib == "auto":
        raise UsageError(
            "communication.bucket_mib: a what-if wants a number of MiB; auto is decided as the run begins"
        )
    cap = float(wanted.bucket_mib or _recorded_mib(graph))
    first = float(
        wanted.first_bucket_mib or (1.0 if wanted.bucket_mib is None and cap == _DEFAULT_MIB else cap)
    )
    overlapped = wanted.overlap is not False
    if (cap, first, overlapped) == _recorded(graph):
        refuse_known(change, next(key for key in KEYS if key in change.given))
    link = link_of(graph, change.times)

    def changed(step: RankStep) -> tuple[Task, ...]:
        return _rebucketed(step, link, cap * _MIB, first * _MIB, overlapped)

    return mapped(graph, changed)


def _require_buckets(graph: Graph) -> None:
    kind = str(fact(graph, "data_parallel", "kind"))
    if kind.startswith("fsdp"):
        raise UsageError(
            f"{KEYS[0]}: the recorded run reduces gradients by modules ({kind}), not in buckets: ask it of a record with "
            "DistributedDataParallel"
        )


def _recorded(graph: Graph) -> tuple[float, float, bool]:
    """The run's cap and first bucket in MiB, and whether they leave during backward."""
    cap = _recorded_mib(graph)
    first = fact(graph, "configuration", "communication", "first_bucket_mib")
    stated = isinstance(first, int | float) and first > 0
    return (
        cap,
        float(first) if stated else 1.0 if cap == _DEFAULT_MIB else cap,
        fact(graph, "configuration", "communication", "overlap") is not False,
    )


def _recorded_mib(graph: Graph) -> float:
    """The run's own cap, PyTorch's where its record does not say."""
    stated = (
        fact(graph, "data_parallel", "bucket_mib"),
        fact(graph, "configuration", "communication", "bucket_mib"),
    )
    return next((float(each) for each in stated if isinstance(each, int | float) and each > 0), _DEFAULT_MIB)


def _rebucketed(step: RankStep, link: Link, cap: float, first: float, overlapped: bool) -> tuple[Task, ...]:
    last_pass = step.tasks[_last_backward(step.tasks) :]
    stored = [task for task in last_pass if task.gradient_bytes]
    gone = {task.number: task.bytes for task in last_pass if is_gradient(task)}
    if not stored:
        raise UsageError(
            "communication.bucket_mib: this record does not say when each gradient was ready: record a deep window"
        )
    # Gradients of another dtype than is assumed.
    scale = sum(gone.values()) / sum(task.gradient_bytes for task in stored)
    slower, group = slowed(link, contention(step.tasks, link)), exchanging(step.tasks)
    leaving: dict[int, list[Task]] = {}  # by the task behind which they leave
    numbers: list[int] = []
    for task, size in _buckets(stored, cap / scale, first / scale) if scale > 0 else ():
        at = task.number if overlapped else stored[-1].number
        bucket = transfer(slower.seconds(size * scale), "all_reduce", size * scale, f"gradients {len(numbers) + 1}", (at,),
                          group=group)  # fmt: skip
        leaving.setdefault(at, []).append(bucket)
        numbers.append(bucket.number)
    found: list[Task] = []
    for task in replaced(step, lambda task: task.number in gone, numbers):
        found += [task, *leaving.get(task.number, ())]
    return _waited(found, numbers)


def _buckets(stored: Sequence[Task], cap: float, first: float) -> Iterator[tuple[Task, float]]:
    """(task that fills it, bytes) of every bucket."""
    filled, limit = 0.0, first
    for task in stored:
        filled += task.gradient_bytes
        if filled >= limit or task is stored[-1]:
            yield task, filled
            filled, limit = 0.0, cap


def _last_backward(tasks: Sequence[Task]) -> int:
    """The place behind the last micro-batch's forward, whose gradients alone leave."""
    return max(
        (place + 1 for place, task in enumerate(tasks) if task.phase == "forward" and task.kind == "product"),
        default=0,
    )


def _waited(tasks: list[Task], numbers: list[int]) -> tuple[Task, ...]:
    """Some task waits for the last bucket: the first of the optimizer, where the record shows no wait."""
    if any(set(numbers) & set(task.after) for task in tasks):
        return tuple(tasks)
    place = next(
        (at for at, task in enumerate(tasks) if task.phase in ("optimizer", "other")), len(tasks) - 1
    )
    tasks[place] = replace(
        tasks[place], after=(*tasks[place].after, *numbers), number=tasks[place].number or fresh()
    )
    return tuple(tasks)
