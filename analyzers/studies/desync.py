"""Hang and desync: from dumps of several ranks' flight recorders, which rank left the others' way, and where.

Entries are aligned by their sequence number within their group, so that rings which lost different old
entries still fit. Three questions, in this order: did ranks call different things under one number
(:mod:`._desync_compare`), is a rank missing from what others wait in, or do ranks wait for each other
(:mod:`._desync_waits`), and do sends have their receives (:mod:`._desync_peers`).

What PyTorch's recorder means by its fields: torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from trine.record.model import MISSING

from ._desync_compare import mismatch_of
from ._desync_lines import ABSENT, GroupLine, Vocabulary, group_lines
from ._desync_peers import Exchange, exchanges
from ._desync_result import MISMATCHES, Call, Culprit, Desync, GroupStanding, call_of
from ._desync_ring import COMPLETED, Ring, ring_of
from ._desync_waits import HUNG_NS, blocked, older_dumps, waits
from ._scope import Scope, Whole

__all__ = ["KEY", "Call", "Culprit", "Desync", "GroupStanding", "join", "reduce", "to_json"]

KEY = "desync"

#: Calls in flight that are named: a job at work has one a group.
MOST_IN_FLIGHT = 3

#: The order in which causes are told: what differs explains what waits.
_WEIGHT = {
    kind: place
    for place, kind in enumerate(
        (*MISMATCHES, "deadlock", "missing", "peer_missing", "no_dump", "not_started", "in_flight")
    )
}


def reduce(scope: Scope) -> Ring | None:
    """The rank's ring, at most 2,000 entries of it."""
    return ring_of(scope.rank)


def join(parts: Mapping[int, Ring], whole: Whole) -> Desync | str:
    """Lay the rings beside each other."""
    if not parts:
        return (
            "no flight recorder dump was given; set TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_ON_TIMEOUT=1 "
            "before the start, and give the dumps of all ranks"
        )
    said = (whole.job.world_size, *(summary.world_size for summary in whole.summaries.values()))
    world = max((size for size in said if size), default=None)
    vocabulary = Vocabulary()
    lines = group_lines(parts, world, vocabulary)
    families = [call[0].family for call in vocabulary.calls]
    older = older_dumps(lines, families, parts)
    culprits, explained = [], set()
    for line in lines:
        for culprit in mismatch_of(line, vocabulary, parts):
            culprits.append(culprit)
            if not culprit.completed:
                explained.add(line.id)
    blocks = [node for line in lines if (node := blocked(line, older, parts)) is not None]
    pairs = exchanges(parts, lines)
    culprits += [_uneven(pair, *rows, parts) for pair in pairs if (rows := pair.uneven(parts)) is not None]
    held_up = waits(blocks, pairs, parts, frozenset(explained), len(parts) == (world or max(parts) + 1))
    moving = [culprit for culprit in held_up if culprit.kind == "in_flight" and not _holds_up(culprit)]
    culprits += [culprit for culprit in held_up if culprit not in moving[MOST_IN_FLIGHT:]]
    culprits.sort(key=lambda culprit: (culprit.completed, _WEIGHT[culprit.kind], -len(culprit.waiting)))
    _say(whole, lines, parts, older)
    return Desync(
        ranks=tuple(sorted(parts)),
        without_dump=tuple(sorted({rank for line in lines for rank in line.absent})),
        groups=tuple(_standing(line) for line in lines),
        culprits=tuple(culprits),
        stuck=any(_holds_up(culprit) for culprit in culprits),
        calls=sum(len(ring.record) for ring in parts.values()),
        compared=sum(_compared(line) for line in lines),
        backends=tuple(sorted({name for ring in parts.values() for name in ring.backends})),
        stacks=any(ring.stacks for ring in parts.values()),
        older_dumps=tuple(sorted(older)),
    )


def _holds_up(culprit: Culprit) -> bool:
    """Whether it is a fault: what is only in flight may be a job at work, unless it has waited for long. A few ranks
    without a dump where all others wait are no accident; where most lack one, somebody gave a part of the dumps."""
    if culprit.completed:
        return False
    if (culprit.waited_ns or 0) >= HUNG_NS:
        return True
    if culprit.kind == "no_dump":
        return len(culprit.ranks) < len(culprit.waiting)
    return culprit.kind not in ("in_flight", "not_started")


def _uneven(pair: Exchange, send: int, receive: int, rings: Mapping[int, Ring]) -> Culprit:
    calls = (call_of(rings[pair.sender], send), call_of(rings[pair.receiver], receive))
    ranks = (pair.sender, pair.receiver)
    return Culprit(
        "peer_elements", ranks, pair.group, pair.description, None, "send", ranks, calls, "low", peers=ranks
    )


def _compared(line: GroupLine) -> int:
    return int(((line.call != ABSENT).sum(axis=0) > 1).sum())


def _standing(line: GroupLine) -> GroupStanding:
    known = line.enqueued[line.enqueued != MISSING]
    held = line.call != ABSENT
    # A call that another rank has completed is being completed: a dump catches some ranks a moment earlier.
    open_ = ~(held & (line.state == COMPLETED)).any(axis=0)
    pending = (held & (line.state != COMPLETED))[:, open_].any(axis=1)
    return GroupStanding(
        group=line.id,
        description=line.description,
        ranks=line.members,
        stated=line.stated,
        without_dump=line.absent,
        enqueued=_range(known),
        completed=_range(line.completed),
        compared=_compared(line),
        pending=tuple(line.ranks[row] for row in np.flatnonzero(pending)),
    )


def _range(values: Any) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (-1, -1)


def _say(
    whole: Whole, lines: tuple[GroupLine, ...], parts: Mapping[int, Ring], older: frozenset[int]
) -> None:
    unstated = [line.id for line in lines if not line.stated]
    if unstated:
        text = (
            f"the dumps do not say which ranks group {', '.join(unstated[:8])} has: "
            "the default group's are taken to be all, others' those that called in it"
        )
        whole.note("groups-unstated", "info", text)
    if older:
        text = (
            f"the dumps of ranks {', '.join(map(str, sorted(older)[:8]))} were taken before the others': these have "
            "completed collectives that those do not know of; they are not counted as missing"
        )
        whole.note("dump-older", "warning", text)
    silent = sorted({rank for line in lines for rank in line.absent})
    if silent and whole.job.world_size is None:
        one = len(silent) == 1
        text = f"rank{'' if one else 's'} {', '.join(map(str, silent[:8]))} left no dump: what {'it' if one else 'they'} did is not known"
        whole.note("dump-missing", "warning", text)
    if any("gloo" in ring.backends for ring in parts.values()):
        text = "gloo records no sends and receives: a rank that hangs in one does not show it"
        whole.note("messages-unrecorded", "info", text)
    if len(parts) == 1:
        whole.note(
            "dump-alone", "info", "one rank's dump alone cannot show who differs; give those of all ranks"
        )


def to_json(result: Desync) -> dict[str, Any]:
    """The result as plain values."""
    return asdict(result)
