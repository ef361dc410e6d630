"""The rings of all ranks laid beside each other: per group, a row a rank and a column a sequence number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trine.record.model import MISSING, Array

from ._desync_ring import COMPLETED, Ring, Signature

__all__ = ["GroupLine", "Vocabulary", "group_lines"]

#: A cell without an entry: the ring lost it, or the rank did not call.
ABSENT = -1


class Vocabulary:
    """What all ranks called, once each: a call is the operations of one sequence number (several where
    they were coalesced). ``family``, ``elements`` and ``types`` are what must agree, 0 where anything may be."""

    def __init__(self) -> None:
        self.calls: list[tuple[Signature, ...]] = []
        self._codes: dict[tuple[Signature, ...], int] = {}
        self._keys: dict[object, int] = {}
        self.family: list[int] = []
        self.elements: list[int] = []
        self.types: list[int] = []

    def code(self, signatures: Sequence[Signature]) -> int:
        """The place of a call, added when new."""
        parts = tuple(signatures)
        if len(parts) > 1:  # the last entry of a coalesced call only says that it was one
            parts = tuple(part for part in parts if part.family != "coalesced") or parts[:1]
        code = self._codes.get(parts)
        if code is None:
            code = self._codes[parts] = len(self.calls)
            self.calls.append(parts)
            self.family.append(self._key("family", tuple(part.family for part in parts)))
            even = all(part.even and part.elements is not None for part in parts)
            self.elements.append(self._key("elements", tuple(p.elements for p in parts)) if even else 0)
            typed = all(part.types for part in parts)
            self.types.append(self._key("types", tuple(part.types for part in parts)) if typed else 0)
        return code

    def _key(self, *what: object) -> int:
        return self._keys.setdefault(what, len(self._keys) + 1)


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One group. ``ranks`` are the members with a dump, a row each; ``absent`` those without.

    ``call`` holds codes of the vocabulary, ``state`` the entry's, both :data:`ABSENT` where there is none;
    ``enqueued`` and ``completed`` the last sequence number a rank reached, −1 where none, MISSING where not known.
    """

    id: str
    description: str | None
    members: tuple[int, ...]
    stated: bool  # whether a dump says who the members are
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    sequences: Array
    call: Array
    state: Array
    enqueued: Array
    completed: Array

    def column(self, sequence: int) -> int:
        """The column of a sequence number, −1 where no ring holds it."""
        place = int(np.searchsorted(self.sequences, sequence))
        found = place < len(self.sequences) and self.sequences[place] == sequence
        return place if found else -1


def group_lines(
    rings: Mapping[int, Ring], world: int | None, vocabulary: Vocabulary
) -> tuple[GroupLine, ...]:
    """All groups in which a collective was called, those of most members first."""
    gathered = _gathered(rings)
    lines = []
    for (id, stated), places in gathered.items():
        description = next(
            (text for rank, place in places.items() if (text := rings[rank].groups[place].description)), None
        )
        members = stated or _members(id, description, places, rings, world)
        lines.append(_line(id, description, members, bool(stated), places, rings, vocabulary))
    used = [line for line in lines if len(line.sequences) or (line.enqueued > 0).any()]
    return tuple(sorted(used, key=lambda line: (-len(line.members), line.id)))


def _gathered(rings: Mapping[int, Ring]) -> dict[tuple[str, tuple[int, ...]], dict[int, int]]:
    """(id, ranks as stated) → rank → place in its groups. Two groups may share a name where their ranks differ."""
    known: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for ring in rings.values():
        for group in ring.groups:
            if group.ranks:
                known[group.id].add(group.ranks)
    gathered: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for rank, ring in rings.items():
        for place, group in enumerate(ring.groups):
            stated = group.ranks or next((ranks for ranks in sorted(known[group.id]) if rank in ranks), ())
            # A rank's dump describes groups of others too; what it neither entered nor may enter is theirs.
            if not stated or rank in stated or bool((ring.group == place).any()):
                gathered[group.id, stated][rank] = place
    return gathered


def _members(
    id: str, description: str | None, places: Mapping[int, int], rings: Mapping[int, Ring], world: int | None
) -> tuple[int, ...]:
    """Where no dump states them: the world for the default group, else those that called in it."""
    if id == "0" or description == "default_pg":
        return tuple(range(max(world or 0, max(places) + 1)))
    return tuple(
        sorted(
            rank
            for rank, place in places.items()
            if (rings[rank].group == place).any() or rings[rank].status.get(id, (-1, -1, -1))[0] > 0
        )
    )


def _line(
    id: str,
    description: str | None,
    members: tuple[int, ...],
    stated: bool,
    places: Mapping[int, int],
    rings: Mapping[int, Ring],
    vocabulary: Vocabulary,
) -> GroupLine:
    ranks = tuple(rank for rank in members if rank in rings)
    rows = {rank: _own(rings[rank], places.get(rank, -1)) for rank in ranks}
    sequences = np.unique(np.concatenate([rings[rank].sequence[rows[rank]] for rank in ranks] or [_NONE]))
    call = np.full((len(ranks), len(sequences)), ABSENT, dtype=np.int32)
    state = np.full(call.shape, ABSENT, dtype=np.int8)
    enqueued = np.full(len(ranks), MISSING, dtype=np.int64)
    completed = np.full(len(ranks), -1, dtype=np.int64)
    for row, rank in enumerate(ranks):
        ring, own = rings[rank], rows[rank]
        _fill(ring, own, sequences, call[row], state[row], vocabulary)
        status = ring.status.get(id, (-1, -1, -1))
        called = ring.sequence[own]
        done = called[ring.state[own] == COMPLETED]
        completed[row] = max(status[2], int(done.max(initial=-1)))
        if len(called) or status[0] >= 0 or not ring.lost:
            enqueued[row] = max(status[0], int(called.max(initial=-1)))
    absent = tuple(rank for rank in members if rank not in rings)
    return GroupLine(
        id, description, members, stated, ranks, absent, sequences, call, state, enqueued, completed
    )


_NONE = np.empty(0, dtype=np.int64)


def _own(ring: Ring, place: int) -> Array:
    """Rows of the ring's collectives in a group."""
    return np.flatnonzero((ring.group == place) & ~ring.peer & (ring.sequence != MISSING))


def _fill(
    ring: Ring, own: Array, sequences: Array, call: Array, state: Array, vocabulary: Vocabulary
) -> None:
    """One row of the line: a call's state is the least of its parts'."""
    if not len(own):
        return
    columns = np.searchsorted(sequences, ring.sequence[own])
    single = [vocabulary.code((signature,)) for signature in ring.signatures]
    call[columns] = np.array(single, dtype=np.int32)[ring.signature[own]]
    state[columns] = ring.state[own]
    distinct, counts = np.unique(columns, return_counts=True)
    for column in distinct[counts > 1]:
        parts = own[columns == column]
        call[column] = vocabulary.code([ring.signatures[int(place)] for place in ring.signature[parts]])
        state[column] = ring.state[parts].min()
