"""A rank's path cut at its collectives: what all ranks together need to walk across ranks.

For each collective of the rank: which collective came before it on the path to its start, and what lay
between. So the path of the job can enter a rank at any collective and follow it back to the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Rank, Table

from ._path_graph import Graph
from ._path_host import Timeline
from ._path_pieces import Path
from ._path_terms import CATEGORIES, GAP, LONGEST_GAP_NS, OF_KIND, SYNCHRONIZATION, UNEXPLAINED
from ._path_walk import Pieces, Walker

__all__ = ["Links", "links_of"]

Array = npt.NDArray[Any]

#: Collectives of a rank that are linked: the last of the window. A part stays below a hundred kilobytes.
MOST_LINKS = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """``row`` are rows of the rank's summary table of collectives, ascending by time. ``previous`` is the
    position of the one before on the path to its start, -1 where that is the window's begin;
    ``between`` (links, categories) is what lies between, in ns; ``on_path`` is how much of its own
    duration lies on the rank's own path. The ``last`` entry of each is for the window's end."""

    row: Array
    previous: Array
    between: Array
    on_path: Array
    begin_ns: int
    end_ns: int


def links_of(
    rank: Rank, graph: Graph, walker: Walker, timeline: Timeline, path: Path, kept: Table | None
) -> Links | None:
    """The links of a rank; None where it has no collective with times."""
    work, row = _collectives(rank, graph, kept)
    if not len(work):
        return None
    order = np.argsort(graph.end[work], kind="stable")[-MOST_LINKS:]
    work, row = work[order], row[order]
    place = np.full(len(graph), -1)
    place[work] = np.arange(len(work))
    previous, walks = _walks(walker, work, place)
    between = _between(walker, timeline, walks)
    on_path = np.zeros(len(work), dtype=np.int64)
    own = np.flatnonzero((path.work >= 0) & (place[np.maximum(path.work, 0)] >= 0))
    np.add.at(on_path, place[path.work[own]], path.lengths()[own])
    return Links(
        row.astype(np.int32), np.array(previous, dtype=np.int32), between, on_path,
        graph.begin_ns, graph.end_ns,
    )  # fmt: skip


def _walks(walker: Walker, work: Array, place: Array) -> tuple[list[int], list[list[Pieces]]]:
    """For each collective, and last for the window's end, the link before it on the path and the pieces between."""
    previous, walks = [], []
    for one in [*work.tolist(), -1]:
        pieces = walker.from_end() if one < 0 else walker.before(one)
        parts = [pieces]
        # Communication that is no collective of the table is part of what lies between.
        while pieces.stopped_at >= 0 and place[pieces.stopped_at] < 0:
            stopped = pieces.stopped_at
            parts.append(Pieces([(stopped, stopped, walker.end[stopped])], [], [], []))
            pieces = walker.before(stopped)
            parts.append(pieces)
        previous.append(-1 if pieces.stopped_at < 0 else int(place[pieces.stopped_at]))
        walks.append(parts)
    return previous, walks


def _between(walker: Walker, timeline: Timeline, walks: list[list[Pieces]]) -> Array:
    """Time between links by category, ns, shape (walks, categories)."""
    sums = np.zeros((len(walks), len(CATEGORIES)), dtype=np.int64)
    flat = [(number, pieces) for number, parts in enumerate(walks) for pieces in parts]
    host = [(number, *one) for number, pieces in flat for one in pieces.host]
    runs = [(number, *one) for number, pieces in flat for one in pieces.runs]
    for number, pieces in flat:
        for start, end, category in pieces.spans:
            sums[number, category] += end - start
        for start, end, _ in pieces.syncs:
            sums[number, SYNCHRONIZATION] += end - start
    if host:
        link, start, end = np.array(host, dtype=np.int64).T
        np.add.at(sums, link, timeline.until(end) - timeline.until(start))
    if runs:
        link, first, last, until = np.array(runs, dtype=np.int64).T
        _add_runs(sums, walker.graph, link, first, last, until)
    return sums


def _add_runs(sums: Array, graph: Graph, link: Array, first: Array, last: Array, until: Array) -> None:
    following = np.append(graph.start[1:], graph.end[-1:])
    ends = np.minimum(graph.end, following)
    work, rest = ends - graph.start, following - ends
    kind = OF_KIND[graph.kind]
    long = rest > LONGEST_GAP_NS
    parts = [(one, np.where(kind == one, work, 0)) for one in np.unique(kind).tolist()]
    parts += [(GAP, np.where(long, 0, rest)), (UNEXPLAINED, np.where(long, rest, 0))]
    for category, amount in parts:
        total = np.append(0, np.cumsum(amount))
        np.add.at(sums, (link, category), total[last] - total[first])
    # The last piece of a run ends where the path left it.
    end = np.minimum(graph.end[last], until)
    np.add.at(sums, (link, kind[last]), end - graph.start[last])
    after = until - end
    np.add.at(sums, (link, np.where(after > LONGEST_GAP_NS, UNEXPLAINED, GAP)), after)


def _collectives(rank: Rank, graph: Graph, kept: Table | None) -> tuple[Array, Array]:
    """Work that is a collective of the summary's table, and its row there."""
    none = np.empty(0, dtype=np.int64)
    table = rank.collectives
    if table is None or kept is None or not len(kept) or not len(graph):
        return none, none
    if graph.on_device:
        rows = np.flatnonzero(table["device_row"] >= 0)
        source = table["device_row"][rows]
    else:
        rows = source = np.arange(len(table))
    order = np.argsort(graph.source, kind="stable")
    place = np.minimum(np.searchsorted(graph.source[order], source), len(order) - 1)
    hit = graph.source[order[place]] == source
    work, rows = order[place[hit]], rows[hit]
    # The summary's table may number them otherwise: the same call has the same times.
    known = np.flatnonzero(kept["start_ns"] != MISSING)
    known = known[np.lexsort((kept["end_ns"][known], kept["start_ns"][known]))]
    start, end = table["start_ns"][rows], table["end_ns"][rows]
    at = np.searchsorted(kept["start_ns"][known], start, side="left")
    at = np.minimum(at, max(len(known) - 1, 0))
    if not len(known):
        return none, none
    same = (kept["start_ns"][known[at]] == start) & (kept["end_ns"][known[at]] == end)
    if not same.any():
        return _by_nearest(kept, known, work, start, end)
    return work[same], known[at[same]]


def _by_nearest(kept: Table, known: Array, work: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """A deep window and the record's own table time the same call by different clocks' reads: the call that
    starts nearest, if the two overlap."""
    starts = kept["start_ns"][known]
    after = np.minimum(np.searchsorted(starts, start), len(known) - 1)
    before = np.maximum(after - 1, 0)
    near = np.where(np.abs(starts[after] - start) < np.abs(starts[before] - start), after, before)
    row, apart = known[near], np.abs(starts[near] - start)
    hit = np.flatnonzero((kept["end_ns"][row] > start) & (kept["start_ns"][row] < end))
    # Of two that are nearest to one call, the nearer.
    hit = hit[np.argsort(apart[hit], kind="stable")]
    first = hit[np.unique(row[hit], return_index=True)[1]]
    return work[first], row[first]
