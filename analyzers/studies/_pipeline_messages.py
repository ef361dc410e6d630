"""A stage's work told from its messages alone, where nothing names micro-batches.

What comes from the stage before is a forward's input and what goes to the stage after is its output;
gradients take the other way. So the computing between two messages belongs to the forward or backward that
the second one ends. The first stage's backwards and the last stage's forwards end without a message: there
the computing of both may lie in one piece, which is then called ``both``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.analyzers.breakdown import has_device_work, top_level_operators
from trine.analyzers.intervals import Spans, union
from trine.analyzers.kernel_classes import classify
from trine.analyzers.operations import canonical_operation
from trine.analyzers.selection import Selected
from trine.record.model import DEVICE_KINDS, MISSING, Array, Rank

__all__ = ["Messages", "from_messages"]

_COMPUTE = DEVICE_KINDS.index("compute")
_FORWARD, _BACKWARD, _BOTH = 0, 1, 4

#: Messages of an iteration that make a pipeline: fewer are something else.
FEWEST_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class Messages:
    """``columns``: iteration, stage (−1), index, direction, start and end of each piece of work; ``busy``: all
    computing; ``before`` and ``after``: ranks of the neighbours, None at the ends of the pipeline."""

    columns: tuple[Array, ...]
    busy: Spans
    before: int | None
    after: int | None


def from_messages(rank: Rank, selected: Selected) -> Messages | None:
    """The rank's pieces of work; None where its messages are not those of a pipeline's stage."""
    found = _sends_and_receives(rank, selected)
    if found is None:
        return None
    sends, peer, time, step = found
    neighbours = _neighbours(sends, peer, step)
    if neighbours is None:
        return None
    before, after = neighbours
    begin, end, own_step = _computing(rank, selected)
    if not len(begin):
        return None
    pieces = _pieces((begin, end, own_step), sends, peer, time, step, before, after)
    return Messages(pieces, union(begin, end), before, after) if len(pieces[0]) else None


def _sends_and_receives(rank: Rank, selected: Selected) -> tuple[Array, Array, Array, Array] | None:
    """Of each message with a known peer: whether it is a send, the peer, its time (a send's start, a receive's
    end) and its step; in the order of time."""
    table = rank.collectives
    if table is None or not len(table):
        return None
    kinds = [canonical_operation(text) for text in table.strings.values]
    send = np.isin(table["operation"], [code for code, kind in enumerate(kinds) if kind == "send"])
    receive = np.isin(table["operation"], [code for code, kind in enumerate(kinds) if kind == "recv"])
    timed = (table["start_ns"] != MISSING) & (table["end_ns"] != MISSING)
    rows = np.flatnonzero((send | receive) & (table["peer"] >= 0) & timed & selected.holds(table["step"]))
    # One iteration ends where another begins, and messages do not say where: steps must be marked.
    if len(rows) < FEWEST_MESSAGES or (table["step"][rows] == MISSING).any():
        return None
    time = np.where(send[rows], table["start_ns"][rows], table["end_ns"][rows])
    order = np.argsort(time, kind="stable")
    rows = rows[order]
    return send[rows], table["peer"][rows], time[order], table["step"][rows]


def _neighbours(sends: Array, peer: Array, step: Array) -> tuple[int | None, int | None] | None:
    """The stage before and the stage after, by what came first; None where they are not two at most."""
    peers = np.unique(peer).tolist()
    if len(peers) > 2:
        return None
    first = int(np.flatnonzero(step == step.max())[0])
    opens_with_send, other = bool(sends[first]), int(peer[first])
    rest = [one for one in peers if one != other]
    # The first stage begins by sending and has one neighbour; all others begin by receiving.
    if opens_with_send:
        return None if rest else (None, other)
    return other, (rest[0] if rest else None)


def _computing(rank: Rank, selected: Selected) -> tuple[Array, Array, Array]:
    """Starts, ends and steps of computing, the optimizer's left out."""
    if has_device_work(rank):
        device = rank.device
        assert device is not None
        optimizer = [code for code, text in enumerate(device.strings.values) if classify(text) == "optimizer"]
        keep = (
            (device["kind"] == _COMPUTE)
            & ~np.isin(device["name"], optimizer)
            & selected.holds(device["step"])
        )
        rows = np.flatnonzero(keep & (device["end_ns"] > device["start_ns"]))
        return device["start_ns"][rows], device["end_ns"][rows], device["step"][rows]
    spans = top_level_operators(rank.host)
    return spans.start, spans.end, _steps_at(rank, spans.start)


