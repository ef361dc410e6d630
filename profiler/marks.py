"""The hot path: marks of phases in the training thread, a few appends each.

A :class:`Marker` knows which phase runs, and stamps every change with the host's time and either the thread's CPU
time (host) or a timed event on the current stream (device). Stamping never waits for a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from .phases import END, EXPOSED, INSIDE, OTHER

__all__ = ["EventPool", "Marker"]

#: Of one part. A loop that calls thousands of modules between two steps keeps its time; it loses only detail.
MOST_MARKS = 12_000


class EventPool:
    """Timed events of one device, used again when their times were read: creating one costs more than recording it."""

    def __init__(self, create: Callable[[], Any], capturing: Callable[[], bool]) -> None:
        self._create = create
        self._capturing = capturing
        self._free: deque[Any] = deque()

    def record(self) -> Any:
        """An event, recorded now on the current stream; ``None`` while a graph is captured, where a record is not allowed."""
        if self._capturing():
            return None
        event = self._free.popleft() if self._free else self._create()
        event.record()
        return event

    def give_back(self, event: Any) -> None:
        """Use the event again."""
        self._free.append(event)

    @classmethod
    def of_device(cls, device_type: str) -> EventPool | None:
        """A pool for a device, or ``None`` where its events keep no time."""

        def create() -> Any:
            return torch.Event(device=device_type, enable_timing=True)

        def never() -> bool:
            return False

        try:
            create()
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        return cls(create, torch.cuda.is_current_stream_capturing if device_type == "cuda" else never)


class Marker:
    """Marks of the part that is open. ``marks`` is flat: phase, host time, stamp, phase, …"""

    def __init__(self) -> None:
        self.thread = get_ident()
        self.marks: list[Any] = []
        self.open = False
        self._stamp: Callable[[], Any] = time.thread_time_ns
        self._stack = [OTHER]

    def stamp_with(self, events: EventPool | None) -> None:
        """Stamp with events from the next part on, or with the thread's CPU time."""
        self._stamp = time.thread_time_ns if events is None else events.record

    def begin(self) -> None:
        """Open a part in this thread."""
        self.thread = get_ident()
        self.marks = []
        del self._stack[1:]
        self._stack[0] = OTHER
        self.open = True
        self.mark(OTHER)

    def end(self) -> list[Any]:
        """Close the part; its marks, the last of them END."""
        self.open = False
        marks, self.marks = self.marks, []
        marks += (END, time.perf_counter_ns(), self._stamp())
        return marks

    def mark(self, phase: int) -> None:
        """``phase`` begins now."""
        if len(self.marks) < MOST_MARKS:
            self.marks += (phase, time.perf_counter_ns(), self._stamp())

    def enter(self, phase: int) -> None:
        """``phase`` begins inside the running one, and counts as ``INSIDE`` says."""
        stack = self._stack
        current = stack[-1]
        counts_as = INSIDE[current][phase]
        stack.append(counts_as)
        if counts_as != current and self.open:
            self.mark(counts_as)

    def leave(self) -> None:
        """The phase that was entered last ends."""
        stack = self._stack
        if len(stack) == 1:
            return  # it was entered before the part began
        left = stack.pop()
        if stack[-1] != left and self.open:
            self.mark(stack[-1])

    def base(self, phase: int) -> None:
        """The phase under all entered ones, as an engine that marks its own phases says."""
        before, self._stack[0] = self._stack[0], phase
        if len(self._stack) == 1 and self.open and phase != before:
            self.mark(phase)

    def expose(self) -> None:
        """Backward's own work has ended; what follows until its end is waiting for collectives."""
        if self.open:
            self.mark(EXPOSED)
