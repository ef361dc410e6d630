"""A step's samples in micro-batches: forward and backward run as often, on fewer rows, and synchronise at the last.

Products and work on memory take what the calibration says of fewer rows; what lies between operators does not shrink.
From the second micro-batch on every gradient is added to what is there; only the last fills and sends buckets
(DistributedDataParallel's ``no_sync``).
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.whatif.graph import LEAST_BYTES, LINK, Graph, RankStep, Task, mapped, renumbered
from trine.optim.plan.whatif.operators import Operator, Product
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import require_operators
from trine.optim.plan.whatif.transforms._facts import (
    refuse_neutral,
    require_no_pipeline,
    require_one_microbatch,
)
from trine.optim.plan.whatif.transforms._known import with_known_work
from trine.optim.plan.whatif.transforms._launches import with_launches
from trine.optim.plan.whatif.transforms._pace import Pace, pace_of
from trine.optim.plan.whatif.transforms._transfers import BUCKET_COPY, is_gradient
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("accumulation.steps",)
ORDER = 12
#: Each is as many tasks as a step has: some ten thousand, a tenth of a second.
_MOST = 128


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the record accumulates already or holds no operators."""
    count = change.config.accumulation.steps
    if count == 1:
        _require_plain(graph)
        refuse_neutral(graph, change, KEYS)
    if not isinstance(count, int):
        raise UsageError("accumulation.steps: a what-if wants a number; auto is decided as the run begins")
    if count > _MOST:
        raise UsageError(
            f"accumulation.steps = {count}: a what-if replays every micro-batch, up to {_MOST} of them: ask for fewer"
        )
    require_operators(graph.basis, KEYS[0])
    require_no_pipeline(graph, KEYS[0])
    _require_plain(graph)
    require_one_microbatch(graph, KEYS[0])
    _require_no_sharding(graph)
    samples = graph.facts.get("samples")
    if samples and count > samples:
        raise UsageError(f"accumulation.steps = {count}: a rank's step has {samples} samples: ask for fewer")
    if not change.times:
        raise UsageError("accumulation.steps: this machine is not calibrated: run trine hardware --calibrate")
    graph = with_known_work(graph, KEYS[0])
    return mapped(graph, lambda step: _accumulated(step, count, change.times))


def _require_plain(graph: Graph) -> None:
    if int(graph.facts.get("accumulation") or 1) > 1:
        raise UsageError(
            "accumulation.steps: the recorded run accumulates already; record one micro-batch a step"
        )


def _require_no_sharding(graph: Graph) -> None:
    """Every micro-batch would exchange what is no gradient again: shards, and parts of layers. Buffers go out once a step."""
    found = next(
        (
            task.issued
            for each in graph.steps[0].ranks
            for task in each.tasks
            if task.lane == LINK and task.phase in ("forward", "backward") and not is_gradient(task)
            and task.issued != "broadcast" and not 0 < task.bytes < LEAST_BYTES
        ),
        None,
    )  # fmt: skip
    if found:
        raise UsageError(
            f"accumulation.steps: forward and backward hold transfers that every micro-batch would repeat ({found}): ask it of "
            "a record of replicas, without shards or parallel layers"
        )


def _accumulated(step: RankStep, count: int, times: OperationTimes) -> list[Task]:
    pace = pace_of(step.tasks, times)
    rows = {
        task.sequence: task.operator.product.rows
        for task in step.tasks
        if task.phase == "forward" and task.operator.product is not None
    }
    smaller = {
        task.number: _with_fewer_rows(task, count, rows, pace)
        for task in step.tasks
        if task.phase in ("forward", "backward") and task.lane != LINK
    }
    found: list[Task] = []
    added: set[int] = set()

    def add(task: Task) -> None:
        found.append(_added(task, pace))
        added.add(found[-1].number)

    def without_exchange(adds: bool) -> None:
        """A micro-batch that is not synchronised; ``adds``: gradients are there already."""
        kept = [task for task in smaller.values() if task.name != BUCKET_COPY and task.kind != "wait"]
        for task, copied in zip(kept, renumbered(kept), strict=True):
            found.append(replace(copied, gradient_bytes=0))
            if task.gradient_bytes and adds:
                add(task)

    begun = False
    for task in step.tasks:
        if not begun and task.number in smaller and task.phase == "forward":
            begun = True
            for number in range(count - 1):
                without_exchange(number > 0)
        if task.gradient_bytes:  # before its bucket may leave
            add(task)
        found.append(smaller.get(task.number, task))
    return with_launches(found, [task for task in found if task.number not in added])


def _with_fewer_rows(task: Task, count: int, rows: dict[int, int], pace: Pace) -> Task:
    """A micro-batch's part of a task; a parameter's gradient is as large as before."""
    operator, times = task.operator, pace.times
    if operator.work is None or task.sequence < 0:
        return task
    if operator.product is not None:
        fewer = _product(operator.product, count, rows.get(task.sequence))
        ratio = times.product(fewer, operator.dtype) / times.product(operator.product, operator.dtype)
        return replace(
            task.times(ratio), operator=replace(operator, product=fewer, elements=operator.elements // count)
        )
    elements = max(operator.elements // count, 1)
    before = times.memory(operator.work, operator.elements, operator.dtype)
    after = times.memory(operator.work, elements, operator.dtype)
    seconds = pace.changed(task.seconds, before, after, 1 / count)
    return replace(task, seconds=seconds, operator=replace(operator, elements=elements))


def _product(product: Product, count: int, rows: int | None) -> Product:
    """With a micro-batch's rows: of a batched product fewer heads, of a weight's gradient a shorter inner side."""
    if product.batch > 1:
        return replace(product, batch=max(product.batch // count, 1))
    if rows is not None and product.inner == rows and product.rows != rows:
        return replace(product, inner=max(product.inner // count, 1))
    return replace(product, rows=max(product.rows // count, 1))


def _added(task: Task, pace: Pace) -> Task:
    """A gradient onto the one that is there."""
    elements = max(task.gradient_bytes // 4, 1)
    operator = Operator("memory", "add_in_place", None, elements, "fp32")
    return Task(
        pace.new("add_in_place", elements, "fp32"),
        "backward",
        task.lane,
        operator,
        "aten::add_",
        events=1,
    )
