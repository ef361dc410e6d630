"""Automatic zero-bubble schedules for given times and memory (Qi et al. 2023, section 3): ZB-1p and ZB-2p.

The paper builds an order by rules and improves it by integer programming; here the rules alone: all ranks advance together in
time, and whoever is free takes the gradient of an input that has arrived, else a forward that memory allows, else the
gradients of weights, which wait nowhere else. What the rules leave open (how long a rank waits for a message that is on its
way instead of beginning W, how far ahead it runs before the first backward) is tried in a handful of ways, and the best
order by its simulated cost wins, ZB-H1's and ZB-H2's among them.

Memory is counted in micro-batches' activations of a rank; between the gradient of the input and that of the weights a part
of them (``WEIGHT_SHARE``) is still held.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from trine.optim.plan.schedules import zero_bubble
from trine.optim.plan.schedules._order import FORWARD, INPUT, WEIGHT, Action, Order, Schedule, Shape, Work

__all__ = ["SCHEDULES", "automatic"]

#: Of a layer's activations that W needs: 32 of 34 sbh without attention's scores (Korthikanti 2022; Qi et al. 2023).
WEIGHT_SHARE = 32 / 34

#: Fractions of a W that a rank would rather wait for a message that is on its way.
_PATIENCE = (0.0, 0.3, 0.6)

#: Warm-ups: of so many fractions of a forward that a backward may have to wait, the best few.
_STEPS, _WARM_UPS = 24, 3


@dataclass(slots=True)
class _Rank:
    """What one rank has done so far."""

    free: float = 0.0
    held: float = 0.0
    done: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    first: float = 0.0
    actions: list[Action] = field(default_factory=list)


class _Run:
    """One way through the rules."""

    def __init__(
        self, shape: Shape, work: Work, limit: float, share: float, patience: float, leads: tuple[int, ...]
    ) -> None:
        self.shape, self.work, self.share = shape, work, share
        self.patience = patience
        self.limit = max(limit, 1.0)
        # Times that differ by rounding are one, so that the order does not hang on the last bit.
        self.alike = 1e-9 * (max(work.forward_s) + max(work.input_s) + max(work.weight_s))
        self.leads = leads
        self.ranks = [_Rank() for _ in range(shape.ranks)]
        self.arrived: dict[tuple[int, int, int], float] = {
            (FORWARD, 0, index): 0.0 for index in range(shape.microbatches)
        }
        self.events = [(0.0, rank) for rank in range(shape.ranks)]

    def run(self) -> float:
        """The cost: the longest that a rank takes from its first action to its last."""
        while self.events:
            now, place = heapq.heappop(self.events)
            rank = self.ranks[place]
            if now < rank.free:
                continue
            kind = self._choose(place, rank, now)
            if kind is not None:
                self._begin(place, rank, kind, now)
        return max(rank.free - rank.first for rank in self.ranks)

    def _arrival(self, place: int, kind: int, index: int) -> float | None:
        return self.arrived.get((kind, place, index)) if index < self.shape.microbatches else None

    def _choose(self, place: int, rank: _Rank, now: float) -> int | None:
        inputs = self._arrival(place, INPUT, rank.done[INPUT])
        forward = self._arrival(place, FORWARD, rank.done[FORWARD])
        waiting = rank.done[INPUT] - rank.done[WEIGHT]
        soon = now + self.alike
        if inputs is not None and inputs <= soon:
            return INPUT
        fits = rank.held + 1 <= self.limit + 1e-9
        # In the warm-up no forward is begun that the first backward would have to wait for.
        due = rank.done[INPUT] > 0 or rank.done[FORWARD] < self.leads[place]
        if forward is not None and forward <= soon and fits and due:
            return FORWARD
        if not waiting:
            return None
        coming = [each for each in (inputs, forward if fits else None) if each is not None]
        if coming and min(coming) - now < self.patience * self.work.weight_s[place]:
            return None  # the message's event comes round
        return WEIGHT

    def _begin(self, place: int, rank: _Rank, kind: int, now: float) -> None:
        index = rank.done[kind]
        now = max(now, self._arrival(place, kind, index) or now)
        rank.done[kind] += 1
        if not rank.actions:
            rank.first = now
        rank.actions.append((kind, 0, index))
        rank.free = now + self.work.of(kind, place)
        rank.held += {FORWARD: 1.0, INPUT: self.share - 1.0, WEIGHT: -self.share}[kind]
        heapq.heappush(self.events, (rank.free, place))
        there = rank.free + self.work.message_s
        if kind == FORWARD and place == self.shape.ranks - 1:
            self.arrived[INPUT, place, index] = rank.free
        elif kind == FORWARD:
            self._send(FORWARD, place + 1, index, there)
        elif kind == INPUT and place:
            self._send(INPUT, place - 1, index, there)

    def _send(self, kind: int, place: int, index: int, there: float) -> None:
        self.arrived[kind, place, index] = there
        heapq.heappush(self.events, (there, place))


def _leads(shape: Shape, work: Work, limit: float, more: float) -> tuple[float, tuple[int, ...]]:
    """Forwards of each rank before its first backward: those that are done when it arrives; and the longest wait for it.

    ``more``: the part of a forward by which they may be late; each rank's delay adds to the next one's.
    """
    begins = [0.0]
    for place in range(shape.ranks - 1):
        begins.append(begins[-1] + work.forward_s[place] + work.message_s)
    leads = [1] * shape.ranks
    ended = begins[-1] + work.forward_s[-1] + work.input_s[-1]
    longest = 0.0
    for place in reversed(range(shape.ranks - 1)):
        forward = work.forward_s[place]
        arrives = ended + work.message_s
        count = int((arrives - begins[place]) / forward + more + 1e-9) if forward else shape.microbatches
        leads[place] = max(leads[place + 1], min(count, int(limit + 1e-9), shape.microbatches), 1)
        free = begins[place] + leads[place] * forward
        longest = max(longest, arrives - free)
        ended = max(arrives, free) + work.input_s[place]
    return longest, tuple(leads)


def _warm_ups(shape: Shape, work: Work, limit: float) -> list[tuple[int, ...]]:
    """The warm-ups in which the rank that waits longest for its first backward waits least."""
    found = {_leads(shape, work, limit, step / _STEPS) for step in range(_STEPS + 1)}
    return [leads for _, leads in sorted(found)[:_WARM_UPS]]


def automatic(shape: Shape, work: Work, limit: float, weight_share: float = WEIGHT_SHARE) -> Order:
    """The best order found with at most ``limit`` micro-batches' activations a rank."""
    best, least = None, float("inf")
    for leads, patience in product(_warm_ups(shape, work, limit), _PATIENCE):
        run = _Run(shape, work, limit, weight_share, patience, leads)
        cost = run.run()
        if cost < least:
            best, least = Order(shape, tuple(tuple(rank.actions) for rank in run.ranks)), cost
    assert best is not None
    for known in zero_bubble.SCHEDULES:
        order = known.make(shape, work)
        if all(order.most_held(rank, weight_share) <= limit + 1e-9 for rank in range(shape.ranks)):
            cost = _cost(order, work)
            if cost < least:
                best, least = order, cost
    return best


def _cost(order: Order, work: Work) -> float:
    from trine.optim.plan.simulator import simulate  # the simulator imports the orders

    return simulate(order, work).longest_rank_s()


def _make(shape: Shape, work: Work, times: int) -> Order:
    return automatic(shape, work, times * shape.ranks)


SCHEDULES = (
    Schedule("zb-1p", partial(_make, times=1)),
    Schedule("zb-2p", partial(_make, times=2)),
)
