"""The path of the job: across ranks, where a collective waited for the one that entered last.

A collective that all must enter cannot finish before the last has entered: walking back, the path crosses
to that rank there. So its pieces between collectives lie on one rank each, and whoever made the others
wait holds them. What a rank costs is replayed at the collectives: the job again, with nobody ever waiting
for that rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.clocks import Clock
from trine.analyzers.collectives import Blame
from trine.analyzers.results import RankSummary

from ._path_links import Links
from ._path_meetings import Meetings, lengths_without
from ._path_terms import CATEGORIES

__all__ = ["JobPath", "RankShare", "Without", "job_path", "waits_on_path"]

Array = npt.NDArray[Any]

#: Ranks whose absence is replayed: those that hold most of the path or made the others wait longest.
MOST_SUSPECTS = 6
#: Calls above which nothing is replayed: it would take longer than the reading. And calls of all ranks together:
#: each takes a number a suspect.
MOST_CALLS = 20_000
MOST_LINKS_OF_ALL = 4_000_000


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank holds of the job's path outside collectives. ``gain_ns`` is how much shorter the job would
    be had nobody waited for it, None where that was not replayed; ``doing`` is what it mostly did."""

    rank: int
    on_path_ns: int
    gain_ns: int | None
    crossings: int
    segments_ns: Mapping[str, int]
    doing: str | None


@dataclass(frozen=True, slots=True)
class Without:
    """How much shorter the job would be had nobody waited for these ranks."""

    ranks: tuple[int, ...]
    gain_ns: int


@dataclass(frozen=True, slots=True)
class JobPath:
    """The path of all ranks together: ``length_ns`` = the ranks' shares + ``communication_ns``.

    ``without`` names the rank that costs most and the pair that does; ``replay_error`` is how far the
    replay of the job at its collectives is off, as a share.
    """

    length_ns: int
    communication_ns: int
    collectives: int
    ranks: tuple[RankShare, ...]
    without: tuple[Without, ...]
    replay_error: float | None


@dataclass(slots=True)
class _Tally:
    on_path: int = 0
    crossings: int = 0
    segments: list[int] = field(default_factory=lambda: [0] * len(CATEGORIES))
    doing: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def waits_on_path(rank: int, links: Links, blames: Sequence[Blame], rows: int) -> int:
    """How much of the communication on a rank's own path was waiting for other ranks, ns. ``rows`` is the
    length of its summary table of collectives."""
    on_path = np.zeros(rows, dtype=np.int64)
    on_path[links.row] = links.on_path
    total = 0
    for blame in blames:
        if rank in blame.calls.ranks:
            column = blame.calls.ranks.index(rank)
            mine = on_path[blame.calls.rows[:, column]]
            total += int(np.minimum(mine, blame.wait[:, column]).sum())
    return total


def job_path(
    links: Mapping[int, Links],
    blames: Sequence[Blame],
    clocks: Mapping[int, Clock],
    summaries: Mapping[int, RankSummary],
) -> JobPath | None:
    """The path across ranks; None where no collective was matched between them."""
    if len(links) < 2 or not blames:
        return None
    meetings = Meetings(links, blames, clocks, summaries)
    tallies, communication, collectives = _walk(meetings, summaries)
    if not collectives:
        return None
    length = sum(tally.on_path for tally in tallies.values()) + communication
    gains, without, error = _absences(meetings, tallies, blames, length)
    ordered = sorted(tallies, key=lambda rank: (-tallies[rank].on_path, rank))
    shares = tuple(_share(rank, tallies[rank], gains.get(rank)) for rank in ordered)
    return JobPath(length, communication, collectives, shares, without, error)


def _walk(meetings: Meetings, summaries: Mapping[int, RankSummary]) -> tuple[dict[int, _Tally], int, int]:
    """Back from the last rank's end: what each rank holds, the time inside collectives, and how many."""
    links = meetings.links
    rank = max(links, key=lambda one: links[one].end_ns + meetings.correction[one])
    place = len(links[rank].row)
    tallies: dict[int, _Tally] = defaultdict(_Tally)
    communication = collectives = 0
    seen: set[tuple[int, int]] = set()
    while (rank, place) not in seen:
        seen.add((rank, place))
        _add(tallies[rank], links[rank], place, summaries[rank])
        previous = int(links[rank].previous[place])
        if previous < 0:
            break
        collectives += 1
        left = meetings.end(rank, previous)
        late, place = meetings.last_in(rank, previous)
        if late != rank:
            tallies[late].crossings += 1
        rank = late
        communication += max(left - meetings.start(rank, place), 0)
    return tallies, communication, collectives


def _add(tally: _Tally, links: Links, place: int, summary: RankSummary) -> None:
    between = links.between[place].tolist()
    total = sum(between)
    tally.on_path += total
    for category, amount in enumerate(between):
        tally.segments[category] += amount
    row = int(links.row[place]) if place < len(links.row) else -1
    if 0 <= row < len(summary.activity) and total:
        example = summary.activity_example[row] if row < len(summary.activity_example) else None
        doing = summary.activity[row]
        tally.doing[doing if example is None else f"{doing}: {example}"] += total


def _share(rank: int, tally: _Tally, gain: int | None) -> RankShare:
    segments = {name: amount for name, amount in zip(CATEGORIES, tally.segments, strict=True) if amount}
    doing = max(tally.doing.items(), key=lambda item: item[1], default=(None, 0))[0]
    return RankShare(rank, tally.on_path, gain, tally.crossings, segments, doing)


def _absences(
    meetings: Meetings, tallies: Mapping[int, _Tally], blames: Sequence[Blame], length: int
) -> tuple[dict[int, int], tuple[Without, ...], float | None]:
    """Gain by rank, the costliest rank and pair, and the error of the replay."""
    links = meetings.links.values()
    if sum(len(blame.transfer) for blame in blames) > MOST_CALLS:
        return {}, (), None
    if len(links) * max(len(one.row) for one in links) > MOST_LINKS_OF_ALL:
        return {}, (), None
    suspects = _suspects(tallies, blames)
    alone = [(rank,) for rank in suspects]
    base, *lengths = lengths_without(meetings, [(), *alone])
    gains = {rank: max(base - one, 0) for rank, one in zip(suspects, lengths, strict=True)}
    measured = meetings.length()
    error = (base - measured) / measured if measured else None
    first = max(suspects, key=lambda rank: (gains[rank], -rank))
    without = [Without((first,), gains[first])] if gains[first] else []
    pairs = [tuple(sorted((first, rank))) for rank in suspects if rank != first]
    if pairs and len(meetings.links) > 2:
        both = lengths_without(meetings, pairs)
        best = min(range(len(pairs)), key=lambda place: both[place])
        # A pair is worth naming where the second holds the job up once the first no longer does.
        if base - both[best] > 1.5 * gains[first]:
            without.append(Without(pairs[best], base - both[best]))
    return gains, tuple(without), error


def _suspects(tallies: Mapping[int, _Tally], blames: Sequence[Blame]) -> list[int]:
    """Ranks by what they hold of the path, then by how late they came."""
    late: dict[int, int] = defaultdict(int)
    for blame in blames:
        for column, rank in enumerate(blame.calls.ranks):
            late[rank] += int(blame.late[blame.last == column].sum())
    by_path = sorted(tallies, key=lambda rank: (-tallies[rank].on_path, rank))[: MOST_SUSPECTS // 2]
    by_late = sorted(late, key=lambda rank: (-late[rank], rank))
    return [*by_path, *(rank for rank in by_late if rank not in by_path)][:MOST_SUSPECTS]
