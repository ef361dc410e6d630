"""Products in lower precision, under autocast: each takes its calibrated ratio, and casts come between.

Autocast runs products in the low dtype and everything else in what it is given; sums of two tensors widen again, losses
are in fp32 (torch/aten/src/ATen/autocast_mode.h). So an operator's dtype follows from what came before it: after a product
low, after the sum that closes a residual and after an embedding fp32. Weights are cast once a forward, gradients of
weights once a backward. An operator's time is what it took, times the ratio of the calibrated times of its work in the two
dtypes at its size.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Task, mapped
from trine.optim.plan.whatif.operators import DTYPE_BYTES, Operator
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import require_operators
from trine.optim.plan.whatif.transforms._facts import fact, refuse_neutral
from trine.optim.plan.whatif.transforms._known import with_known_work
from trine.optim.plan.whatif.transforms._launches import with_launches
from trine.optim.plan.whatif.transforms._pace import Pace, pace_of
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply", "in_dtype"]

KEYS = ("precision.dtype", "precision.loss_scale")
ORDER = 20

_CAST = Operator("memory", "cast", None, 0, "fp32")
#: What autocast takes products in, to have them in the low dtype.
_WIDE_DTYPES = ("fp32", "tf32")
#: Work that autocast, or the loss, has in fp32.
_WIDE = ("aten::_log_softmax", "aten::nll_loss")


@dataclass(slots=True)
class _Flow:
    """What is known of dtypes as a step goes on: of the newest tensor, and of each forward operator by its number."""

    low: str
    newest: str = "fp32"
    again: str = "fp32"  # the same of a recomputation
    numbers: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    cast_inputs: dict[int, int] = field(default_factory=dict)  # number → elements cast on the way in
    backward_seen: set[int] = field(default_factory=set)

    def remember(self, number: int) -> None:
        if number >= 0 and (not self.numbers or number >= self.numbers[-1]):
            self.numbers.append(number)
            self.dtypes.append(self.newest)

    def at(self, number: int) -> str:
        """Dtype of the forward operator of this number, or of the one before it."""
        place = bisect_right(self.numbers, number) - 1
        return self.dtypes[place] if number >= 0 and place >= 0 else "fp32"


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the dtype was not calibrated, or the record holds no operators."""
    low = change.config.precision.dtype
    require_operators(graph.basis, KEYS[0])
    _require_wide(graph)
    if low in (None, "fp32"):
        refuse_neutral(graph, change, KEYS)
    assert low is not None
    graph = with_known_work(graph, KEYS[0])
    if not change.times.has(low):
        raise UsageError(_not_calibrated(low, change.times))
    return mapped(graph, lambda step: _changed(step, low, change.times))


def _not_calibrated(low: str, times: OperationTimes) -> str:
    if times and times.on_host and low == "fp16":
        return 'precision.dtype = "fp16": a CPU is calibrated in fp32 and bf16 alone: ask for "bf16"'
    return (
        f"precision.dtype: products in {low} are not calibrated on this machine: run trine hardware --calibrate where "
        "the record is from"
    )


def _require_wide(graph: Graph) -> None:
    stated = [fact(graph, "precision", name) for name in ("autocast_dtype", "parameter_dtype")]
    had = next((name for name in stated if name not in (None, "float32")), None) or next(
        (
            task.operator.dtype
            for task in graph.steps[0].ranks[0].tasks
            if task.kind == "product" and task.phase == "forward" and task.operator.dtype not in _WIDE_DTYPES
        ),
        None,
    )
    if had:
        raise UsageError(f"{KEYS[0]}: the recorded run computes in {had} already: record one in fp32")


