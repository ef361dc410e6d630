"""What becomes of each block's activations: kept, moved off the device, or recomputed, at the least added time.

A pure function from measured figures to a choice for each block, such that what is held for backward fits a number of
bytes. Two resources are weighed against each other, as in Beaumont et al. 2021 ("Efficient combination of
rematerialization and offloading for training DNNs"): the device computes blocks anew, and a link beside it moves bytes.

*Time.* A recomputed block costs its forward once more. A moved block costs what the computing thread itself spends on
the copies, and whatever the link cannot hide: it works through what is moved while blocks compute, and at most
``window_bytes`` may wait for it; what is beyond holds the computation up. Backward is the same in mirror image: what
its last blocks need is read ahead by at most the window, so that both directions obey one recurrence over the blocks in
the order of the forward,

    backlog = min(max(0, backlog + moved - computed), window),   waiting += what the window cuts off,

and what is left at the end, beyond what follows the last block, is waited for as well.

*Memory.* The peak is the largest of: the end of the forward; a recomputed block's activations, alive together with
what earlier blocks hold; a moved block's, a few of which are back at once. What of the window lies on the device counts wherever anything moves.

:func:`schedule` finds the least time among all 4ⁿ choices: partial plans that another one equals or beats in bytes,
backlogs and time are dropped, which leaves few. Beyond :data:`MOST_PARTIAL` of them, only the fastest of those that
hold about the same bytes with about the same backlog go on, and the result says that it may not be the best.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["MOST_PARTIAL", "Block", "Choice", "Link", "Schedule", "added_ns", "peak_bytes", "schedule"]

#: Partial plans that are followed at once before those that are alike are thinned out.
MOST_PARTIAL = 1000
_CELLS = 8  # for each of bytes and backlogs, when they are


class Choice(enum.Enum):
    """What becomes of a block's activations."""

    KEPT = "kept"
    MOVED = "moved"
    RECOMPUTED = "recomputed"
    #: Recomputed from an input that is moved.
    RECOMPUTED_FROM_MOVED = "recomputed from a moved input"

    @property
    def recomputes(self) -> bool:
        """Whether the forward runs once more."""
        return self in (Choice.RECOMPUTED, Choice.RECOMPUTED_FROM_MOVED)

    @property
    def moves(self) -> bool:
        """Whether something leaves the device."""
        return self in (Choice.MOVED, Choice.RECOMPUTED_FROM_MOVED)


@dataclass(frozen=True, slots=True)
class Block:
    """One block's figures, in the order in which the forward meets them."""

    name: str
    input_bytes: int  # of its input on the device
    saved_bytes: int  # that it holds besides when it is kept
    moved_bytes: int  # that go over the link when it is moved, the input included
    left_bytes: int  # that stay on the device even then: what is too small to be moved
    recomputed_bytes: int  # alive when it has been recomputed
    at_once_bytes: int  # of moved ones, back on the device together at most
    outside_bytes: int  # held when it begins by what is no block
    forward_ns: int
    backward_ns: int

    def held_bytes(self, choice: Choice) -> int:
        """On the device from its forward to its backward."""
        return {
            Choice.KEPT: self.input_bytes + self.saved_bytes,
            Choice.MOVED: self.left_bytes,
            Choice.RECOMPUTED: self.input_bytes,
            Choice.RECOMPUTED_FROM_MOVED: 0,
        }[choice]

    def back_bytes(self, choice: Choice) -> int:
        """More than :meth:`held_bytes`, in its backward."""
        if choice is Choice.MOVED:
            return self.at_once_bytes
        from_moved = self.input_bytes if choice is Choice.RECOMPUTED_FROM_MOVED else 0
        return self.recomputed_bytes + from_moved if choice.recomputes else 0

    def link_bytes(self, choice: Choice) -> int:
        """Over the link, each way."""
        if choice is Choice.MOVED:
            return self.moved_bytes
        return self.input_bytes if choice is Choice.RECOMPUTED_FROM_MOVED else 0


@dataclass(frozen=True, slots=True)
class Link:
    """What moving costs, in nanoseconds a byte each way: of the computing thread's own, and of the link's beside it."""

    blocking_ns: float
    out_ns: float
    back_ns: float
    window_bytes: int  # that may wait for the link, or be read ahead
    device_bytes: int  # of the window, on the device


