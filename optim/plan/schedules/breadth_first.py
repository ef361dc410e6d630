"""Breadth-first, or looped (Lamy-Poirier 2023): every chunk runs all micro-batches before the next one begins.

Backwards take them from the last to the first, as ``torch.distributed.pipelining`` does.
"""

from __future__ import annotations

from trine.optim.plan.schedules._order import BACKWARD, FORWARD, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES"]


def _make(shape: Shape, work: Work) -> Order:
    chunks, indices = range(shape.chunks), range(shape.microbatches)
    ahead = tuple((FORWARD, chunk, index) for chunk in chunks for index in indices)
    back = tuple((BACKWARD, chunk, index) for chunk in reversed(chunks) for index in reversed(indices))
    return Order(shape, (ahead + back,) * shape.ranks)


SCHEDULES = (Schedule("looped-bfs", _make, chunks=0),)
