"""Nsight Systems: SQLite exports of schema 2.9 to 3.25, whatever tables and columns they have.

    nsys export --type sqlite report.nsys-rep
    trine analyze report.sqlite

A report holds one process or all of a node. What it needs and what each table becomes is in ``docs/nsight.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UnreadableInput
from ..model import MISSING, Job, Quality, Rank, RankSource, Strings, Table
from ._kineto_tables import launches, mark_blocking_copies, step_of
from ._names import natural, ranks_of_names, short_names
from ._nsight_collectives import GroupRanks, collectives_of
from ._nsight_database import MAGIC, Database, constant, opened
from ._nsight_facts import describe, say_what_was_odd, zero_ns
from ._nsight_nesting import enclosing_rows
from ._nsight_payloads import NcclPayload, Payloads
from ._nsight_ranges import Ranges, read_ranges
from ._nsight_ranks import (
    FoundExport,
    Place,
    devices_of,
    explore,
    known_tables,
    read_communicators,
)
from ._nsight_steps import steps_of_annotations
from ._nsight_tables import Calls, Columns, read_calls, read_memory, read_metrics, read_waits
from ._nsight_work import read_work

__all__ = ["FORMAT", "open_job", "open_paths", "read_source", "recognizes"]

FORMAT = "nsight"

#: Captures of one run do not begin ten minutes apart.
_APART_NS = 600 * 10**9


def recognizes(path: Path) -> bool:
    """Whether a file is an export: an SQLite database with tables of Nsight Systems. Never raises."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if not head.startswith(MAGIC):
            return False
        with opened(path) as database:
            return bool(known_tables(database))
    except UnreadableInput:
        return b"CUPTI_ACTIVITY" in head or b"NVTX_EVENTS" in head or b"META_DATA_EXPORT" in head
    except OSError:
        return False


def open_job(path: Path) -> Job:
    """The job of one export. Raises ``UnreadableInput`` where it holds nothing that can be shown."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The ranks of all exports together; ``origin`` is what the user named."""
    notes: list[Quality] = []
    found = _one_run(_explored(paths, notes), notes)
    for each in found:
        notes += each.notes
    ranked = _numbered(found, notes)
    sources = tuple(
        RankSource(rank, path, read_source, str(place)) for rank, (path, place) in sorted(ranked.items())
    )
    stated = max((each.world_size for each in found if each.world_size), default=None)
    world = (
        stated
        if stated is not None and stated > max(ranked)
        else (max(ranked) + 1 if len(ranked) > 1 else stated)
    )
    return Job(origin, FORMAT, sources, world, quality=notes)


def _explored(paths: Sequence[Path], notes: list[Quality]) -> list[FoundExport]:
    """The exports that can be read; the others are noted while one can."""
    found: list[FoundExport] = []
    refused: list[UnreadableInput] = []
    for path in sorted(paths, key=lambda path: natural(str(path))):
        try:
            found.append(explore(path))
        except UnreadableInput as error:
            refused.append(error)
    if not found:
        raise refused[0]
    notes += [Quality("unreadable-file", "error", str(error)) for error in refused]
    return found


def _one_run(found: list[FoundExport], notes: list[Quality]) -> list[FoundExport]:
    """The exports that were captured together: those of another hour are another run's."""
    runs: list[list[FoundExport]] = []
    for each in sorted(found, key=lambda one: (one.start_ns is None, one.start_ns or 0)):
        last = runs[-1][-1] if runs else None
        together = last is not None and (
            last.start_ns == each.start_ns
            if last.start_ns is None or each.start_ns is None
            else each.start_ns - last.start_ns < _APART_NS
        )
        if together:
            runs[-1].append(each)
        else:
            runs.append([each])
    best = max(runs, key=lambda run: (sum(len(one.places) for one in run), sum(one.size for one in run)))
    if len(runs) > 1:
        names = [str(each.path) for each in found]
        others = [str(each.path) for each in found if each not in best]
        text = (
            f"several runs lie here ({len(runs)}, by their times): shown is {short_names([str(one.path) for one in best], names, 2)}; "
            f"left out {'is' if len(others) == 1 else 'are'} {len(others)}: {short_names(others, names)}; give one of them alone to see it"
        )
        notes.append(Quality("mixed-runs", "warning", text))
    return sorted(best, key=lambda one: natural(str(one.path)))


def _numbered(found: list[FoundExport], notes: list[Quality]) -> dict[int, tuple[Path, Place]]:
    """Rank → where it is: as stated, else by files' names, else in order."""
    everything = [(each.path, place, rank) for each in found for place, rank in each.places]
    ranks = [rank for _, _, rank in everything]
    if all(rank is not None for rank in ranks) and len(set(ranks)) == len(ranks):
        return {rank: (path, place) for path, place, rank in everything if rank is not None}
    if len(everything) == 1:
        return {0: everything[0][:2]}
    if len(everything) == len(found):
        named = ranks_of_names([str(path) for path, _, _ in everything])
        if named is not None:
            notes.append(Quality("rank-unknown", "info", "ranks are taken from the names of the exports"))
            return {rank: one[:2] for rank, one in zip(named, everything, strict=True)}
    text = "nothing in the export states ranks; they are numbered in order of files, then of devices"
    notes.append(Quality("rank-unknown", "info", text))
    return {rank: one[:2] for rank, one in enumerate(everything)}