@dataclass(frozen=True, slots=True)
class Schedule:
    """A choice for each block, and what it comes to."""

    choices: tuple[Choice, ...]
    recomputing_ns: int
    moving_ns: int  # of which nothing is hidden
    peak_bytes: int
    #: Whether nothing was left out of the search.
    is_best: bool = True

    @property
    def added_ns(self) -> int:
        """To a step in which everything is kept."""
        return self.recomputing_ns + self.moving_ns


def peak_bytes(blocks: Sequence[Block], choices: Sequence[Choice], link: Link, end_bytes: int) -> int:
    """Most bytes held for backward at once. ``end_bytes``: at the forward's end by what is no block."""
    held = peak = window = 0
    for block, choice in zip(blocks, choices, strict=True):
        if choice.moves:
            window = link.device_bytes
        back = block.back_bytes(choice)
        if back:
            peak = max(peak, block.outside_bytes + held + block.held_bytes(choice) + back + window)
        held += block.held_bytes(choice)
    return max(peak, end_bytes + held + window)


def added_ns(
    blocks: Sequence[Block], choices: Sequence[Choice], link: Link, tail_ns: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """(recomputing, moving) nanoseconds that a step takes longer. ``tail_ns``: forward and backward behind the last block."""
    recomputing, moving = 0, 0.0
    out = back = 0.0
    for block, choice in zip(blocks, choices, strict=True):
        out, back, more = _after(block, choice, link, out, back)
        recomputing += block.forward_ns if choice.recomputes else 0
        moving += more
    return recomputing, round(moving + _waiting_at_the_end(out, back, tail_ns))


def _after(block: Block, choice: Choice, link: Link, out: float, back: float) -> tuple[float, float, float]:
    """Both backlogs in nanoseconds after a block, and the time that moving adds in it."""
    size = block.link_bytes(choice)
    again = block.forward_ns if choice.recomputes else 0
    out = max(0.0, out + size * link.out_ns - block.forward_ns)
    back = max(0.0, back + size * link.back_ns - block.backward_ns - again)
    most_out, most_back = link.window_bytes * link.out_ns, link.window_bytes * link.back_ns
    waiting = max(0.0, out - most_out) + max(0.0, back - most_back)
    return min(out, most_out), min(back, most_back), waiting + 2 * size * link.blocking_ns


def _waiting_at_the_end(out: float, back: float, tail_ns: tuple[int, int]) -> float:
    return max(0.0, out - tail_ns[0]) + max(0.0, back - tail_ns[1])


# --- the search --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Partial:
    """A plan for the first blocks."""

    cost: float
    held: int
    out: float
    back: float
    moved: bool
    choices: tuple[Choice, ...]


def schedule(
    blocks: Sequence[Block],
    budget_bytes: int,
    link: Link,
    end_bytes: int,
    tail_ns: tuple[int, int] = (0, 0),
    allowed: Sequence[Choice] = tuple(Choice),
) -> Schedule | None:
    """The choice of least :func:`added_ns` whose :func:`peak_bytes` is within ``budget_bytes``; ``None``: there is none.

    ``allowed`` are the choices to make of. The same figures give the same choice on every rank.
    """
    kept_after = [0] * (len(blocks) + 1)  # bytes, when all from here on are kept
    for position in range(len(blocks) - 1, -1, -1):
        kept_after[position] = kept_after[position + 1] + blocks[position].held_bytes(Choice.KEPT)
    best = _simplest(
        blocks, budget_bytes, link, end_bytes, allowed
    )  # partial plans that cost more are dropped
    is_best = True
    alive = [_Partial(0.0, 0, 0.0, 0.0, False, ())]
    for position, block in enumerate(blocks):
        going_on: list[_Partial] = []
        for partial in alive:
            window = link.device_bytes if partial.moved else 0
            if (
                Choice.KEPT in allowed
                and partial.held + kept_after[position] + end_bytes + window <= budget_bytes
            ):
                best = _better(best, _keep_the_rest(partial, blocks[position:], link), tail_ns)
                continue  # the rest costs nothing
            going_on += _extended(partial, block, link, budget_bytes, end_bytes, allowed)
        limit = float("inf") if best is None else best.cost
        alive = _undominated([partial for partial in going_on if partial.cost < limit])
        if len(alive) > MOST_PARTIAL:
            alive, is_best = _thinned(alive), False
    for partial in alive:
        best = _better(best, partial, tail_ns)
    if best is None:
        return None
    recomputing, moving = added_ns(blocks, best.choices, link, tail_ns)
    return Schedule(
        best.choices, recomputing, moving, peak_bytes(blocks, best.choices, link, end_bytes), is_best
    )


def _simplest(
    blocks: Sequence[Block], budget: int, link: Link, end_bytes: int, allowed: Sequence[Choice]
) -> _Partial | None:
    """The first blocks recomputed, as few as it takes; nothing moves."""
    if Choice.RECOMPUTED not in allowed or Choice.KEPT not in allowed:
        return None
    for count in range(len(blocks) + 1):
        choices = tuple(Choice.RECOMPUTED if n < count else Choice.KEPT for n in range(len(blocks)))
        if peak_bytes(blocks, choices, link, end_bytes) <= budget:
            cost = float(sum(block.forward_ns for block in blocks[:count]))
            return _Partial(cost, 0, 0.0, 0.0, False, choices)
    return None


def _extended(
    partial: _Partial, block: Block, link: Link, budget: int, end_bytes: int, allowed: Sequence[Choice]
) -> list[_Partial]:
    """One block further, in each way that still fits."""
    found = []
    for choice in allowed:
        moved = partial.moved or choice.moves
        held = partial.held + block.held_bytes(choice)
        window = link.device_bytes if moved else 0
        back = block.back_bytes(choice)
        if back and block.outside_bytes + held + back + window > budget:
            continue
        if end_bytes + held + window > budget:
            continue
        out, behind, more = _after(block, choice, link, partial.out, partial.back)
        cost = partial.cost + more + (block.forward_ns if choice.recomputes else 0)
        found.append(_Partial(cost, held, out, behind, moved, (*partial.choices, choice)))
    return found


def _keep_the_rest(partial: _Partial, rest: Sequence[Block], link: Link) -> _Partial:
    out, back = partial.out, partial.back
    for block in rest:
        out, back, _ = _after(block, Choice.KEPT, link, out, back)
    choices = (*partial.choices, *(Choice.KEPT for _ in rest))
    return _Partial(partial.cost, partial.held, out, back, partial.moved, choices)


def _better(best: _Partial | None, other: _Partial, tail_ns: tuple[int, int]) -> _Partial:
    """The cheaper, what is waited for at the end included; the earlier of equals."""
    cost = other.cost + _waiting_at_the_end(other.out, other.back, tail_ns)
    if best is not None and best.cost <= cost:
        return best
    return _Partial(cost, other.held, other.out, other.back, other.moved, other.choices)


def _undominated(partials: list[_Partial]) -> list[_Partial]:
    """Those that no other one beats, the fastest first: by time, bytes, both backlogs, and whether anything moved."""
    partials.sort(key=lambda partial: (partial.cost, partial.held, partial.out, partial.back, partial.moved))
    figures = np.array([(each.held, each.out, each.back, each.moved) for each in partials], dtype=np.float64)
    kept = np.empty_like(figures)
    found: list[_Partial] = []
    for partial, figure in zip(partials, figures, strict=True):
        # Those that were found before cost no more.
        if not (kept[: len(found)] <= figure).all(axis=1).any():
            kept[len(found)] = figure
            found.append(partial)
    return found


def _thinned(partials: list[_Partial]) -> list[_Partial]:
    """The fastest of those that are alike in bytes and backlogs; given the fastest first."""
    tops = [max(value(each) for each in partials) or 1 for value in _MEASURES]
    cells: dict[tuple[int, ...], _Partial] = {}
    for partial in partials:
        cell = tuple(int(value(partial) * _CELLS / top) for value, top in zip(_MEASURES, tops, strict=True))
        cells.setdefault(cell, partial)
    # The smallest must go on whatever it costs: it is the one that surely fits.
    smallest = min(partials, key=lambda partial: partial.held)
    return list({id(each): each for each in (*cells.values(), smallest)}.values())


_MEASURES: tuple[Callable[[_Partial], float], ...] = (
    lambda each: float(each.held),
    lambda each: float(each.out),
    lambda each: float(each.back),
)
