"""A path laid out: its pieces as columns, and its host time by what the host did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._path_graph import Graph
from ._path_host import Timeline
from ._path_terms import CATEGORIES, GAP, LONGEST_GAP_NS, OF_KIND, SYNCHRONIZATION, UNEXPLAINED
from ._path_walk import Pieces

__all__ = ["Path", "laid_out", "sums_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """Pieces that tile the window, in no order. Columns of shape (pieces,) hold what is not the host's own time:
    ``work`` is a row of the graph and ``row`` one of the host table (of a blocking call), -1 for none.
    ``host_start`` and ``host_end`` are the host's stretches, whole."""

    start: Array
    end: Array
    category: Array
    work: Array
    row: Array
    host_start: Array
    host_end: Array

    def lengths(self) -> Array:
        """Length of each piece that is not the host's, ns."""
        return np.asarray(self.end - self.start)

    def host_time(self, timeline: Timeline) -> Array:
        """How much of each stretch of the timeline lies on the path, ns."""
        on_path = np.zeros(len(timeline.start_ns), dtype=np.int64)
        length = timeline.lengths()
        for start, end in zip(self.host_start.tolist(), self.host_end.tolist(), strict=True):
            first, last = timeline.at(np.array([start, end])).tolist()
            on_path[first:last] += length[first:last]
            on_path[first] -= start - int(timeline.start_ns[first])
            on_path[last] += end - int(timeline.start_ns[last])
        return on_path


def laid_out(graph: Graph, pieces: Pieces) -> Path:
    """The columns of a walk's pieces."""
    parts = [_of_runs(graph, pieces.runs)]
    if pieces.syncs:
        start, end, wait = np.array(pieces.syncs, dtype=np.int64).T
        none = np.full(len(start), -1)
        parts.append((start, end, np.full(len(start), SYNCHRONIZATION), none, graph.waits.row[wait]))
    if pieces.spans:
        start, end, category = np.array(pieces.spans, dtype=np.int64).T
        none = np.full(len(start), -1)
        parts.append((start, end, category, none, none))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    host = np.array(pieces.host, dtype=np.int64).reshape(-1, 2)
    return Path(columns[0], columns[1], columns[2], columns[3], columns[4], host[:, 0], host[:, 1])


def _of_runs(graph: Graph, runs: Sequence[tuple[int, int, int]]) -> tuple[Array, Array, Array, Array, Array]:
    parts: list[tuple[Array, Array, Array, Array]] = []
    for first, last, until in runs:
        rows = np.arange(first, last + 1)
        start = graph.start[first : last + 1]
        following = np.append(start[1:], until)
        end = np.minimum(graph.end[first : last + 1], following)
        parts.append((start, end, OF_KIND[graph.kind[first : last + 1]], rows))
        gap = following > end
        if gap.any():
            category = np.where((following - end)[gap] > LONGEST_GAP_NS, UNEXPLAINED, GAP)
            parts.append((end[gap], following[gap], category, np.full(int(gap.sum()), -1)))
    if not parts:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty, empty, empty
    start, end, category, work = (np.concatenate(column) for column in zip(*parts, strict=True))
    return start, end, category, work, np.full(len(start), -1)


def sums_of(path: Path, timeline: Timeline, cuts: Array) -> Array:
    """Time by category between the cuts, ns, shape (cuts + 1, categories); before the first and after the last too."""
    width = len(CATEGORIES)
    sums = np.zeros((len(cuts) + 1, width), dtype=np.int64)
    start, end, piece = _split(path.start, path.end, cuts)
    part = np.searchsorted(cuts, start, side="right")
    amount = np.bincount(part * width + path.category[piece], weights=end - start, minlength=sums.size)
    sums += amount.astype(np.int64).reshape(sums.shape)
    start, end, _ = _split(path.host_start, path.host_end, cuts)
    np.add.at(sums, np.searchsorted(cuts, start, side="right"), timeline.until(end) - timeline.until(start))
    return sums


def _split(start: Array, end: Array, cuts: Array) -> tuple[Array, Array, Array]:
    """Starts and ends of spans cut where a cut lies inside, and the span that each comes from."""
    first = np.searchsorted(cuts, start, side="right")
    count = np.maximum(np.searchsorted(cuts, end, side="left") - first, 0) + 1
    piece = np.repeat(np.arange(len(start)), count)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
    edges = np.append(cuts, 0)
    low = np.where(nth > 0, edges[np.minimum(first[piece] + nth - 1, len(cuts))], start[piece])
    high = np.where(nth < count[piece] - 1, edges[np.minimum(first[piece] + nth, len(cuts))], end[piece])
    return low, high, piece
