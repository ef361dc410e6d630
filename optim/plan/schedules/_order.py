"""What an order of a pipeline's work is: for each rank its actions, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from trine.record.errors import UsageError

__all__ = ["BACKWARD", "FORWARD", "INPUT", "KINDS", "WEIGHT", "Action", "Order", "Schedule", "Shape", "Work"]

#: Kinds of actions, and their names as the record's micro-batches have them. ``BACKWARD`` is both gradients at once.
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
KINDS = ("forward", "backward", "backward_input", "backward_weight")

#: (kind, chunk, micro-batch)
Action = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a pipeline: ``ranks``, ``chunks`` of the model a rank, and micro-batches a step."""

    ranks: int
    chunks: int
    microbatches: int

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * self.chunks


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of each stage on one micro-batch, in the order of the stages; ``message_s`` from one rank to another."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.input_s) == len(self.weight_s):
            raise UsageError("forward_s, input_s and weight_s need a number for each stage, alike")
        if min(*self.forward_s, *self.input_s, *self.weight_s, self.message_s, 0.0) < 0:
            raise UsageError("a pipeline's times must not be negative")

    @classmethod
    def even(
        cls, stages: int, forward_s: float, input_s: float, weight_s: float, message_s: float = 0.0
    ) -> Work:
        """Stages that take alike."""
        return cls((forward_s,) * stages, (input_s,) * stages, (weight_s,) * stages, message_s)

    def of(self, kind: int, stage: int) -> float:
        """Seconds of an action's kind on a stage."""
        if kind == FORWARD:
            return self.forward_s[stage]
        if kind == INPUT:
            return self.input_s[stage]
        if kind == WEIGHT:
            return self.weight_s[stage]
        return self.input_s[stage] + self.weight_s[stage]


@dataclass(frozen=True, slots=True)
class Order:
    """``actions`` by rank. ``folded``: the stages come back along the ranks, as a V; else chunk c is a further round."""

    shape: Shape
    actions: tuple[tuple[Action, ...], ...]
    folded: bool = False

    def stage_of(self, rank: int, chunk: int) -> int:
        """Which stage of the model a rank's chunk is."""
        if self.folded and chunk % 2:
            return self.shape.ranks * (chunk + 1) - 1 - rank
        return self.shape.ranks * chunk + rank

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, self.shape.ranks)
        return self.shape.ranks - 1 - place if self.folded and chunk % 2 else place

    def most_held(self, rank: int, weight_share: float = 1.0) -> float:
        """The most micro-batches whose activations the rank holds at once, in units of all its chunks.

        ``weight_share``: the part that W still needs after the gradient of the input.
        """
        change = {FORWARD: 1.0, BACKWARD: -1.0, INPUT: weight_share - 1.0, WEIGHT: -weight_share}
        held = accumulate(change[kind] for kind, _, _ in self.actions[rank])
        return max(held, default=0.0) / self.shape.chunks

    def check(self) -> None:
        """Raise ``ValueError`` unless every rank does all of its work, each piece once and after what it needs there."""
        every = {
            (chunk, index) for chunk in range(self.shape.chunks) for index in range(self.shape.microbatches)
        }
        for rank, actions in enumerate(self.actions):
            done: dict[int, set[tuple[int, int]]] = {kind: set() for kind in range(4)}
            for kind, chunk, index in actions:
                needs = {FORWARD: None, BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}[kind]
                if (chunk, index) in done[kind] or (needs is not None and (chunk, index) not in done[needs]):
                    raise ValueError(f"rank {rank}: {KINDS[kind]} {chunk}, {index} is twice or too early")
                done[kind].add((chunk, index))
            if (
                done[FORWARD] != every
                or done[BACKWARD] | done[WEIGHT] != every
                or done[INPUT] != done[WEIGHT]
            ):
                raise ValueError(f"rank {rank} leaves work undone")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule: how its order is made, and what it asks of the shape.

    ``make(shape, work)``: the order; ``work`` matters to those that are made for given times. ``chunks``: the only number
    of chunks that it runs, 0 for any; ``problem(shape)``: why it cannot run a shape and what is nearest, else None.
    """

    name: str
    make: Callable[[Shape, Work], Order]
    chunks: int = 1
    problem: Callable[[Shape], str | None] = lambda shape: None


def tuples(actions: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """As :class:`Order` holds them."""
    return tuple(tuple(each) for each in actions)
