"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

from trine.optim.plan.schedules._order import BACKWARD, FORWARD, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES"]


def _make(shape: Shape, work: Work) -> Order:
    order = tuple((kind, 0, index) for kind in (FORWARD, BACKWARD) for index in range(shape.microbatches))
    return Order(shape, (order,) * shape.ranks)


SCHEDULES = (Schedule("gpipe", _make),)