def _steps_at(rank: Rank, times: Array) -> Array:
    """The step that each time lies in, MISSING for none."""
    if rank.steps is None or not len(rank.steps):
        return np.full(len(times), MISSING, dtype=np.int64)
    order = np.argsort(rank.steps["start_ns"], kind="stable")
    place = np.searchsorted(rank.steps["start_ns"][order], times, side="right") - 1
    return np.where(place >= 0, rank.steps["index"][order][np.maximum(place, 0)], MISSING)


def _pieces(
    work: tuple[Array, Array, Array],
    sends: Array,
    peer: Array,
    time: Array,
    step: Array,
    before: int | None,
    after: int | None,
) -> tuple[Array, ...]:
    """The computing of one step between two messages as one piece, named by what surrounds it.

    Receives bound pieces on the first stage alone, where a backward ends without a message: elsewhere they
    are posted ahead and end in the middle of other work.
    """
    begin, end, own = work
    arrivals = _arrivals(sends, peer, time, step)
    bounds = np.ones(len(sends), dtype=bool) if before is None else sends
    sends, peer, time, step = sends[bounds], peer[bounds], time[bounds], step[bounds]
    place = np.searchsorted(time, begin, side="right")  # messages that came before it
    order = np.lexsort((own, place))
    changes = (np.diff(place[order]) != 0) | (np.diff(own[order]) != 0)
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    held, steps = place[order][first], own[order][first]
    done = np.maximum.reduceat(end[order], first)
    direction = np.array(
        [
            _direction(int(one), int(of), sends, peer, step, before, after)
            for one, of in zip(held, steps, strict=True)
        ],
        dtype=np.int64,
    )
    index = np.zeros(len(held), dtype=np.int64)
    counts: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(steps.tolist(), direction.tolist(), strict=True)):
        index[row] = counts[key] = counts.get(key, -1) + 1
    # A piece begins with what it works on: what ran before that had arrived is something else.
    limits = [
        _arrived(arrivals, int(of), after if one == _BACKWARD else before, int(number))
        for of, one, number in zip(steps, direction, index, strict=True)
    ]
    limit = np.repeat(limits, np.diff(np.append(first, len(order))))
    late = np.where(end[order] > limit, begin[order], np.iinfo(np.int64).max)
    start = np.minimum.reduceat(late, first)
    start = np.where(start > done, np.minimum.reduceat(begin[order], first), start)
    stage = np.full(len(held), -1, dtype=np.int64)
    known = direction >= 0
    return tuple(column[known] for column in (steps, stage, index, direction, start, done))


def _arrivals(sends: Array, peer: Array, time: Array, step: Array) -> dict[tuple[int, int], list[int]]:
    """(step, sender) → when its messages were there, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    rows = np.flatnonzero(~sends)
    for of, one, at in zip(step[rows].tolist(), peer[rows].tolist(), time[rows].tolist(), strict=True):
        found.setdefault((of, one), []).append(at)
    return found


def _arrived(arrivals: dict[tuple[int, int], list[int]], step: int, sender: int | None, number: int) -> int:
    """When the message for a step's ``number``-th piece of work was there; MISSING where it needs none."""
    times = arrivals.get((step, -1 if sender is None else sender), [])
    return times[number] if number < len(times) else MISSING


def _direction(
    place: int, of: int, sends: Array, peer: Array, step: Array, before: int | None, after: int | None
) -> int:
    """What lies in step ``of`` between message ``place − 1`` and message ``place``; −1 for neither forward nor backward."""
    opened = place > 0 and int(step[place - 1]) == of
    closed = place < len(sends) and int(step[place]) == of
    gradient_in = opened and not sends[place - 1]  # of the first stage alone
    if not closed or not sends[place]:
        return _BACKWARD if gradient_in else -1
    if before is None:
        return _BOTH if gradient_in else _FORWARD
    if after is None:
        return _BOTH
    return _FORWARD if int(peer[place]) == after else _BACKWARD
