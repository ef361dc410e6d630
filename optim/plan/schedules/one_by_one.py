"""1F1B, PipeDream-flush (Narayanan et al. 2019; 2021): after p − r forwards a backward and a forward in turns."""

from __future__ import annotations

from trine.optim.plan.schedules._order import BACKWARD, FORWARD, Action, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES"]


def _rank(rank: int, shape: Shape) -> tuple[Action, ...]:
    lead = min(shape.ranks - rank, shape.microbatches)
    order = [(FORWARD, 0, index) for index in range(lead)]
    for index in range(shape.microbatches):
        order.append((BACKWARD, 0, index))
        if lead + index < shape.microbatches:
            order.append((FORWARD, 0, lead + index))
    return tuple(order)


def _make(shape: Shape, work: Work) -> Order:
    return Order(shape, tuple(_rank(rank, shape) for rank in range(shape.ranks)))


SCHEDULES = (Schedule("1f1b", _make),)