def in_dtype(task: Task, dtype: str, pace: Pace) -> Task:
    """A task of fp32 in ``dtype``: what it took, times the calibrated ratio; what waits for memory, by its bytes."""
    operator, times = task.operator, pace.times
    if operator.dtype == dtype or operator.kind not in ("product", "memory"):
        return task
    if operator.product is not None:
        ratio = times.product(operator.product, dtype) / times.product(operator.product, operator.dtype)
        seconds = task.seconds * ratio
    else:
        assert operator.work is not None
        before, after = (
            times.memory(operator.work, operator.elements, each) for each in (operator.dtype, dtype)
        )
        moved = DTYPE_BYTES[dtype] / DTYPE_BYTES[operator.dtype]
        seconds = pace.changed(task.seconds, before, after, moved)
    return replace(task, seconds=seconds, operator=replace(operator, dtype=dtype))


def _changed(step: RankStep, low: str, times: OperationTimes) -> list[Task]:
    flow, pace = _Flow(low), pace_of(step.tasks, times)
    found: list[Task] = []
    for task in step.tasks:
        if task.lane == LINK or task.operator.work is None or task.phase not in ("forward", "backward"):
            found.append(task)
        elif task.recomputed:
            found += _again(task, flow, pace)
        elif task.phase == "forward":
            found += _forward(task, flow, pace)
        else:
            found += _backward(task, flow, pace)
    return with_launches(found, step.tasks)


def _forward(task: Task, flow: _Flow, pace: Pace) -> list[Task]:
    operator, before = task.operator, []
    if operator.product is not None:
        product = operator.product
        if flow.newest == "fp32":
            elements = product.batch * product.rows * product.inner
            flow.cast_inputs[task.sequence] = elements
            before.append(_cast(task, elements, "fp32", pace))
        if product.batch == 1:
            before.append(_cast(task, product.inner * product.columns, "fp32", pace))
        flow.newest = flow.low
    elif task.name in _WIDE and flow.newest != "fp32":
        before.append(_cast(task, operator.elements, flow.low, pace))
        flow.newest = "fp32"
    elif operator.work == "add" or task.name == "aten::index_select":
        # A residual is fp32: so is what is added to it.
        changed = task
        flow.newest = "fp32"
        flow.remember(task.sequence)
        return [changed]
    changed = in_dtype(task, flow.newest, pace)
    flow.remember(task.sequence)
    return [*before, changed]


def _again(task: Task, flow: _Flow, pace: Pace) -> list[Task]:
    """As in forward, casts too: autocast keeps those of weights until the region that it covers ends."""
    product = task.operator.product
    if product is None:
        flow.again = flow.at(task.sequence) if task.sequence >= 0 else flow.again
        return [in_dtype(task, flow.again, pace)]
    flow.again = flow.low
    before = []
    if (elements := flow.cast_inputs.get(task.sequence)) is not None:
        before.append(_cast(task, elements, "fp32", pace))
    if product.batch == 1:
        before.append(_cast(task, product.inner * product.columns, "fp32", pace))
    return [*before, in_dtype(task, flow.low, pace)]


def _backward(task: Task, flow: _Flow, pace: Pace) -> list[Task]:
    if task.sequence < 0:  # gradients of parameters are fp32
        return [task]
    product = task.operator.product
    dtype = flow.low if product is not None else flow.at(task.sequence)
    found = [in_dtype(task, dtype, pace)]
    if product is not None and task.sequence not in flow.backward_seen:
        flow.backward_seen.add(task.sequence)
        if product.batch == 1:
            found.append(_cast(task, product.inner * product.columns, flow.low, pace))
        if (elements := flow.cast_inputs.get(task.sequence)) is not None:
            found.append(_cast(task, elements, flow.low, pace))
    return found


def _cast(task: Task, elements: int, source: str, pace: Pace) -> Task:
    """Of ``elements`` from ``source``, where ``task`` runs."""
    seconds = pace.new("cast", elements, source)
    return Task(
        seconds,
        task.phase,
        task.lane,
        replace(_CAST, elements=elements, dtype=source),
        "aten::_to_copy",
        events=1,
    )