# --- one rank ------------------------------------------------------------------------------------


def read_source(source: RankSource) -> Rank:
    """Read one rank of an export."""
    place = Place.parse(source.member or str(Place(None, None)))
    with opened(source.path) as database:
        return _read(database, place, source)


def _read(database: Database, place: Place, source: RankSource) -> Rank:
    strings = Strings()
    zero = zero_ns(database)
    rank = Rank(rank=source.rank, source=str(source.path), format=FORMAT, strings=strings)
    describe(rank, database, place)
    work = read_work(database, place.process, place.device, strings)
    if work.columns:
        rank.device = _table("device", work.columns, strings, zero)
        work.columns.clear()
    calls = read_calls(database, place.process, strings)
    ranges = read_ranges(database, place.process, strings, Payloads(database))
    payloads = _fill_host(rank, calls, ranges, zero)
    if rank.device is not None and rank.host is not None:
        rank.device.columns["launch"] = launch = launches(rank.device, rank.host).rows
        mark_blocking_copies(rank.device, rank.host)
        if rank.steps is not None:
            begun = rank.host["start_ns"][np.maximum(launch, 0)]
            rank.device.columns["step"] = np.where(launch >= 0, step_of(begun, rank.steps), MISSING)
    members = _members(database, source.rank)
    sharing = devices_of(database, place)
    rank.collectives, rank.groups = collectives_of(rank.device, rank.host, payloads, members, sharing)
    waits = read_waits(database, place.process, strings)
    memory = read_memory(database, place.process, place.device, strings)
    metrics = read_metrics(
        database, place.device if place.device is not None else _main_device(rank), strings
    )
    for name, columns in (("synchronizations", waits), ("memory", memory), ("samples", metrics)):
        if columns is not None:
            setattr(rank, name, _table(name, columns, strings, zero))
    say_what_was_odd(rank, database, place, work, calls, ranges)
    return rank


def _main_device(rank: Rank) -> int | None:
    """The device that most of a rank's work ran on."""
    if rank.device is None or not len(rank.device):
        return None
    found, counts = np.unique(rank.device["device"], return_counts=True)
    return int(found[counts.argmax()])


def _table(name: str, columns: Columns, strings: Strings, zero: int) -> Table:
    """Columns as a table, its times moved to Unix time."""
    for column in ("start_ns", "end_ns", "time_ns"):
        if column in columns:
            columns[column] += zero
    return Table(name, columns, strings)


def _fill_host(rank: Rank, calls: Calls, ranges: Ranges, zero: int) -> dict[int, NcclPayload]:
    """Runtime calls and ranges as one table in order of start; returns host row → payload."""
    count = len(calls.columns["start_ns"]) if calls.columns else 0
    if not count + len(ranges):
        return {}
    columns = _joined(calls.columns, ranges.columns, count)
    order = np.lexsort((-columns["end_ns"], columns["start_ns"]))
    for name in columns:
        columns[name] = columns[name][order]
    # The lowest bits are the thread's number; those above are the process and are the same for all.
    columns["thread"] = np.where(columns["thread"] == MISSING, 0, columns["thread"] & 0xFFFFFF)
    columns["parent"] = enclosing_rows(columns["thread"], columns["start_ns"], columns["end_ns"])
    for name, nothing in _NEVER.items():
        columns[name] = constant(nothing, len(order))
    rank.host = _table("host", columns, rank.strings, zero)
    rank.steps, named = steps_of_annotations(rank.host)
    if rank.steps is not None:
        rank.host.columns["step"] = step_of(rank.host["start_ns"], rank.steps)
        rank.note("steps-from-annotations", "info", f"steps are the NVTX ranges called {named!r}")
    if not ranges.payloads:
        return {}
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return {int(place[count + row]): payload for row, payload in ranges.payloads.items()}


#: What an export says of no call and no range: one value for all rows, so the columns take no memory.
_NEVER = {
    "module": np.int32(-1),
    "stack": np.int32(-1),
    "types": np.int32(-1),
    "forward_thread": np.int64(MISSING),
    "flops": np.float64("nan"),
}
_MISSING_HERE = {"sequence": np.int64(MISSING), "correlation": np.int64(MISSING), "shapes": np.int32(-1)}


def _joined(calls: Columns, ranges: Columns, count: int) -> Columns:
    """Columns of both, which are emptied on the way."""
    joined: Columns = {}
    length = len(ranges["start_ns"])
    for name in (*list(ranges), "correlation"):
        first = calls.pop(name, None)
        if first is None:
            first = np.full(count, _MISSING_HERE.get(name, np.int64(0)))
        second = ranges.pop(name, None)
        if second is None:
            second = np.full(length, _MISSING_HERE[name])
        joined[name] = np.concatenate((first, second))
    return joined


def _members(database: Database, rank: int) -> GroupRanks:
    """Communicator → global ranks, of those whose ranks are the world's own."""
    communicators = read_communicators(database)
    world = communicators.world()
    if world is None:
        return {}
    by_process = {member: rank for rank, member in communicators.members[world].items()}
    found: GroupRanks = {}
    for number, size in communicators.size.items():
        members = communicators.members[number]
        if number == world or size == communicators.size[world]:
            found[number] = tuple(range(size))
        else:
            found[number] = tuple(by_process.get(members.get(place, (-1, -1)), -1) for place in range(size))
    return {number: ranks for number, ranks in found.items() if -1 not in ranks}
