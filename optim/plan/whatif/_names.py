"""What a collective or message is called, alike on all ranks that enter it: its group, and the how many-th there it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trine.record.model import MISSING, Rank

__all__ = ["MESSAGES", "Name", "Names"]

#: Between two ranks, which are told apart by who sends to whom.
MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Name:
    """Of a transfer: what :class:`~trine.optim.plan.whatif.graph.Task` calls ``key``, ``group`` and ``channel``."""

    key: str
    group: tuple[int, ...] = ()
    channel: str = ""


class Names:
    """Names of one rank's calls in one step, asked for in the order of their issue.

    Ranks of a group enter its collectives in one order, and messages from one rank to another arrive in the order of their
    issue: so all count alike. Groups of one name that have other members elsewhere, as a mesh's rows have, are told apart by
    their first member. Where calls name no group, all-reduces of another size are another group's.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank.rank
        self._members = {
            group.id: tuple(sorted(group.ranks)) for group in rank.groups if rank.rank in group.ranks
        }
        self._counts: Counter[str] = Counter()

    def next(self, operation: str, group: str | None, peer: int, size: int) -> Name:
        """Of the next call: ``group`` as the record names it, ``size`` in bytes, 0 where unknown."""
        members: tuple[int, ...] = ()
        channel = ""
        if operation in MESSAGES and peer != MISSING and peer >= 0:
            channel = f"{self._rank}>{peer}" if operation == "send" else f"{peer}>{self._rank}"
            name = channel
        elif group:
            members = self._members.get(group, ())
            name = f"{operation} of group {group}" + (f" from {members[0]}" if members else "")
        else:
            name = f"{operation} of {size} bytes" if operation == "all_reduce" and size > 0 else operation
        self._counts[name] += 1
        return Name(f"{name} {self._counts[name]}", members, channel)
