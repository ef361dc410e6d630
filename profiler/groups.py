"""Process groups of this process: names, ranks, and which threads run which gloo group's collectives.

A collective on gloo does not say its group. Each gloo group runs its collectives on threads of its own, made
with the group and never shared, so the thread tells the group. Threads are given to groups in the order
in which both were made, only while the counts agree, and the flight recorder checks the result
(:mod:`trine.profiler.observer`): where it is not certain the answer is ``None``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trine.record.model import Group

__all__ = ["GlooThreads", "global_rank", "group_name", "live_groups", "process_groups"]

_WORKER = "pt_gloo_runloop"


def live_groups() -> list[tuple[str, Any]]:
    """(name, group) of every process group of this process that is alive, in the order they were made."""
    world = _world()
    if world is None:
        return []
    return [(str(world.pg_names.get(group, "")), group) for group in list(world.pg_map)]


#: Every group that was seen alive, by name: scripts destroy theirs before the record is closed.
_seen: dict[str, Group] = {}


def process_groups() -> tuple[Group, ...]:
    """Groups that are or were seen alive; ``ranks`` are global ranks, in the order of ranks in the group."""
    world = _world()
    for name, group in live_groups():
        ranks = dict(world.pg_group_ranks.get(group, {}))
        description = getattr(group, "group_desc", None)
        told = description if description and description != "undefined" else None
        _seen[name] = Group(name, name, told, tuple(sorted(ranks, key=lambda rank: ranks[rank])))
    return tuple(_seen.values())


def group_name(group: Any) -> str | None:
    """The name of a process group; ``None`` for one made by hand, which raises when it is asked."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return None


def global_rank(group: Any, rank: int) -> int | None:
    """The global rank of ``rank`` of ``group``."""
    world = _world()
    ranks = {} if world is None else world.pg_group_ranks.get(group, {})
    return next((of_world for of_world, of_group in ranks.items() if of_group == rank), None)


def _world() -> Any:
    try:
        from torch.distributed import distributed_c10d
    except ImportError:  # torch was built without distributed
        return None
    return getattr(distributed_c10d, "_world", None)


class GlooThreads:
    """Kernel thread id → name of the process group whose collectives run on it."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def refresh(self) -> None:
        """Look for new groups and threads. Cheap: one listing of ``/proc/self/task``."""
        threads = _worker_threads()
        groups = [(name, _thread_count(group)) for name, group in live_groups()]
        groups = [(name, count) for name, count in groups if count]
        alive = {thread: self._names[thread] for thread in threads if thread in self._names}
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
        self._names = alive

    def group(self, thread: int) -> str | None:
        """The group of a thread; ``None`` where it cannot be said."""
        return self._names.get(thread)


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
