"""One rank's collectives of one group, in order: what is matched against the other ranks' lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Table

from .operations import canonical_operation
from .results import RankSummary

__all__ = ["GroupKey", "Line", "kinds_of", "lines_of", "listed", "memberships"]

Array = npt.NDArray[Any]

#: More ranks than any job has, so that two of them fit into one int64.
_MOST_RANKS = 1 << 31
#: Larger than any buffer, small enough to leave room for an operation in one int64.
_MOST_BYTES = 1 << 50
#: Operations to which every rank brings the same number of bytes.
_SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's calls of one group, in order; columns of shape (calls,)."""

    rank: int
    table: Table
    rows: Array  # of the table
    operation: Array  # codes shared by all ranks
    sized: Array  # whether every rank brings the same number of bytes to such a call

    def column(self, name: str) -> Array:
        """A column of the table, of these calls alone."""
        return np.asarray(self.table[name][self.rows])

    def taking(self, positions: Array | slice) -> Line:
        """The calls of a boolean mask, of positions or of a slice."""
        return replace(
            self,
            rows=self.rows[positions],
            operation=self.operation[positions],
            sized=self.sized[positions],
        )


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A group as all its members know it: its name alone is not enough, since disjoint groups share names."""

    id: str
    ranks: tuple[int, ...] | None
    peers: tuple[int, int] | None = None  # (sender, receiver) of a point-to-point line

    def __str__(self) -> str:
        return f"pair {self.peers[0]}→{self.peers[1]}" if self.peers else f"group {self.id or 'unnamed'}"


def memberships(summaries: Sequence[RankSummary]) -> dict[str, set[tuple[int, ...]]]:
    """Every membership seen for a group's id. Disjoint groups may share one id."""
    known: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for summary in summaries:
        for group in summary.groups:
            if group.ranks:
                known[group.id].add(tuple(group.ranks))
    return known


def lines_of(
    summary: RankSummary, known: dict[str, set[tuple[int, ...]]], codes: dict[str, int]
) -> Iterable[tuple[GroupKey, Line]]:
    """A rank's collectives by group, point-to-point calls by sender and receiver.

    ``known``: what :func:`memberships` returned. ``codes``: operation → code, filled as operations occur.
    """
    table = summary.collectives
    assert table is not None
    names = [canonical_operation(text) for text in [*table.strings.values, None]]
    code_of = np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int64)
    operation = code_of[table["operation"]]
    sized = np.isin(operation, [codes[name] for name in _SAME_SIZE if name in codes])
    pair = _pairs(summary.rank, table["peer"], operation, codes)
    # Both sides of a pair are one operation, so that they match each other.
    operation = np.where(pair >= 0, codes.setdefault("send_recv", len(codes)), operation)
    for code in np.unique(table["group"]):
        in_group = table["group"] == code
        id = table.strings.text(int(code)) or ""
        ranks = next((ranks for ranks in sorted(known.get(id, ())) if summary.rank in ranks), None)
        for one in np.unique(pair[in_group]):
            rows = np.flatnonzero(in_group & (pair == one))
            peers = None if one < 0 else (int(one) // _MOST_RANKS, int(one) % _MOST_RANKS)
            rows = rows[np.argsort(_order_in_group(table, rows), kind="stable")]
            yield GroupKey(id, ranks, peers), Line(summary.rank, table, rows, operation[rows], sized[rows])


def kinds_of(line: Line) -> Array:
    """Operation and size of each call in one number; ranks may bring different sizes to an all-to-all
    or to a rooted operation, so there the operation alone counts."""
    size = np.where(line.sized, np.maximum(line.column("bytes"), 0), 0)
    return np.asarray(line.operation * _MOST_BYTES + np.minimum(size, _MOST_BYTES - 1))


def _pairs(rank: int, peer: Array, operation: Array, codes: dict[str, int]) -> Array:
    """Sender and receiver of each point-to-point row in one number; -1 elsewhere."""
    sends, receives = operation == codes.get("send", -1), operation == codes.get("recv", -1)
    known = (peer >= 0) & (sends | receives)
    other = np.where(known, peer, 0)
    pair = np.where(sends, rank * _MOST_RANKS + other, other * _MOST_RANKS + rank)
    return np.where(known, pair, -1)


def _order_in_group(table: Table, rows: Array) -> Array:
    """Issue order where it is known; several workers may start calls of one group out of order."""
    for name in ("issued_ns", "start_ns", "end_ns"):
        column = table[name][rows]
        if (column != MISSING).all():
            return np.asarray(column)
    return np.arange(len(rows))


def listed(ranks: Sequence[int]) -> str:
    """``0-3, 7``: at most eight runs of ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words[:8]) + (", …" if len(words) > 8 else "")
