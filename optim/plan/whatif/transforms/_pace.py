"""How fast a recorded step ran beside the calibration, and what follows for work that is changed or new.

Products tell how much slower the machine was (neighbours, clocks, all cores in use): their measured time over their
calibrated one. Work on memory takes longer than that besides, since a calibrated operation finds its tensors in the cache and
a step's does not, and gets pages that were never touched. That excess goes with the bytes that are moved; the rest with the
calibrated times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trine.optim.plan.whatif.graph import Task
from trine.optim.plan.whatif.times import OperationTimes
from trine.record.errors import UsageError

__all__ = ["Pace", "calibrated_s", "pace_of"]

#: Layout changes and fills by mask: their calibrated time hangs on strides more than on bytes. Convolutions: their forward's
#: stride is not on record, so that their calibrated time may be a tenth of the true one.
_UNEVEN = frozenset({"transposed_copy", "masked_fill", "convolution"})


@dataclass(frozen=True, slots=True)
class Pace:
    """``product``: measured over calibrated time of products. ``memory``: the same of work on memory."""

    times: OperationTimes
    product: float = 1.0
    memory: float = 1.0

    def new(self, work: str, elements: float, dtype: str) -> float:
        """Seconds of work on memory that the step did not have."""
        return self.times.memory(work, elements, dtype) * self.memory

    def changed(self, measured: float, before: float, after: float, moved: float) -> float:
        """Seconds of work on memory that was ``measured``: ``before`` and ``after`` are its calibrated times, and it moves
        ``moved`` times the bytes."""
        hot = min(self.product * before, measured)
        return hot * after / before + (measured - hot) * moved


def calibrated_s(task: Task, times: OperationTimes) -> float | None:
    """The calibrated seconds of a product or of work on memory in forward or backward; None where they say nothing of it."""
    operator = task.operator
    if task.phase not in ("forward", "backward") or operator.work in _UNEVEN:
        return None
    try:
        if operator.product is not None:
            return times.product(operator.product, operator.dtype)
        if operator.kind == "memory":
            return times.memory(str(operator.work), operator.elements, operator.dtype)
    except UsageError:
        pass  # this work, or this dtype of it, was not calibrated
    return None


def pace_of(tasks: Iterable[Task], times: OperationTimes) -> Pace:
    """Of a step's forward and backward; 1 where there is no such work or no calibration of it."""
    sums = {"product": [0.0, 0.0], "memory": [0.0, 0.0]}
    for task in tasks:
        if (calibrated := calibrated_s(task, times)) is not None:
            sums[task.kind][0] += task.seconds
            sums[task.kind][1] += calibrated
    ratios = {kind: measured / known if known > 0 else 1.0 for kind, (measured, known) in sums.items()}
    return Pace(times, ratios["product"], ratios["memory"])
