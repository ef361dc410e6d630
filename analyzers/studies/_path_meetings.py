"""Where ranks meet: their linked collectives as one system, to walk and to replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.clocks import Clock
from trine.analyzers.collectives import Blame
from trine.analyzers.results import RankSummary

from ._path_links import Links

__all__ = ["Meetings", "lengths_without"]

Array = npt.NDArray[Any]


class Meetings:
    """The links of all ranks with the matched calls that they are; times on the common clock."""

    def __init__(
        self,
        links: Mapping[int, Links],
        blames: Sequence[Blame],
        clocks: Mapping[int, Clock],
        summaries: Mapping[int, RankSummary],
    ) -> None:
        self.links, self.blames = links, blames
        self.correction = {rank: clocks[rank].correction_ns if rank in clocks else 0 for rank in links}
        self._rows: dict[int, Array] = {}  # rank → row of its table → link, -1
        self._blame: dict[int, Array] = {}  # rank → link → number of the blame, -1
        self._place: dict[int, Array] = {}  # rank → link → place in the blame
        self._start: dict[int, Array] = {}
        self._end: dict[int, Array] = {}
        for rank, one in links.items():
            table = summaries[rank].collectives
            assert table is not None  # links are rows of it
            rows = np.full(len(table), -1, dtype=np.int64)
            rows[one.row] = np.arange(len(one.row))
            self._rows[rank] = rows
            self._blame[rank] = np.full(len(one.row), -1, dtype=np.int64)
            self._place[rank] = np.zeros(len(one.row), dtype=np.int64)
            self._start[rank] = table["start_ns"][one.row] + self.correction[rank]
            self._end[rank] = table["end_ns"][one.row] + self.correction[rank]
        for number, blame in enumerate(blames):
            for column, rank in enumerate(blame.calls.ranks):
                if rank in links:
                    link = self._rows[rank][blame.calls.rows[:, column]]
                    known = np.flatnonzero(link >= 0)
                    self._blame[rank][link[known]] = number
                    self._place[rank][link[known]] = known

    def start(self, rank: int, link: int) -> int:
        """When the rank entered."""
        return int(self._start[rank][link])

    def end(self, rank: int, link: int) -> int:
        """When the rank left."""
        return int(self._end[rank][link])

    def length(self) -> int:
        """From the first rank's begin to the last one's end."""
        begin = min(one.begin_ns + self.correction[rank] for rank, one in self.links.items())
        return max(one.end_ns + self.correction[rank] for rank, one in self.links.items()) - begin

    def last_in(self, rank: int, link: int) -> tuple[int, int]:
        """The rank that this one waited for in a collective, with its link: itself where for none."""
        number = int(self._blame[rank][link])
        if number < 0:
            return rank, link
        blame, place = self.blames[number], int(self._place[rank][link])
        column = int(blame.last[place])
        if column < 0:
            return rank, link
        late = blame.calls.ranks[column]
        if late not in self.links:
            return rank, link
        other = int(self._rows[late][blame.calls.rows[place, column]])
        # Calls of a pair may leave the other side behind: the path only ever goes back in time.
        if other < 0 or self.start(late, other) > self.end(rank, link):
            return rank, link
        return late, other

    def edges(self, ranks: Sequence[int], most: int, origin: int) -> tuple[Array, Array]:
        """When each rank left and entered its links, ns from ``origin``, shape (ranks, most)."""
        leaves, enters = (np.zeros((len(ranks), most), dtype=np.int64) for _ in range(2))
        for position, rank in enumerate(ranks):
            count = len(self._end[rank])
            leaves[position, :count] = self._end[rank] - origin
            enters[position, :count] = self._start[rank] - origin
        return leaves, enters

    def calls(self) -> list[tuple[int, Array, Array, bool]]:
        """(when the last entered, ranks by position, their links, whether they waited for each other), in order
        of time."""
        ranks = {rank: position for position, rank in enumerate(self.links)}
        found: list[tuple[int, Array, Array, bool]] = []
        for blame in self.blames:
            columns = [column for column, rank in enumerate(blame.calls.ranks) if rank in ranks]
            members = [blame.calls.ranks[column] for column in columns]
            if not members:
                continue
            link = np.stack(
                [
                    self._rows[rank][blame.calls.rows[:, column]]
                    for rank, column in zip(members, columns, strict=True)
                ],
                axis=1,
            )
            where = np.array([ranks[rank] for rank in members])
            joined = (blame.last >= 0) | (blame.calls.pattern == "all")
            known = link >= 0
            start = np.stack([self._start[rank][link[:, at]] for at, rank in enumerate(members)], axis=1)
            last = np.where(known, start, np.iinfo(np.int64).min).max(axis=1).tolist()
            complete: list[bool] = np.asarray(known.all(axis=1)).tolist()
            for place, whole in enumerate(complete):
                if whole:
                    found.append((last[place], where, link[place], bool(joined[place])))
                elif known[place].any():
                    mine = known[place]
                    found.append((last[place], where[mine], link[place][mine], bool(joined[place])))
        for rank, position in ranks.items():
            for one in np.flatnonzero(self._blame[rank] < 0).tolist():
                found.append((self.start(rank, one), np.array([position]), np.array([one]), False))
        return sorted(found, key=lambda call: call[0])


def lengths_without(meetings: Meetings, absent: Sequence[tuple[int, ...]]) -> list[int]:
    """Length of the job, in ns, for each set of ranks that nobody waits for.

    What lies between a rank's collectives stays as long as it was, and so does what each rank needs to
    leave a collective after the last has entered. A rank that nobody waits for still does what it did after
    its last collective: the job ends with it too, or a rank that made nobody wait would seem to cost its tail.
    """
    ranks = list(meetings.links)
    most = max(len(one.row) for one in meetings.links.values())
    shape = (len(absent), len(ranks), most + 2)
    end = np.zeros(shape, dtype=np.int64)
    previous = np.zeros(shape[1:], dtype=np.int64)
    between = np.zeros(shape[1:], dtype=np.int64)
    begin = [one.begin_ns + meetings.correction[rank] for rank, one in meetings.links.items()]
    origin = min(begin)
    for position, one in enumerate(meetings.links.values()):
        count = len(one.previous)
        # Position −1, the last, holds the begin.
        previous[position, :count] = one.previous
        between[position, :count] = one.between.sum(axis=1)
        end[:, position, -1] = begin[position] - origin
    leaves, enters = meetings.edges(ranks, most, origin)
    counts = np.ones((len(absent), len(ranks)), dtype=bool)
    for number, left_out in enumerate(absent):
        counts[number, [ranks.index(rank) for rank in left_out]] = False
    for last, who, which, joined in meetings.calls():
        ready = end[:, who, previous[who, which]] + between[who, which]
        leave = leaves[who, which]
        if joined:
            entered = np.where(counts[:, who], ready, 0).max(axis=1)
            end[:, who, which] = entered[:, None] + (leave - (last - origin))
        else:
            end[:, who, which] = ready + (leave - enters[who, which])
    final = np.zeros((len(absent), len(ranks)), dtype=np.int64)
    for position, one in enumerate(meetings.links.values()):
        place = len(one.row)
        final[:, position] = end[:, position, previous[position, place]] + between[position, place]
    return [int(length) for length in final.max(axis=1)]
