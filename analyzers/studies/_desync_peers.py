"""Sends and receives that have no counterpart, or one of another size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trine.record.model import Array

from ._desync_lines import GroupLine
from ._desync_ring import COMPLETED, Ring, numel

__all__ = ["Exchange", "exchanges"]

#: ``send 3->0`` and ``recv 0<-3``: the own rank in the group first.
_PAIR = re.compile(r"^(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


@dataclass(slots=True)
class Exchange:
    """All messages of one pair in one direction. ``sends`` are rows of the sender's ring, ``receives`` of the
    receiver's; ``sender`` and ``receiver`` are global ranks."""

    group: str
    description: str | None
    sender: int
    receiver: int
    sends: list[int] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)

    def unmatched(self, rings: Mapping[int, Ring]) -> tuple[list[int], list[int]]:
        """Sends and receives that are pending and have no counterpart.

        Messages of a pair pair up in order. From the beginning where both rings are whole, else pending
        ones with pending ones: what is completed had its counterpart.
        """
        sends = _pending(rings.get(self.sender), self.sends)
        receives = _pending(rings.get(self.receiver), self.receives)
        if self.sender not in rings or self.receiver not in rings:
            return sends, receives
        if not rings[self.sender].lost and not rings[self.receiver].lost:
            extra_sends = set(self.sends[len(self.receives) :])
            extra_receives = set(self.receives[len(self.sends) :])
            return [r for r in sends if r in extra_sends], [r for r in receives if r in extra_receives]
        return sends[len(receives) :], receives[len(sends) :]

    def uneven(self, rings: Mapping[int, Ring]) -> tuple[int, int] | None:
        """The first pending send whose receive has another size: their rows."""
        if self.sender not in rings or self.receiver not in rings:
            return None
        sender, receiver = rings[self.sender], rings[self.receiver]
        if sender.lost or receiver.lost:
            pairs = zip(_pending(sender, self.sends), _pending(receiver, self.receives), strict=False)
        else:
            pairs = zip(self.sends, self.receives, strict=False)
        for send, receive in pairs:
            given, taken = _elements(sender, send), _elements(receiver, receive)
            done = sender.state[send] == COMPLETED and receiver.state[receive] == COMPLETED
            if given is not None and taken is not None and given != taken and not done:
                return send, receive
        return None


def _pending(ring: Ring | None, rows: Sequence[int]) -> list[int]:
    return [] if ring is None else [row for row in rows if ring.state[row] != COMPLETED]


def _elements(ring: Ring, row: int) -> int | None:
    signature = ring.signatures[int(ring.signature[row])]
    return signature.elements if signature.elements is not None else numel(signature.out_shapes)


def exchanges(rings: Mapping[int, Ring], lines: Sequence[GroupLine]) -> tuple[Exchange, ...]:
    """Every pair that exchanged something, in the order of ranks."""
    members = {(line.id, rank): line.members for line in lines for rank in line.members}
    found: dict[tuple[str, int, int], Exchange] = {}
    for rank, ring in rings.items():
        for row, kind, own, other in _messages(ring):
            group = ring.groups[int(ring.group[row])]
            ranks = group.ranks or members.get((group.id, rank), ())
            # Numbers are places in the group; where it is not known whose, they are taken as global.
            known = len(ranks) > max(own, other) and ranks[own] == rank
            peer = ranks[other] if known else other
            sender, receiver = (rank, peer) if kind == "send" else (peer, rank)
            exchange = found.setdefault(
                (group.id, sender, receiver), Exchange(group.id, group.description, sender, receiver)
            )
            (exchange.sends if kind == "send" else exchange.receives).append(row)
    return tuple(found[key] for key in sorted(found))


def _messages(ring: Ring) -> Iterator[tuple[int, str, int, int]]:
    """(row, send or recv, own place, peer's place) of point-to-point entries, in the program's order."""
    parsed: dict[int, tuple[str, int, int]] = {}
    for place, signature in enumerate(ring.signatures):
        match = _PAIR.match(signature.operation)
        if match:
            parsed[place] = (match[1], int(match[2]), int(match[3]))
    if not parsed:
        return
    rows: Array = np.flatnonzero(np.isin(ring.signature, list(parsed)))
    for row in rows.tolist():
        yield (row, *parsed[int(ring.signature[row])])
