"""Process groups of this process: names and ranks."""

from __future__ import annotations

from typing import Any

from trine.record.model import Group

__all__ = ["global_rank", "group_name", "live_groups", "process_groups"]


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
