"""A discrete-event engine: tasks on streams of ranks, what they wait for, and how they slow each other down.

A task occupies one or several streams (a collective occupies one of each member) and starts when the streams' earlier tasks
and everything that it waits for have ended. Streams are first in, first out, as those of a device are. Where computing and
communication of a rank run at once, each may be slowed (they share the memory and the multiprocessors): then tasks progress
at rates that change whenever a neighbour starts or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["COMMUNICATION", "COMPUTE", "MARK", "NO_CONTENTION", "Contention", "Program"]

#: What a task does to its ranks: compute, communicate so that both feel it, or nothing (messages, waits).
COMPUTE, COMMUNICATION, MARK = range(3)

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Contention:
    """How much longer work takes while the other kind runs on its rank: 0.2 is a fifth longer."""

    compute: float = 0.0
    communication: float = 0.0

    def __bool__(self) -> bool:
        return self.compute > 0 or self.communication > 0


NO_CONTENTION = Contention()


@dataclass(slots=True)
class Program:
    """Tasks in columns; :meth:`add` gives a task's number."""

    seconds: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(
        self,
        kind: int,
        seconds: float,
        streams: Sequence[tuple[int, int]],
        after: Iterable[int] = (),
    ) -> int:
        """A task on ``streams``, each (rank, stream); ``after``: tasks that must have ended."""
        task = len(self.seconds)
        self.seconds.append(seconds)
        self.kinds.append(kind)
        self.ranks.append(tuple([rank for rank, _ in streams]))
        self.followers.append([])
        self.awaited.append(0)
        for stream in streams:
            last = self._ends.get(stream)
            if last is not None:
                self.wait(task, last)
            self._ends[stream] = task
        for other in after:
            self.wait(task, other)
        return task

    def wait(self, task: int, other: int) -> None:
        """``task`` may not start before ``other`` has ended."""
        self.followers[other].append(task)
        self.awaited[task] += 1

    def run(self, contention: Contention = NO_CONTENTION) -> tuple[Times, Times]:
        """When each task starts and ends. Raises ``RuntimeError`` where tasks wait for each other."""
        start, end, done = self._slowed(contention) if contention else self._free()
        if done < len(self.seconds):
            raise RuntimeError(f"{len(self.seconds) - done} tasks wait for each other and never start")
        return np.array(start), np.array(end)

    def _free(self) -> tuple[list[float], list[float], int]:
        """Without contention every task takes what it takes: the longest way through the graph."""
        start, end = [0.0] * len(self.seconds), [0.0] * len(self.seconds)
        awaited = list(self.awaited)
        ready = [task for task, count in enumerate(awaited) if not count]
        done = 0
        while ready:
            task = ready.pop()
            done += 1
            ended = end[task] = start[task] + self.seconds[task]
            for other in self.followers[task]:
                if start[other] < ended:  # noqa: PLR1730 - max() here would cost half of the engine's speed
                    start[other] = ended
                awaited[other] -= 1
                if not awaited[other]:
                    ready.append(other)
        return start, end, done

    def _slowed(self, contention: Contention) -> tuple[list[float], list[float], int]:
        return _Slowed(self, contention).run()


class _Slowed:
    """Events in the order of time; a task's remaining work is brought up to date whenever its rate changes."""

    def __init__(self, program: Program, contention: Contention) -> None:
        self.program = program
        self.slower = {COMPUTE: 1 + contention.compute, COMMUNICATION: 1 + contention.communication}
        count = len(program.seconds)
        self.start, self.end = [0.0] * count, [0.0] * count
        self.left = list(program.seconds)
        self.rate, self.since, self.version = [1.0] * count, [0.0] * count, [0] * count
        self.events: list[tuple[float, int, int]] = []
        #: rank → what runs there, by kind
        self.running: dict[tuple[int, int], set[int]] = {}

    def run(self) -> tuple[list[float], list[float], int]:
        program = self.program
        awaited = list(program.awaited)
        for task, count in enumerate(awaited):
            if not count:
                self._begin(task, 0.0)
        done = 0
        while self.events:
            now, task, version = heapq.heappop(self.events)
            if version != self.version[task]:
                continue
            done += 1
            self.end[task] = now
            self._leave(task, now)
            for other in program.followers[task]:
                awaited[other] -= 1
                if not awaited[other]:
                    self._begin(other, now)
        return self.start, self.end, done

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = self.since[task] = now
        kind = self.program.kinds[task]
        if kind != MARK and self.left[task] > 0:
            for rank in self.program.ranks[task]:
                self.running.setdefault((rank, kind), set()).add(task)
            self._weigh(task, now)
            self._weigh_others(task, now)
        else:
            heapq.heappush(self.events, (now + self.left[task], task, self.version[task]))

    def _leave(self, task: int, now: float) -> None:
        kind = self.program.kinds[task]
        if kind == MARK or self.program.seconds[task] <= 0:
            return
        for rank in self.program.ranks[task]:
            self.running[rank, kind].discard(task)
        self.version[task] += 1
        self._weigh_others(task, now)

    def _weigh_others(self, task: int, now: float) -> None:
        """What of the other kind runs on the same ranks has a new neighbour, or one less."""
        other = COMPUTE if self.program.kinds[task] == COMMUNICATION else COMMUNICATION
        for rank in self.program.ranks[task]:
            for each in list(self.running.get((rank, other), ())):
                self._weigh(each, now)

    def _weigh(self, task: int, now: float) -> None:
        """Its rate by what runs beside it now; a collective goes at the pace of its slowest member."""
        kind = self.program.kinds[task]
        other = COMPUTE if kind == COMMUNICATION else COMMUNICATION
        beside = any(self.running.get((rank, other)) for rank in self.program.ranks[task])
        self.left[task] = max(self.left[task] - (now - self.since[task]) * self.rate[task], 0.0)
        self.since[task] = now
        self.rate[task] = 1 / self.slower[kind] if beside else 1.0
        self.version[task] += 1
        heapq.heappush(self.events, (now + self.left[task] / self.rate[task], task, self.version[task]))
