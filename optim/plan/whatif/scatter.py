"""How far a step's own operations lie about their calibrated times: what a calibration is worth for this record.

A calibration measures an operation by itself, over and over; a step runs it once, between others, on tensors that were just
written or long ago. What is common to all operations of a kind is the step's pace and is taken out
(:mod:`~trine.optim.plan.whatif.transforms._pace`); what is left, as a standard deviation of logarithms weighted by time, is as much
as a calibrated time of that kind is in doubt where a change asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log, sqrt

from trine.optim.plan.whatif.graph import Graph, Task
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms._pace import calibrated_s
from trine.optim.plan.whatif.transforms._transfers import is_gradient, link_of
from trine.record.errors import UsageError

__all__ = ["scatter_of"]


def scatter_of(graph: Graph, times: OperationTimes) -> Mapping[str, float]:
    """By kind (``product``, ``memory``, ``transfer``) the standard deviation of log(measured / calibrated) over the operations,
    those of one kind, size and dtype taken together. A kind of which there are not two is left out: it says nothing."""
    sums: dict[str, dict[tuple[object, ...], list[float]]] = {}
    for kind, alike, measured, calibrated in _beside(graph, times):
        pair = sums.setdefault(kind, {}).setdefault(alike, [0.0, 0.0])
        pair[0] += measured
        pair[1] += calibrated
    return {kind: _deviation(list(found.values())) for kind, found in sums.items() if len(found) > 1}


def _beside(graph: Graph, times: OperationTimes) -> Iterator[tuple[str, tuple[object, ...], float, float]]:
    """Of each task that was calibrated as well: its kind, which are alike, and seconds measured and calibrated."""
    try:
        link = link_of(graph, times)
    except UsageError:  # no exchange, or none that was calibrated
        link = None
    for step in graph.steps:
        for task in (task for each in step.ranks for task in each.tasks if task.seconds > 0):
            if is_gradient(task):
                if link is not None:
                    yield "transfer", (task.bytes,), task.seconds, link.seconds(task.bytes)
            elif (calibrated := calibrated_s(task, times)) is not None:
                yield task.kind, _alike(task), task.seconds, calibrated


def _alike(task: Task) -> tuple[object, ...]:
    operator = task.operator
    return operator.work, operator.product, operator.elements, operator.dtype


def _deviation(pairs: list[list[float]]) -> float:
    """Of the logarithms of measured over calibrated time, weighted by measured time."""
    whole = sum(measured for measured, _ in pairs)
    logs = [
        (measured / whole, log(measured / calibrated)) for measured, calibrated in pairs if calibrated > 0
    ]
    mean = sum(share * each for share, each in logs)
    return sqrt(sum(share * (each - mean) ** 2 for share, each in logs))
