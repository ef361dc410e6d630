"""The schedules of ``torch.distributed.pipelining``: their names, what each needs, their order, and the bubble it leaves.

    GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream-flush), Interleaved1F1B (Narayanan et al. 2021),
    LoopedBFS (Lamy-Poirier 2023), InterleavedZeroBubble and ZBVZeroBubble (Qi et al. 2023, 2024), DualPipeV (DeepSeek 2024)

The ideal bubble is counted on the order that PyTorch's own classes make: every rank does what stands next as soon as what
it depends on is done, in given times and without any for messages. For the schedules that have a formula it is that one.
A forward and a backward that DualPipeV may overlap follow each other here, as PyTorch runs them on one thread, and what they
hand on leaves behind both.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from trine.record.errors import UsageError

__all__ = ["SCHEDULES", "SHORT", "Schedule", "Times", "ideal_bubble", "orders_of", "schedule_of"]


#: More than any batch is cut into; a slip of the keyboard would otherwise keep ranks laying out their order for ever.
MOST_MICROBATCHES = 65_536


@dataclass(frozen=True, slots=True)
class Schedule:
    """One of PyTorch's, and what it asks of the configuration."""

    name: str  # as get_schedule_class has it
    several: bool = False  # stages a rank
    turned: bool = False  # the stages come back along the ranks, as a V: exactly two a rank
    split: bool = False  # the gradients of weights are computed apart from those of the input

    def default_chunks(self) -> int:
        """Stages a rank where nothing is said."""
        return 2 if self.several else 1

    def problem(self, ranks: int, chunks: int, microbatches: int) -> str | None:
        """Why so many micro-batches cannot be run, with the nearest numbers that can; ``None`` where they can."""
        if microbatches > MOST_MICROBATCHES:
            return f"the order of all is laid out before the first step: use {MOST_MICROBATCHES} or fewer"
        if self.name == "1F1B" and microbatches < ranks:
            return f'1F1B needs {ranks} or more, as many as it has stages; "gpipe" runs any number'
        if self.name == "DualPipeV" and microbatches < ranks * chunks:
            return f"{self.name} fills both ways at once and needs {ranks * chunks} or more, twice the ranks"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % max(
            1, microbatches // ranks
        ):
            below = microbatches // ranks * ranks
            return f"{self.name} runs them in rounds of the {ranks} ranks: use {below} or {below + ranks}"
        return None


#: Lower case → the schedule. Short names beside PyTorch's.
SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved1f1b": Schedule("Interleaved1F1B", several=True),
    "interleaved": Schedule("Interleaved1F1B", several=True),
    "loopedbfs": Schedule("LoopedBFS", several=True),
    "looped_bfs": Schedule("LoopedBFS", several=True),
    "interleavedzerobubble": Schedule("InterleavedZeroBubble", several=True, split=True),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", several=True, split=True),
    "zbvzerobubble": Schedule("ZBVZeroBubble", several=True, turned=True, split=True),
    "zbv": Schedule("ZBVZeroBubble", several=True, turned=True, split=True),
    "dualpipev": Schedule("DualPipeV", several=True, turned=True, split=True),
}
#: The short names.
SHORT = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True, slots=True)
class Times:
    """What a stage's work on one micro-batch takes, in any unit: forward, and backward by input and by weights."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: str) -> float:
        """Of F, B (the whole backward), I or W."""
        if kind == "B":
            return self.backward_input + self.backward_weight
        return {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}[kind]


def schedule_of(name: str | None, chunks: int | None) -> Schedule:
    """By PyTorch's name or a short one, in any case. Left alone: 1F1B, or interleaved where a rank has several stages.

    Raises ``UsageError`` that names ``parallel.schedule``.
    """
    if name is None:
        return SCHEDULES["interleaved" if (chunks or 1) > 1 else "1f1b"]
    found = SCHEDULES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), list(SCHEDULES), n=1)
        guess = f'; did you mean "{near[0]}"?' if near else ""
        listed = ", ".join(f'"{short}"' for short in SHORT)
        raise UsageError(f'parallel.schedule = "{name}": it takes {listed}{guess}')
    return found


#: (kind F, B, I or W; stage; micro-batch)
Action = tuple[str, int, int]


#: Actions whose messages leave together, when the last of them is done.
Turn = tuple[Action, ...]


@lru_cache(maxsize=256)
def orders_of(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> tuple[Turn, ...]:
    """By rank, what it does in its order, as PyTorch's class decides it. No process group is needed."""
    turns = _turns_of(schedule, ranks, chunks, microbatches)
    return tuple(tuple(action for turn in order for action in turn) for order in turns)


def _turns_of(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> tuple[tuple[Turn, ...], ...]:
    if schedule.name == "1F1B":  # PyTorch draws another order than it runs
        orders = [_one_by_one(rank, ranks, microbatches) for rank in range(ranks)]
        return tuple(tuple((action,) for action in order) for order in orders)
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(schedule.name)
    stages = ranks * chunks
    stage = SimpleNamespace(
        num_stages=stages, group_size=ranks, group_rank=0, submod=None, is_first=True, is_last=False
    )
    made = kind([stage] * chunks if schedule.several else stage, microbatches, loss_fn=None)
    return tuple(
        tuple(turn for given in made.pipeline_order[rank] if (turn := tuple(_actions(given))))
        for rank in range(ranks)
    )


def _one_by_one(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """As ``Schedule1F1B._step_microbatches`` runs it."""
    lead = min(ranks - rank, microbatches)
    order = [("F", rank, index) for index in range(lead)]
    for index in range(microbatches):
        order.append(("B", rank, index))
        if lead + index < microbatches:
            order.append(("F", rank, lead + index))
    return tuple(order)


def _actions(given: Any) -> list[Action]:
    if given is None:
        return []
    if given.sub_actions:  # a forward and a backward that may overlap; on one thread they follow each other
        return [action for each in given.sub_actions for action in _actions(each)]
    kind = given.computation_type.value
    return [(kind, given.stage_index, given.microbatch_index)] if kind in "FBIW" else []


@lru_cache(maxsize=256)
def ideal_bubble(
    schedule: Schedule, ranks: int, chunks: int, microbatches: int, times: Times = Times()
) -> float:
    """The part of an iteration in which a rank has nothing to do, mean over ranks, with even stages: 0 … 1."""
    orders = _turns_of(schedule, ranks, chunks, microbatches)
    work = [sum(times.of(kind) for turn in order for kind, _, _ in turn) for order in orders]
    span = _span(orders, ranks * chunks, times)
    return 1.0 - sum(work) / len(work) / span


def _span(orders: Sequence[Sequence[Turn]], stages: int, times: Times) -> float:
    """From the first start to the last end. Messages of a turn leave at its end, as PyTorch sends them."""
    done: dict[Action, float] = {}
    now = [0.0] * len(orders)
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                turn = order[places[rank]]
                ready = [_ready(action, stages, done) for action in turn]
                if None in ready:
                    break
                for action, since in zip(turn, ready, strict=True):
                    now[rank] = max(now[rank], since or 0.0) + times.of(action[0])
                done.update(dict.fromkeys(turn, now[rank]))
                places[rank] += 1
                moved = True
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise RuntimeError("an order of a pipeline's work that waits for itself")
    return max(now)


def _ready(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """When what an action needs is done; ``None`` where it is not yet known."""
    kind, stage, index = action
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, index))
    if kind == "W":
        return done.get(("I", stage, index))
    own = done.get(("F", stage, index))
    if own is None or stage == stages - 1:
        return own
    after = done.get(("B", stage + 1, index), done.get(("I", stage + 1, index)))
    return None if after is None else max(own, after)
