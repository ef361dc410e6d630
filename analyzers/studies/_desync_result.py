"""What the study of a hang says: culprits with their evidence, and where each group stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trine.analyzers._tabular import Columns, Tabular

from ._desync_ring import Ring, Signature

__all__ = ["MISMATCHES", "Call", "Culprit", "Desync", "GroupStanding", "Kind", "call_of"]

Kind = Literal[
    "operation",  # one sequence number, different operations
    "elements",  # the same operation with buffers of different sizes
    "types",  # the same operation with different dtypes
    "missing",  # others wait in a collective that the rank never entered
    "no_dump",  # others wait, all that left a dump are in: those without one are not known to be
    "deadlock",  # ranks wait for each other in different calls
    "peer_missing",  # a send without its receive, or the other way round
    "peer_elements",  # a send and its receive of different sizes
    "not_started",  # all enqueued it, some devices have not begun it
    "in_flight",  # all entered and none has left
]
MISMATCHES: tuple[Kind, ...] = ("operation", "elements", "types", "peer_elements")

#: Frames of a stack that the result carries.
MOST_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A rank's part in a call; ``state`` is ``not called`` where it never came, and ``stack`` then that of its last call."""

    rank: int
    group: str
    sequence: int | None
    operation: str | None
    in_shapes: str | None
    out_shapes: str | None
    elements: int | None
    types: str | None
    state: str
    stack: tuple[str, ...]  # the user's own frames first
    parts: int = 1  # operations that were coalesced into it


@dataclass(frozen=True, slots=True)
class Culprit:
    """What went apart. ``ranks`` are to blame (all that took part where that cannot be told), ``waiting`` those
    that wait for them. ``calls``: the culprits' and some of the others'; for a deadlock, one a link of the circle.

    ``hint``: ``extra_call``, ``skipped_call``, ``swapped``, ``history`` (told from what the ranks did before),
    ``others_unknown`` (the group may have ranks that left no dump), ``members_unknown`` (all left one, and none says
    who is in the group), ``dumps_apart`` (the group's other ranks left theirs before they came to it).
    ``completed``: it went through nevertheless. ``waited_ns``: at least so long by the dumps' own times.
    ``last_calls``: of ranks that are missing, the last thing that they enqueued; with ``members_unknown``, where ranks
    that did not enter the call stand.
    """

    kind: Kind
    ranks: tuple[int, ...]
    group: str
    description: str | None
    sequence: int | None
    operation: str | None  # what the others called
    waiting: tuple[int, ...]
    calls: tuple[Call, ...]
    certainty: Literal["high", "medium", "low"]
    hint: str | None = None
    completed: bool = False
    waited_ns: int | None = None
    last_calls: tuple[Call, ...] = ()
    peers: tuple[int, int] | None = None  # sender, receiver


@dataclass(frozen=True, slots=True)
class GroupStanding(Tabular):
    """Where a group stands: the least and the most that its ranks enqueued and completed; −1 where none."""

    COLUMNS: ClassVar[Columns] = {
        "enqueued": ("enqueued_least", "enqueued_most"),
        "completed": ("completed_least", "completed_most"),
    }

    group: str
    description: str | None
    ranks: tuple[int, ...]
    stated: bool
    without_dump: tuple[int, ...]
    enqueued: tuple[int, int]
    completed: tuple[int, int]
    compared: int  # sequence numbers that two ranks or more hold
    pending: tuple[int, ...]  # ranks in a call that is not completed


@dataclass(frozen=True, slots=True)
class Desync(Tabular):
    """The whole answer. ``stuck`` where a culprit holds others up; ``culprits`` the weightiest first."""

    ranks: tuple[int, ...]
    without_dump: tuple[int, ...]
    groups: tuple[GroupStanding, ...]
    culprits: tuple[Culprit, ...]
    stuck: bool
    calls: int  # entries of all ranks
    compared: int  # sequence numbers that two ranks or more hold, over all groups
    backends: tuple[str, ...]
    stacks: bool
    older_dumps: tuple[int, ...]  # ranks whose dump was taken before the others'


_STATES = ("scheduled", "started", "completed")


def call_of(ring: Ring, row: int, state: str | None = None) -> Call:
    """One entry of a ring in words."""
    signature: Signature = ring.signatures[int(ring.signature[row])]
    stack = int(ring.stack[row])
    sequence = int(ring.sequence[row])
    return Call(
        rank=ring.rank,
        group=ring.groups[int(ring.group[row])].id,
        sequence=sequence if sequence >= 0 and not ring.peer[row] else None,
        operation=signature.operation,
        in_shapes=signature.in_shapes,
        out_shapes=signature.out_shapes,
        elements=signature.elements,
        types=signature.types,
        state=state or _STATES[int(ring.state[row])],
        stack=tuple(ring.stacks[stack].split(";")[:MOST_FRAMES]) if stack >= 0 else (),
    )
