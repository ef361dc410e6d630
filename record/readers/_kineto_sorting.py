"""A chunk's events by what becomes of them, and where in the file one recording may end and the next begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._kineto_categories import IGNORED, MEMORY, RECORDING_END, SILENT, action_of
from ._kineto_events import Event

__all__ = ["SortedEvents"]

Array = npt.NDArray[Any]
Append = Callable[[Event], None]


class SortedEvents:
    """Events by action (``groups``), of unknown categories, of categories left out, and marks to be paired.

    Kineto closes every recording with one span of category ``Trace`` and names its processes in one place, before
    the events or after them; in a file that was put together from several, :meth:`sections` tells them apart.
    """

    __slots__ = (
        "_ends",
        "_memory_ends",
        "categories",
        "closed",
        "count",
        "groups",
        "ignored",
        "labels",
        "marks",
        "unknown",
    )

    def __init__(self, events: Sequence[Event]) -> None:
        self.groups: dict[int, list[Event]] = {}
        self.unknown: dict[str, list[Event]] = {}
        self.ignored: dict[str, list[Event]] = {}
        self.closed = 0
        self.labels: list[Event] = []
        self._ends: list[dict[int, int]] = []
        others: list[Event] = []
        others_at_ends: list[int] = []

        def end(event: Event) -> None:
            self.closed += event.ph == "X"
            ends = {action: len(group) for action, group in self.groups.items()}
            if not self._ends or ends != self._ends[-1] or len(others) != others_at_ends[-1]:
                self._ends.append(ends)
                others_at_ends.append(len(others))

        routes = _Routes(self.groups, self.unknown, self.ignored, end)
        for event in events:
            if event.ph == "X":
                try:
                    routes[event.cat](event)
                except TypeError:  # a list or an object for a category
                    routes[str(event.cat)](event)
            elif event.ph == "M":
                if event.name in _LABELS:
                    self.labels.append(event)
                    end(event)
            else:
                others.append(event)
        self.categories = {category for category in routes if isinstance(category, str)}
        speaking = [event for event in others if event.ph not in SILENT]
        self.marks = [event for event in speaking if event.ph in ("B", "E")]
        memory = [event for event in speaking if _is_memory(event)]
        if memory:
            self.groups[MEMORY] = memory
        self._memory_ends = [sum(map(_is_memory, others[:position])) for position in others_at_ends]
        self.count = len(events) - sum(event.ph is None for event in speaking)

    @property
    def breaks(self) -> int:
        """How often a section of the file ends among these events."""
        return len(self._ends)

    def sections(self, action: int) -> Array:
        """Of each event of a group the number of sections that ended before it, shape ``(n,)``."""
        group = self.groups[action]
        found = np.zeros(len(group), np.int32)
        for position, ends in enumerate(self._ends):
            before = self._memory_ends[position] if action == MEMORY else ends.get(action, 0)
            found[before:] += 1
        return found


_LABELS = ("process_name", "process_labels")


def _is_memory(event: Event) -> bool:
    return event.name == "[memory]" and event.ph in ("i", "I")


class _Routes(dict[Any, Append]):
    """Category as written → where to put an event of it."""

    def __init__(
        self,
        groups: dict[int, list[Event]],
        unknown: dict[str, list[Event]],
        ignored: dict[str, list[Event]],
        end: Append,
    ) -> None:
        super().__init__()
        self._groups, self._unknown, self._ignored, self._end = groups, unknown, ignored, end

    def __missing__(self, category: Any) -> Append:
        action = action_of(category)
        if action is None:
            label = "(none)" if category is None else str(category)[:40]
            append = self._unknown.setdefault(label, []).append
        elif action == IGNORED:
            append = self._ignored.setdefault(str(category)[:40], []).append
        elif action == RECORDING_END:
            append = self._end
        else:
            append = self._groups.setdefault(action, []).append
        self[category] = append
        return append
