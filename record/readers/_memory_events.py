"""Events of a memory snapshot as columns: seven numbers each, in place of a dictionary."""

from __future__ import annotations

from array import array
from typing import Any

from ._memory_stacks import Stacks

__all__ = ["ACTIONS", "Events"]

#: Actions by code; the names are those of the model's table.
ACTIONS = (
    "other",
    "alloc",
    "free_requested",
    "free",
    "segment_alloc",
    "segment_free",
    "out_of_memory",
    "snapshot",
    "mark",
)
_CODES = {
    "alloc": 1,
    "free_requested": 2,
    "free_completed": 3,
    "free": 3,
    "segment_alloc": 4,
    "segment_map": 4,
    "segment_free": 5,
    "segment_unmap": 5,
    "oom": 6,
    "snapshot": 7,
    "user_defined": 8,
}
_LARGEST = 1 << 62


class Events:
    """Columns of all devices' events, in the order in which they were added. ``free`` is row → bytes that a failed
    allocation found free on the device."""

    def __init__(self, stacks: Stacks) -> None:
        self.action, self.stack = array("b"), array("i")
        self.address, self.size, self.stream, self.time_us = array("q"), array("q"), array("q"), array("q")
        self.free: dict[int, int] = {}
        self._stacks = stacks

    def __len__(self) -> int:
        return len(self.action)

    def add(self, row: dict[Any, Any], *, lasting: bool = True) -> int:
        """The number of an event as the snapshot holds it. What is no number of 62 bits counts as 0, a time as -1.

        ``lasting`` is whether lists of frames live as long as this object.
        """
        get = row.get
        action = get("action")
        self.action.append(_CODES.get(action, 0) if type(action) is str else 0)
        for column, key, default in (
            (self.address, "addr", 0),
            (self.size, "size", 0),
            (self.stream, "stream", 0),
            (self.time_us, "time_us", -1),
        ):
            value = get(key, default)
            if type(value) is not int or not -_LARGEST < value < _LARGEST:
                value = int(value) if type(value) is float and abs(value) < _LARGEST else default
            column.append(value)
        self.stack.append(self._stacks.number(get("frames"), lasting=lasting))
        number = len(self.action) - 1
        if self.action[number] == _CODES["oom"]:
            free = get("device_free")
            self.free[number] = free if type(free) is int and 0 <= free < _LARGEST else -1
        return number
