"""ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section on ZB-V): two chunks a rank, folded as a V.

The first rank holds the first and the last stage, so the loss's gradient starts where forwards do and every rank holds p
micro-batches' activations, as 1F1B's first rank. Where F, B and W take alike, no rank waits between its first and last
action.
"""

from __future__ import annotations

from trine.optim.plan.schedules._order import FORWARD, INPUT, WEIGHT, Action, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES"]


class _Writer:
    """A rank's order while it is written; micro-batches of a kind and chunk come one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.actions: list[Action] = []
        self.next = {(kind, chunk): 0 for kind in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}

    def do(self, kind: int, chunk: int) -> None:
        """The next micro-batch of this kind and chunk, where one is left."""
        index = self.next[kind, chunk]
        if index < self.count:
            self.actions.append((kind, chunk, index))
            self.next[kind, chunk] += 1

    def both(self, chunk: int) -> None:
        """The gradient of the input and at once that of the weights."""
        self.do(INPUT, chunk)
        self.do(WEIGHT, chunk)


def _rank(rank: int, shape: Shape) -> tuple[Action, ...]:
    after = shape.ranks - 1 - rank
    writer = _Writer(shape.microbatches)
    for _ in range(2 * after + 1):
        writer.do(FORWARD, 0)
    for _ in range(rank):
        writer.do(FORWARD, 1)
        writer.do(FORWARD, 0)
    for _ in range(after + 1):
        writer.do(FORWARD, 1)
        writer.both(1)
    while writer.next[FORWARD, 1] < shape.microbatches:
        writer.do(FORWARD, 0)
        writer.both(0)
        writer.do(FORWARD, 1)
        writer.both(1)
    # The drain: gradients of the input first, those of the weights where nothing else is left.
    for _ in range(rank):
        writer.do(INPUT, 0)
        writer.do(INPUT, 1)
    for _ in range(after + 1):
        writer.both(0)
    for chunk in (1, 0):
        while writer.next[WEIGHT, chunk] < shape.microbatches:
            writer.do(WEIGHT, chunk)
    return tuple(writer.actions)


def _make(shape: Shape, work: Work) -> Order:
    return Order(shape, tuple(_rank(rank, shape) for rank in range(shape.ranks)), folded=True)


def _problem(shape: Shape) -> str | None:
    least = 2 * shape.ranks - 1
    return (
        None
        if shape.microbatches >= least
        else f"its warm-up needs {least} micro-batches: use {least} or more"
    )


SCHEDULES = (Schedule("zb-v", _make, chunks=2, problem=_problem),)
