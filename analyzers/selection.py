"""Which steps an analysis looks at, and which rows of a rank's tables belong to them.

``complete`` (the default) leaves out a foreign trace's last step where there are two or more: the
profiler stopped before its device work had ended. A native record ends its steps itself, so all of
them are complete. ``all`` takes every event, also those that belong to no step. ``3:8`` are step
numbers, the end excluded.

A device event belongs to the step in which it was *launched*: on real runs devices lag their hosts
by more than a step. Events of no length are ignored. Where no device event at all has a launch record, none
belongs to a step, and ``complete`` takes every event too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.errors import UsageError
from trine.record.model import MISSING, Rank, Table

__all__ = ["Selected", "Selection", "parse_selection", "select", "selected_steps"]

Array = npt.NDArray[Any]

#: Formats that end their steps themselves: a record, and times that were written at the end of each iteration.
_WHOLE_STEPS = frozenset({"trine", "pipeline_schedule"})

_RANGE = re.compile(r"(\d*)\s*:\s*(\d*)")


@dataclass(frozen=True, slots=True)
class Selection:
    """A parsed ``--steps``: ``complete``, ``all``, or step numbers from ``start`` up to ``stop``."""

    text: str
    start: int | None = None
    stop: int | None = None

    @property
    def is_range(self) -> bool:
        """Whether step numbers were given."""
        return self.text not in ("complete", "all")


@dataclass(frozen=True, slots=True)
class Selected:
    """A selection applied to one rank.

    ``steps`` are the selected step numbers, ascending; with ``everything``, rows that belong to no
    step count too. ``start_ns`` and ``end_ns`` span the selected steps on the host, and are
    ``None`` where there are none.
    """

    steps: tuple[int, ...]
    everything: bool
    start_ns: int | None
    end_ns: int | None

    def holds(self, step: Array) -> Array:
        """Mask of the rows whose ``step`` (int64, :data:`MISSING` for none) is selected."""
        if self.everything:
            return np.ones(len(step), dtype=bool)
        return np.isin(step, np.array(self.steps, dtype=np.int64))


def parse_selection(text: str) -> Selection:
    """Parse ``complete``, ``all`` or ``START:STOP`` (either may be left out, not both).

    Raises ``UsageError`` on anything else, and on a range that holds no number.
    """
    plain = text.strip()
    if plain in ("complete", "all"):
        return Selection(plain)
    match = _RANGE.fullmatch(plain)
    if match is None or plain == ":":
        hint = f"did you mean {plain}:{int(plain) + 1}?" if plain.isdigit() else "for example 3:8"
        raise UsageError(f"--steps {text!r} is neither 'complete', 'all' nor START:STOP; {hint}")
    start, stop = (int(part) if part else None for part in match.groups())
    if start is not None and stop is not None and stop <= start:
        raise UsageError(f"--steps {text!r} holds no step: the end is excluded, so use {start}:{start + 1}")
    return Selection(plain, start, stop)


def select(rank: Rank, selection: Selection, *, foreign: bool | None = None) -> Selected:
    """Apply a selection to a rank. ``foreign`` defaults to whether the rank's format is one that may end within a step.

    Raises ``UsageError`` when step numbers were given and the rank has none of them.
    """
    if foreign is None:
        foreign = rank.format not in _WHOLE_STEPS
    numbers = _numbers(rank.steps)
    if selection.is_range:
        chosen = [
            number
            for number in numbers
            if (selection.start is None or number >= selection.start)
            and (selection.stop is None or number < selection.stop)
        ]
        if not chosen:
            raise UsageError(f"--steps {selection.text} names no step of rank {rank.rank}; {_held(numbers)}")
        return _selected(rank.steps, chosen, everything=False)
    if (
        selection.text == "all"
        or (foreign and len(numbers) < 2)
        or not numbers
        or _launched_nowhere(rank.device)
    ):
        return _selected(rank.steps, numbers, everything=True)
    return _selected(rank.steps, numbers[:-1] if foreign else numbers, everything=False)


def _launched_nowhere(device: Table | None) -> bool:
    """Whether there is device work and none of it could be given to a step."""
    return device is not None and len(device) > 0 and bool((device["step"] == MISSING).all())


def _numbers(steps: Table | None) -> list[int]:
    if steps is None:
        return []
    return [int(number) for number in np.unique(steps["index"]) if number != MISSING]


def _held(numbers: list[int]) -> str:
    if not numbers:
        return "it marks no steps, so use --steps all"
    return f"it holds steps {numbers[0]} to {numbers[-1]}"


def selected_steps(steps: Table, chosen: list[int]) -> Selected:
    """Those step numbers of a table of steps, and nothing that belongs to no step."""
    return _selected(steps, chosen, everything=False)


def _selected(steps: Table | None, chosen: list[int], *, everything: bool) -> Selected:
    if steps is None or not chosen:
        return Selected((), everything, None, None)
    rows = np.isin(steps["index"], chosen)
    start, end = steps["start_ns"][rows], steps["end_ns"][rows]
    start, end = start[start != MISSING], end[end != MISSING]
    return Selected(
        tuple(chosen),
        everything,
        int(start.min()) if len(start) else None,
        int(end.max()) if len(end) else None,
    )
