"""ZB-H1 and ZB-H2 (Qi et al. 2023, section 2): backwards in two, and the gradients of weights wait for idle time.

H1 begins as 1F1B does and so holds no more activations; H2 begins with twice the forwards and fills the drain as well.
"""

from __future__ import annotations

from functools import partial

from trine.optim.plan.schedules._order import FORWARD, INPUT, WEIGHT, Action, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES"]


def _rank(rank: int, shape: Shape, depth: int) -> tuple[Action, ...]:
    lead = min(depth * (shape.ranks - 1 - rank), shape.microbatches)
    wait = depth * rank  # gradients of the input before the first of the weights
    order: list[Action] = [(FORWARD, 0, index) for index in range(lead)]
    for index in range(shape.microbatches):
        if lead + index < shape.microbatches:
            order.append((FORWARD, 0, lead + index))
        order.append((INPUT, 0, index))
        if index >= wait:
            order.append((WEIGHT, 0, index - wait))
    left = range(max(shape.microbatches - wait, 0), shape.microbatches)
    return tuple(order + [(WEIGHT, 0, index) for index in left])


def _make(shape: Shape, work: Work, depth: int) -> Order:
    return Order(shape, tuple(_rank(rank, shape, depth) for rank in range(shape.ranks)))


SCHEDULES = (
    Schedule("zb-h1", partial(_make, depth=1)),
    Schedule("zb-h2", partial(_make, depth=2)),
)
