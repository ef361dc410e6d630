"""Which threads run which gloo group's collectives: a collective on gloo does not say its group.

Each gloo group runs its collectives on threads of its own, made with the group and never shared, so the thread tells
the group. Threads are given to groups in the order in which both were made, only while the counts agree: a group that
was destroyed keeps its threads for as long as anything refers to it (an engine that waits for the garbage collector).
Where the counts disagree, the flight recorder tells for which group each collective that a thread ran was issued. It
checks the result as well (:mod:`trine.profiler.observer`): where it is not certain the answer is ``None``. A thread
bears its name once it has run, so counts can agree by accident on a busy machine: threads that were given to a group
and never ran a collective yield to those that the flight recorder tells.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .groups import live_groups, process_groups

__all__ = ["Collective", "GlooThreads"]

#: Operation and bytes of the input, ``MISSING`` where those are not told alike by all who tell them.
Collective = tuple[str | None, int]

_WORKER = "pt_gloo_runloop"
#: Kinds of collectives that are remembered: objects of any size make one each.
_MOST_KINDS = 4096
#: What a thread ran may have been issued before the reading before: a reading or two may not tell its group.
_READINGS_AT_ONCE = 3


class GlooThreads:
    """Kernel thread id → name of the process group whose collectives run on it."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        #: Threads of groups that counting could not tell, those of one group together.
        self._teams: list[tuple[int, ...]] = []
        #: The groups for which each kind of collective was issued.
        self._issued: dict[Collective, set[str]] = {}
        self._asked: Counter[int] = Counter()
        self._ran: set[int] = set()
        #: Threads that there were at the last look.
        self.alive: frozenset[int] = frozenset()

    @property
    def can_learn(self) -> bool:
        """Whether there are threads that :meth:`learn` could give to a group."""
        return bool(self._teams)

    def refresh(self) -> None:
        """Look for new groups and threads. Cheap: one listing of ``/proc/self/task``."""
        threads = _worker_threads()
        # The kernel gives a thread's number to another one day.
        self.alive = frozenset(threads)
        self._ran &= self.alive
        self._asked = Counter({thread: self._asked[thread] for thread in threads if self._asked[thread]})
        groups = [(name, _thread_count(group)) for name, group in live_groups()]
        groups = [(name, count) for name, count in groups if count]
        alive = {thread: self._names[thread] for thread in threads if thread in self._names}
        self._teams = []
        if len(groups) == 1:
            # With one group there is nothing to tell apart, whatever the counts.
            self._names = dict.fromkeys(threads, groups[0][0])
            return
        known = set(alive.values())
        fresh_groups = [(name, count) for name, count in groups if name not in known]
        fresh_threads = [thread for thread in threads if thread not in alive]
        if sum(count for _, count in fresh_groups) == len(fresh_threads):
            left = iter(fresh_threads)
            for name, count in fresh_groups:
                alive.update((next(left), name) for _ in range(count))
        else:
            self._teams = _teams(fresh_threads, {count for _, count in groups})
        self._names = alive

    def ran(self, threads: Iterable[int]) -> None:
        """These ran collectives: whatever group they were given to, no other threads take it from them."""
        self._ran.update(threads)

    def are_new(self, threads: set[int]) -> bool:
        """Whether one of these, whose groups are asked for, has been asked for seldom: worth a reading at once."""
        new = any(self._asked[thread] < _READINGS_AT_ONCE for thread in threads)
        self._asked.update(threads)
        return new

    def remember(self, issued: Iterable[tuple[Collective, str]]) -> None:
        """Collectives with their groups, as the flight recorder tells them."""
        for collective, group in issued:
            if collective in self._issued or len(self._issued) < _MOST_KINDS:
                self._issued.setdefault(collective, set()).add(group)

    def learn(self, ran: Iterable[tuple[int, Collective]]) -> None:
        """Give threads that counting could not tell to groups, by the collectives that each ran.

        Of a thread's possible groups those remain for which all that it ran was issued. Threads that ran nothing go with
        those that were made beside them. What stays ambiguous stays unknown.
        """
        possible: dict[int, set[str]] = {}
        for thread, collective in ran:
            groups = self._issued.get(collective)
            if groups is not None:  # else it was issued before the first reading
                possible[thread] = possible.get(thread, groups) & groups
        told: dict[str, list[tuple[int, ...]]] = {}
        for team in self._teams:
            names = [possible[thread] for thread in team if thread in possible]
            left = set.intersection(*names) if names else set()
            if len(left) == 1:
                told.setdefault(left.pop(), []).append(team)
        taken = {name for thread, name in self._names.items() if thread in self._ran}
        free = {group.id for group in process_groups()} - taken
        for name, teams in told.items():
            if name in free and len(teams) == 1:
                counted = {thread: other for thread, other in self._names.items() if other != name}
                self._names = counted | dict.fromkeys(teams[0], name)

    def group(self, thread: int) -> str | None:
        """The group of a thread; ``None`` where it cannot be said."""
        return self._names.get(thread)

    def of_group(self, name: str) -> list[int]:
        """The threads that are given to a group."""
        return [thread for thread, of in self._names.items() if of == name]


def _teams(threads: Sequence[int], counts: set[int]) -> list[tuple[int, ...]]:
    """Threads in the order in which they were made, cut into groups; empty where groups have unequally many."""
    size = next(iter(counts)) if len(counts) == 1 else 0
    if not size or len(threads) % size:
        return []
    return [tuple(threads[first : first + size]) for first in range(0, len(threads), size)]


def _worker_threads() -> list[int]:
    """Kernel ids of gloo's worker threads, oldest first."""
    found = []
    for entry in os.listdir("/proc/self/task"):  # noqa: PTH208 - names, not paths
        folder = Path("/proc/self/task") / entry
        try:
            if not folder.joinpath("comm").read_text().startswith(_WORKER):
                continue
            # The 22nd field is the start; the second is a name in brackets that may hold spaces.
            started = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[19])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
        found.append((started, int(entry)))
    return [thread for _, thread in sorted(found)]


def _thread_count(group: Any) -> int:
    """How many threads a group's gloo backend has; 0 where it has no gloo backend."""
    import torch

    try:
        backend = group._get_backend(torch.device("cpu"))
        options = backend.options
        return int(options._threads) if type(options).__module__.endswith("_distributed_c10d") else 0
    except (RuntimeError, AttributeError, TypeError):
        return 0
