"""Interleaved 1F1B (Narayanan et al. 2021), and the same with W in the drain (Qi et al. 2023, section 3).

Micro-batches go in rounds of one for each rank: a round passes the first chunk, then the next. Rank r begins with
(v − 1) rounds and 2 (p − 1 − r) forwards more. With W apart half as many suffice, and a rank's first W comes r gradients of
the input later, as in ZB-H1.
"""

from __future__ import annotations

from trine.optim.plan.schedules._order import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Order,
    Schedule,
    Shape,
    Work,
)

__all__ = ["SCHEDULES", "round_size"]


def round_size(ranks: int, microbatches: int) -> int:
    """Micro-batches of a round: as many as ranks, or a few more, so that all rounds are alike."""
    return microbatches // max(1, microbatches // ranks)


def _round(shape: Shape) -> int:
    return round_size(shape.ranks, shape.microbatches)


def _problem(shape: Shape) -> str | None:
    rounds = max(1, shape.microbatches // shape.ranks)
    if shape.microbatches % rounds == 0:
        return None
    below = shape.microbatches // rounds * rounds
    return f"they go in equal rounds of the ranks: use {below} or {below + rounds}"


def _virtual(place: int, shape: Shape) -> tuple[int, int]:
    """(chunk, micro-batch) of the ``place``-th forward."""
    size = _round(shape)
    turn, inside = divmod(place, size * shape.chunks)
    return inside // size, turn * size + inside % size


def _rank(rank: int, shape: Shape, split: bool) -> tuple[Action, ...]:
    total = shape.microbatches * shape.chunks
    after = shape.ranks - 1 - rank
    lead = min((shape.chunks - 1) * _round(shape) + (after if split else 2 * after), total)
    order = [(FORWARD, *_virtual(place, shape)) for place in range(lead)]
    for place in range(total):
        if lead + place < total:
            order.append((FORWARD, *_virtual(lead + place, shape)))
        order.append((INPUT if split else BACKWARD, *_mirrored(place, shape)))
        if split and place >= rank:
            order.append((WEIGHT, *_mirrored(place - rank, shape)))
    if split:
        order += [(WEIGHT, *_mirrored(place, shape)) for place in range(max(total - rank, 0), total)]
    return tuple(order)


def _mirrored(place: int, shape: Shape) -> tuple[int, int]:
    """(chunk, micro-batch) of the ``place``-th backward: the chunks from the last to the first."""
    chunk, index = _virtual(place, shape)
    return shape.chunks - 1 - chunk, index


def _make(shape: Shape, work: Work) -> Order:
    return Order(shape, tuple(_rank(rank, shape, split=False) for rank in range(shape.ranks)))


def _make_split(shape: Shape, work: Work) -> Order:
    return Order(shape, tuple(_rank(rank, shape, split=True) for rank in range(shape.ranks)))


SCHEDULES = (
    Schedule("interleaved", _make, chunks=0, problem=_problem),
    Schedule("interleaved-zb", _make_split, chunks=0, problem=_problem),
)
