"""DualPipe-V (DeepSeek-AI 2024; "cut in half", 2025): a V whose forwards and backwards run in pairs.

Each pair is meant to overlap one's computing with the other's communication; as an order they follow each other, the
forward first. The numbers of each phase are those of the published schedule: with p ranks, rank r begins with
2 (p − 1 − r) forwards, and splits backwards only where the ends leave it idle.
"""

from __future__ import annotations

from collections import deque

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

__all__ = ["SCHEDULES"]


class _Writer:
    """A rank's order while it is written; postponed gradients of weights wait in a queue."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.next = {(forward, chunk): 0 for forward in (True, False) for chunk in (0, 1)}
        self.waiting: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        """The chunk's next forward."""
        self.actions.append((FORWARD, chunk, self._next(True, chunk)))

    def backward(self, chunk: int, *, split: bool = False) -> None:
        """The chunk's next backward; ``split``: that of the weights waits."""
        index = self._next(False, chunk)
        self.actions.append((INPUT if split else BACKWARD, chunk, index))
        if split:
            self.waiting.append((chunk, index))

    def weight(self) -> None:
        """The oldest that waits."""
        self.actions.append((WEIGHT, *self.waiting.popleft()))

    def _next(self, forward: bool, chunk: int) -> int:
        found = self.next[forward, chunk]
        self.next[forward, chunk] += 1
        return found


def _rank(rank: int, shape: Shape) -> tuple[Action, ...]:
    after, writer = shape.ranks - 1 - rank, _Writer()
    for _ in range(2 * after):
        writer.forward(0)
    for _ in range(rank + 1):
        writer.forward(0)
        writer.forward(1)
    for _ in range(after):
        writer.backward(1, split=True)
        writer.weight()
        writer.forward(1)
    for _ in range(shape.microbatches - 2 * shape.ranks + rank + 1):
        writer.forward(0)
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    for _ in range(after):
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    _drain(rank, after, writer)
    return tuple(writer.actions)


def _drain(rank: int, after: int, writer: _Writer) -> None:
    """Of the last backwards of both chunks, the later half is split."""
    split = False
    for turn in range(rank + 1):
        split = split or (turn == (rank + 1) // 2 and rank % 2 == 1)
        writer.backward(1, split=split)
        split = split or (turn == (rank + 1) // 2 and rank % 2 == 0)
        writer.backward(0, split=split)
    for _ in range(after):
        writer.weight()
        writer.backward(0, split=True)
    while writer.waiting:
        writer.weight()


def _make(shape: Shape, work: Work) -> Order:
    return Order(shape, tuple(_rank(rank, shape) for rank in range(shape.ranks)), folded=True)


def _problem(shape: Shape) -> str | None:
    least = 2 * shape.ranks
    return None if shape.microbatches >= least else f"it fills both ways at once: use {least} or more"


SCHEDULES = (Schedule("dualpipe-v", _make, chunks=2, problem=_problem),)
