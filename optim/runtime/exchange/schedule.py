"""An all-reduce as a schedule: which rank sends which part of the tensor to which rank, step by step. No torch.

A flat tensor is cut into ``chunks`` nearly equal chunks. Every rank has its own :class:`Plan`; in a step it sends and
receives at once, and a step's messages are matched by the peers' steps of the same number, so that every step can
complete when all earlier ones have: no deadlock, on backends that queue messages and on those that group them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Message", "Plan", "Step", "bounds", "merged", "part_bounds"]


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """Chunks ``first`` up to ``last`` (excluded), to or from ``peer``."""

    peer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one step. No chunk is in two of its parts, so the parts may run at once."""

    number: int
    sends: tuple[Message, ...] = ()
    adds: tuple[Message, ...] = ()  # received and added to what is here
    copies: tuple[Message, ...] = ()  # received in place of what is here: a sum that is complete


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's steps, in order; steps in which it has nothing to do are left out."""

    chunks: int
    steps: tuple[Step, ...]

    def sent_chunks(self) -> int:
        """How many chunks this rank sends in all."""
        return sum(m.last - m.first for step in self.steps for m in step.sends)


def bounds(elements: int, chunks: int, chunk: int) -> int:
    """Where ``chunk`` of ``chunks`` begins in a tensor of ``elements``; chunks differ by one element at most."""
    return chunk * elements // chunks


def part_bounds(part: int, chunks_in_part: int, first: int = 0) -> tuple[int, int]:
    """Chunks (first, last) of a part that holds ``chunks_in_part`` of them."""
    return first + part * chunks_in_part, first + (part + 1) * chunks_in_part


def merged(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps of one rank in order, those of one number made one; messages of a pair in the order of their chunks."""
    found: dict[int, Step] = {}
    for step in steps:
        known = found.get(step.number, Step(step.number))
        found[step.number] = Step(
            step.number,
            tuple(sorted(known.sends + step.sends)),
            tuple(sorted(known.adds + step.adds)),
            tuple(sorted(known.copies + step.copies)),
        )
    return tuple(found[number] for number in sorted(found))
