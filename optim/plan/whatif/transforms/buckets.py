"""Buckets of another size: gradients leave in the order in which they became ready, a bucket at a time.

DistributedDataParallel sends a bucket once it holds its cap or more, and rebuilds buckets in the order of readiness after
the first step (Li et al., VLDB 2020, section 3.2; torch/csrc/distributed/c10d/reducer.cpp). A stated cap holds for the
first bucket too; left alone, the first holds 1 MiB and the others 25.
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.whatif.graph import Graph, RankStep, Task, fresh, mapped
from trine.optim.plan.whatif.times import Link
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import require_no_pipeline
from trine.optim.plan.whatif.transforms._transfers import (
    contention,
    is_gradient,
    link_of,
    replaced,
    require_exchange,
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
    require_exchange(graph, KEYS[0])
    require_no_pipeline(graph, KEYS[0])
    wanted = change.config.communication
    if wanted.bucket_mib == "auto":
        raise UsageError(
            "communication.bucket_mib: a what-if wants a number of MiB; auto is decided as the run begins"
        )
    cap = float(wanted.bucket_mib or _DEFAULT_MIB)
    first = float(wanted.first_bucket_mib or (1.0 if wanted.bucket_mib is None else cap))
    link = link_of(graph, change.times)
    overlapped = wanted.overlap is not False

    def changed(step: RankStep) -> tuple[Task, ...]:
        return _rebucketed(step, link, cap * _MIB, first * _MIB, overlapped)

    return mapped(graph, changed)


def _rebucketed(step: RankStep, link: Link, cap: float, first: float, overlapped: bool) -> tuple[Task, ...]:
    if not any(task.gradient_bytes for task in step.tasks):
        raise UsageError(
            "communication.bucket_mib: this record does not say when each gradient was ready: record a deep window"
        )
    factor = contention(step.tasks, link)
    sent = sum(task.bytes for task in step.tasks if is_gradient(task))
    known = sum(task.gradient_bytes for task in step.tasks)
    scale = sent / known if known else 1.0  # gradients of another dtype than is assumed
    buckets: list[Task] = []
    filled = 0.0
    last = max(place for place, task in enumerate(step.tasks) if task.gradient_bytes)
    ends: dict[int, Task] = {}
    for place, task in enumerate(step.tasks):
        if not task.gradient_bytes:
            continue
        filled += task.gradient_bytes * scale
        if filled >= (cap if buckets else first) or place == last:
            at = place if overlapped else last
            bucket = transfer(factor * link.seconds(filled), "all_reduce", filled, f"gradients {len(buckets) + 1}",
                              (step.tasks[at].number,))  # fmt: skip
            ends[task.number] = bucket
            buckets.append(bucket)
            filled = 0.0
    numbers = [bucket.number for bucket in buckets]
    found: list[Task] = []
    for task in replaced(step, is_gradient, numbers):
        found.append(task)
        if task.number in ends:
            found.append(ends[task.number])
    return _waited(found, numbers)


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
