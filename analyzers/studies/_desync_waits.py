"""Who waits for whom: which call holds others up, whose absence that is, and where that rank hangs itself.

Each call in which a rank waits for another is a node. Where the rank that is missing waits in a call of
its own, that call is the next node, so that a chain leads to the rank that waits for nobody, or closes to
a circle: a deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trine.record.model import MISSING, Array

from ._desync_compare import find_call, shown_calls
from ._desync_lines import ABSENT, GroupLine
from ._desync_peers import Exchange
from ._desync_result import Call, Culprit, call_of
from ._desync_ring import COMPLETED, STARTED, Ring

__all__ = ["blocked", "older_dumps", "waits"]

#: A wait of this length by the dumps' own times is no snapshot of a job at work.
HUNG_NS = 30 * 10**9
#: Ranks whose stacks are shown for one call.
MOST_SHOWN = 8

#: Operations that no rank leaves before all have entered.
_MEETINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(slots=True)
class Node:
    """A call in which ranks wait. ``missing`` never entered it; ``unstarted`` entered, but their devices have
    not begun it; ``unknown`` left no dump."""

    group: str
    description: str | None
    sequence: int | None
    line: GroupLine | None
    exchange: Exchange | None
    rows: dict[int, int]  # rank that waits → row of its ring
    missing: tuple[int, ...] = ()
    unstarted: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    next: dict[int, Node] = field(default_factory=dict)  # rank that leads there → node


def older_dumps(
    lines: Sequence[GroupLine], families: Sequence[str], rings: Mapping[int, Ring]
) -> frozenset[int]:
    """Ranks whose dump is older than the others': these have completed a meeting that it does not know of, or that it
    shows as not completed on the rank, which was therefore still at work."""
    older: set[int] = set()
    for line in lines:
        if not len(line.sequences):
            continue
        meeting = np.array([*(name in _MEETINGS for name in families), False])[line.call]
        done = (line.state == COMPLETED) & meeting
        last = max((int(line.sequences[column]) for column in np.flatnonzero(done.any(axis=0))), default=-1)
        older |= {
            rank
            for rank, enqueued in zip(line.ranks, line.enqueued.tolist(), strict=True)
            if enqueued != MISSING and (enqueued < last or _leaving(line, rank, enqueued, done, rings))
        }
    return frozenset(older)


def _leaving(line: GroupLine, rank: int, enqueued: int, done: Array, rings: Mapping[int, Ring]) -> bool:
    """Whether the rank's last call is a meeting that another has completed and left for the next call, a moment ago:
    all were in it, so nothing holds the rank up in it. After :data:`HUNG_NS` something does."""
    column = int(np.searchsorted(line.sequences, enqueued))
    if column >= len(line.sequences) or line.sequences[column] != enqueued:
        return False
    state = line.state[line.ranks.index(rank), column]
    if state in (COMPLETED, ABSENT) or not done[:, column].any() or not (line.enqueued > enqueued).any():
        return False
    row = find_call(rings[rank], line, enqueued)
    entered = MISSING if row is None else int(rings[rank].created_ns[row])
    newest = max(_newest(ring.created_ns) for ring in rings.values())
    return MISSING in (entered, newest) or newest - entered < HUNG_NS


def blocked(line: GroupLine, older: frozenset[int], rings: Mapping[int, Ring]) -> Node | None:
    """The first call of a group that holds ranks up; None where nothing is pending."""
    pending = (line.state != COMPLETED) & (line.call != ABSENT)
    for column in np.flatnonzero(pending.any(axis=0)).tolist():
        missing = _missing_from(line, column, older)
        completed = bool((line.state[:, column] == COMPLETED).any())
        if line.absent and all("gloo" in rings[rank].backends for rank in line.ranks):
            completed = (
                False  # gloo retires what failed as it does what completed: no proof that all were in it
            )
        if missing or not completed:  # where some have left and none is missing, it is being completed
            return _node(line, column, missing, () if completed else line.absent, rings)
    return None


def _missing_from(line: GroupLine, column: int, older: frozenset[int]) -> tuple[int, ...]:
    """Ranks that never entered a call of the line."""
    sequence = int(line.sequences[column])
    return tuple(
        rank
        for row, rank in enumerate(line.ranks)
        if line.call[row, column] == ABSENT
        and line.enqueued[row] != MISSING
        and line.enqueued[row] < sequence
        and rank not in older
    )


def _node(
    line: GroupLine,
    column: int,
    missing: tuple[int, ...],
    unknown: tuple[int, ...],
    rings: Mapping[int, Ring],
) -> Node:
    sequence, states = int(line.sequences[column]), line.state[:, column]
    waiting = [
        rank
        for row, rank in enumerate(line.ranks)
        if line.call[row, column] != ABSENT and states[row] != COMPLETED
    ]
    rows = {rank: row for rank in waiting if (row := find_call(rings[rank], line, sequence)) is not None}
    begun = bool((states >= STARTED).any())
    state_of = dict(zip(line.ranks, states.tolist(), strict=True))
    unstarted = [rank for rank in waiting if begun and state_of[rank] < STARTED and rings[rank].says_states]
    return Node(
        line.id,
        line.description,
        sequence,
        line,
        None,
        rows,
        missing=missing,
        unstarted=tuple(unstarted),
        unknown=unknown,
    )


def _peer_nodes(found: Sequence[Exchange], rings: Mapping[int, Ring]) -> list[Node]:
    nodes = []
    for exchange in found:
        sends, receives = exchange.unmatched(rings)
        for rows, waiter, other in (
            (sends, exchange.sender, exchange.receiver),
            (receives, exchange.receiver, exchange.sender),
        ):
            if rows:
                there = other in rings
                nodes.append(
                    Node(
                        exchange.group,
                        exchange.description,
                        None,
                        None,
                        exchange,
                        {waiter: rows[0]},
                        missing=(other,) if there else (),
                        unknown=() if there else (other,),
                    )
                )
    return nodes


def waits(
    blocks: Sequence[Node],
    found: Sequence[Exchange],
    rings: Mapping[int, Ring],
    explained: frozenset[str],
    whole_world: bool = False,
) -> list[Culprit]:
    """Culprits among those that others wait for. ``explained``: groups whose calls went apart, which is said elsewhere;
    ``whole_world``: every rank of the job left a dump."""
    nodes = [*blocks, *_peer_nodes(found, rings)]
    _link(nodes, rings)
    circles = _circles(nodes)
    in_circle = {id(node) for circle in circles for node in circle}
    leads = {id(node) for node in nodes if _leads_to(node, in_circle)}
    culprits = [_deadlock(circle, rings) for circle in circles]
    for node in nodes:
        if id(node) in in_circle or id(node) in leads:
            continue
        if node.line is not None and node.group in explained:
            continue
        roots = [rank for rank in node.missing if rank not in node.next]
        if roots:
            culprits.append(_missing(node, tuple(roots), rings))
        elif not node.missing and node.unknown:
            culprits.append(_no_dump(node, rings))
        elif not node.missing and node.line is not None:
            culprits.append(_in_flight(node, rings, whole_world))
    return culprits


def _link(nodes: Sequence[Node], rings: Mapping[int, Ring]) -> None:
    """Where a rank that is missing from one call waits in another, that is the next node."""
    first: dict[int, tuple[int, Node]] = {}
    for node in nodes:
        for rank, row in node.rows.items():
            if rank not in first or row < first[rank][0]:
                first[rank] = (row, node)
    for node in nodes:
        for rank in (*node.missing, *node.unstarted):
            if rank in first and first[rank][1] is not node:
                node.next[rank] = first[rank][1]


def _circles(nodes: Sequence[Node]) -> list[list[Node]]:
    """One circle of calls for each set of ranks that wait for each other."""
    circles: list[list[Node]] = []
    done: set[int] = set()
    for start in nodes:
        path: list[Node] = []
        place: dict[int, int] = {}
        node: Node | None = start
        while node is not None and id(node) not in done and id(node) not in place:
            place[id(node)] = len(path)
            path.append(node)
            node = next(iter(node.next.values()), None)
        if node is not None and id(node) in place:
            circles.append(path[place[id(node)] :])
        done |= set(place)
    return circles


def _leads_to(node: Node, targets: set[int]) -> bool:
    seen: set[int] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if id(here) in targets:
            return True
        stack += here.next.values()
    return False


# --- culprits ------------------------------------------------------------------------------------


def _calls(node: Node, rings: Mapping[int, Ring]) -> tuple[Call, ...]:
    return tuple(call_of(rings[rank], row) for rank, row in list(node.rows.items())[:MOST_SHOWN])


def _last_calls(ranks: Sequence[int], rings: Mapping[int, Ring]) -> tuple[Call, ...]:
    """The last thing that each rank enqueued."""
    return tuple(
        call_of(rings[rank], len(rings[rank].record) - 1) for rank in ranks[:MOST_SHOWN] if rank in rings
    )


def waited_ns(node: Node, rings: Mapping[int, Ring]) -> int | None:
    """How long the call has been pending at least: from its last entry to the newest time in any dump."""
    entered = [int(rings[rank].created_ns[row]) for rank, row in node.rows.items()]
    newest = max(_newest(ring.created_ns) for ring in rings.values())
    if not entered or MISSING in entered or newest == MISSING:
        return None
    return max(newest - max(entered), 0)


def _newest(times: Array) -> int:
    return int(times.max(initial=MISSING))


def _about(node: Node) -> tuple[str, str | None, int | None]:
    return node.group, node.description, node.sequence


def _operation(calls: Sequence[Call]) -> str | None:
    return calls[0].operation if calls else None


def _missing(node: Node, roots: tuple[int, ...], rings: Mapping[int, Ring]) -> Culprit:
    calls, waited = _calls(node, rings), waited_ns(node, rings)
    sure: Literal["high", "medium"] = "high" if (waited or 0) >= HUNG_NS or len(node.rows) > 1 else "medium"
    exchange = node.exchange
    return Culprit(
        "missing" if exchange is None else "peer_missing",
        roots,
        *_about(node),
        _operation(calls),
        tuple(node.rows),
        calls,
        sure,
        waited_ns=waited,
        last_calls=_last_calls(roots, rings),
        peers=None if exchange is None else (exchange.sender, exchange.receiver),
    )


def _no_dump(node: Node, rings: Mapping[int, Ring]) -> Culprit:
    calls = _calls(node, rings)
    return Culprit(
        "no_dump",
        node.unknown,
        *_about(node),
        _operation(calls),
        tuple(node.rows),
        calls,
        "medium",
        waited_ns=waited_ns(node, rings),
        peers=None if node.exchange is None else (node.exchange.sender, node.exchange.receiver),
    )


def _in_flight(node: Node, rings: Mapping[int, Ring], whole_world: bool) -> Culprit:
    """All entered. Where some devices began and others did not, these are looked at first."""
    unstarted = node.unstarted
    calls = _calls(node, rings)
    if unstarted and node.line is not None and node.sequence is not None:
        calls = (*shown_calls(rings, node.line, unstarted, node.sequence), *calls)[:MOST_SHOWN]
    waited = waited_ns(node, rings)
    hint = None if node.line is not None and node.line.stated and not node.line.absent else "others_unknown"
    if node.line is not None and set(node.line.ranks) - set(node.rows) and not node.line.absent:
        hint = "dumps_apart"
    elif hint and whole_world and node.line is not None and not node.line.stated:
        hint = "members_unknown" if len(node.rows) < len(rings) else None
    return Culprit(
        "not_started" if unstarted else "in_flight",
        unstarted or tuple(node.rows),
        *_about(node),
        _operation(calls),
        tuple(rank for rank in node.rows if rank not in unstarted) if unstarted else tuple(node.rows),
        tuple(dict.fromkeys(calls)),
        "medium" if (waited or 0) >= HUNG_NS else "low",
        hint=hint,
        waited_ns=waited,
        last_calls=_elsewhere(node, rings) if hint == "members_unknown" else (),
    )


def _elsewhere(node: Node, rings: Mapping[int, Ring]) -> tuple[Call, ...]:
    """Calls of other groups in which ranks stand that did not enter this one."""
    calls = _last_calls([rank for rank in rings if rank not in node.rows], rings)
    return tuple(call for call in calls if call.state != "completed" and call.group != node.group)


def _deadlock(circle: Sequence[Node], rings: Mapping[int, Ring]) -> Culprit:
    """A link a call: a rank that waits in it, because the rank of the next link is elsewhere."""
    ranks = [next(iter(node.next)) for node in circle]
    calls = []
    for place, node in enumerate(circle):
        rank = ranks[place - 1]  # the rank that the call before this one waits for stands here
        row = node.rows.get(rank, next(iter(node.rows.values()), None))
        if row is not None:
            calls.append(call_of(rings[rank if rank in node.rows else next(iter(node.rows))], row))
    first = circle[0]
    waiting = tuple(sorted({rank for node in circle for rank in node.rows}))
    exchange = first.exchange
    return Culprit(
        "deadlock",
        tuple(dict.fromkeys(ranks)),
        *_about(first),
        _operation(calls),
        waiting,
        tuple(calls),
        "high",
        waited_ns=waited_ns(first, rings),
        peers=None if exchange is None else (exchange.sender, exchange.receiver),
    )
