"""Ranks of several formats joined: a trace, a memory snapshot and a dump of rank 3 are one rank 3.

The richest format leads (a record, else a trace, else an Nsight export); the others add the tables that
it lacks. Nothing is read here: a joined source reads its parts when its rank's turn comes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TrineError, UnreadableInput
from .memory_categories import MEMORY_OF
from .model import MISSING, SCHEMAS, Group, Job, Quality, Rank, RankSource, Strings, Table
from .readers._names import rank_of_name

__all__ = ["PRIMACY", "join_jobs"]

#: Which format leads where a rank has several; others follow in order of name.
PRIMACY = ("trine", "kineto", "nsight", "pipeline_schedule", "memory_snapshot", "memory_timeline")

#: Tables that any format may add. The tables of a trace (device, host and what refers to their rows) stay
#: together: those of two sources say the same thing twice.
_ADDED = ("steps", "microbatches", "samples", "segments", "flight_recorder", "memory")
_OF_A_TRACE = ("device", "host", "collectives", "synchronizations", "edges")
#: Records of one job mostly lie closer than this; farther apart (ns) is worth a word ...
_APART_NS = 3600 * 10**9
#: ... and farther than this, where several runs lie in a folder, they are of different ones. A trace of a run's start
#: and a dump of its hang may well lie days apart; of files that were put together as one job the clocks may be wrong.
_OTHER_RUN_NS = 7 * 24 * 3600 * 10**9
#: Categories that only a source knows which follows tensors through the program.
_TOLD_CATEGORIES = ("parameters", "optimizer_state", "gradients", "activations")
_MEMORY_WORDS = {
    "memory_snapshot": "memory snapshot",
    "memory_timeline": "memory timeline",
    "kineto": "trace's [memory] events",
    "nsight": "Nsight export's memory events",
    "trine": "record's memory events",
}
#: Formats that state the rank in the file itself.
_STATING = ("trine", "kineto")


def join_jobs(jobs: Sequence[Job], origin: Path) -> Job:
    """One job of several formats' jobs, shape as :class:`Job`; the first in :data:`PRIMACY` leads.

    Ranks that a format knows only by the order of its files are joined where the job has one rank or as
    many as files; otherwise they are taken as the first ranks. Either way it is said.
    """
    jobs = sorted(jobs, key=_primacy)
    lead = jobs[0]
    if len(jobs) == 1 and len(set(lead.rank_ids)) == len(lead.sources):
        return replace(lead, formats=(lead.format,))
    notes: list[Quality] = []
    ranks = _sure_ranks(jobs)
    parts: dict[int, list[tuple[str, RankSource]]] = defaultdict(list)
    for job in jobs:
        for rank, source in _placed(job, ranks, notes):
            if any(format == job.format for format, _ in parts[rank]):
                message = f"{source.name} is rank {rank} too and is left out"
                notes.append(Quality("duplicate-rank", "warning", message, rank))
            else:
                parts[rank].append((job.format, replace(source, rank=rank)))
    world = _world(jobs, max(parts, default=-1), notes)
    several = any(note.id == "mixed-runs" for job in jobs for note in job.quality)
    sources = tuple(_joined(rank, parts[rank], several) for rank in sorted(parts))
    kept = [note for job in jobs for note in job.quality if note.id != "missing-ranks"]
    return Job(
        path=origin,
        format=lead.format,
        sources=sources,
        world_size=world,
        metadata={key: value for job in reversed(jobs) for key, value in job.metadata.items()},
        quality=[*kept, *notes, *_absences(jobs, parts, world)],
        formats=tuple(job.format for job in jobs),
        keep=[job.keep for job in jobs if job.keep is not None] or None,
    )


def _primacy(job: Job) -> tuple[int, str]:
    place = PRIMACY.index(job.format) if job.format in PRIMACY else len(PRIMACY)
    return place, job.format


# --- which rank is which -----------------------------------------------------------------------


def _sure(job: Job, source: RankSource) -> bool:
    """Whether a source's rank is stated by its content or its name, and not by its place in the list."""
    if rank_of_name(source.member or str(source.path)) == source.rank:
        return True
    if job.format == "trine":
        return True
    guessed = any(note.id == "rank-unknown" for note in job.quality)
    alone = len(job.sources) == 1 and not job.world_size
    return job.format in _STATING and not guessed and not alone


def _sure_ranks(jobs: Sequence[Job]) -> list[int]:
    """The ranks of the job, as far as they are stated; those of its leading format where none is."""
    sure = {source.rank for job in jobs for source in job.sources if _sure(job, source)}
    return sorted(sure or {source.rank for source in jobs[0].sources})


def _placed(job: Job, ranks: list[int], notes: list[Quality]) -> list[tuple[int, RankSource]]:
    """A format's sources, each with its rank in the whole job."""
    sure = [(source.rank, source) for source in job.sources if _sure(job, source)]
    unsure = [source for source in job.sources if not _sure(job, source)]
    free = [rank for rank in ranks if rank not in {rank for rank, _ in sure}]
    if not unsure or [source.rank for source in unsure] == ranks:
        return [(source.rank, source) for source in job.sources]
    if len(unsure) == len(free):
        how = "by the order of their names" if len(unsure) > 1 else "because it is the one that is left"
        placed = list(zip(free, unsure, strict=True))
        severity = "info"
    else:
        # A snapshot is most often taken on the first rank alone.
        placed = [(rank, source) for rank, source in zip(free or ranks, unsure, strict=False)]
        how, severity = "by assumption: put the rank into the file's name (rank_3) to be sure", "warning"
    if len(ranks) == 1 == len(unsure):
        return [*sure, *placed]  # the only file of the only rank leaves no doubt
    for rank, source in placed:
        message = f"{source.name} ({job.format}) states no rank; it is taken as rank {rank}'s {how}"
        notes.append(Quality("rank-unknown", severity, message, rank))  # type: ignore[arg-type]
    for source in unsure[len(placed) :]:
        message = f"{source.name} ({job.format}) states no rank and there is none left for it; it is left out"
        notes.append(Quality("rank-unknown", "warning", message))
    return [*sure, *placed]


def _world(jobs: Sequence[Job], highest: int, notes: list[Quality]) -> int | None:
    stated = {job.format: job.world_size for job in jobs if job.world_size}
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{format} {world}" for format, world in stated.items())
        message = f"the files state different world sizes ({said}); the largest counts"
        notes.append(Quality("world-size-disagrees", "warning", message))
    world = max(stated.values(), default=None)
    return None if world is None else max(world, highest + 1)


def _absences(
    jobs: Sequence[Job], parts: dict[int, list[tuple[str, RankSource]]], world: int | None
) -> list[Quality]:
    """Ranks without any file, and ranks that have one of a lesser format alone."""
    notes = []
    missing = [rank for rank in range(world or 0) if rank not in parts]
    if missing:
        message = f"{len(missing)} of {world} ranks have no file ({_listed(missing)}); waits are known for those present only"
        notes.append(Quality("missing-ranks", "warning", message))
    for job in jobs:
        has = {rank for rank, found in parts.items() if any(format == job.format for format, _ in found)}
        lacks = sorted(set(parts) - has)
        if lacks and has:
            message = (
                f"{job.format} files are here for ranks {_listed(sorted(has))}, none for {_listed(lacks)}"
            )
            notes.append(Quality("partial-format", "info", message))
    return notes


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# --- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """Reads a rank's parts and joins them. Picklable, as every ``RankSource.read`` is.

    With ``several``, runs lie beside each other in the folder, so what lies far away in time is of another.
    """

    sources: tuple[RankSource, ...]
    several: bool

    def __call__(self, source: RankSource) -> Rank:
        ranks: list[Rank] = []
        failed: list[tuple[RankSource, TrineError]] = []
        for part in self.sources:
            try:
                ranks.append(part.read(part))
            except TrineError as error:
                failed.append((part, error))
            except Exception as error:  # one reader's defect must not cost what the others read
                if os.environ.get("TRINE_DEBUG"):
                    raise
                failed.append((part, UnreadableInput(f"unexpected {type(error).__name__}: {error}")))
        if not ranks:
            raise failed[0][1]
        whole = ranks[0]
        for other in ranks[1:]:
            _add(whole, other, self.several)
        for part, why in failed:
            whole.note("unreadable-part", "error", f"{part.name} of this rank cannot be read: {why}")
        whole.rank = source.rank
        whole.quality = [replace(note, rank=source.rank) for note in whole.quality]
        return whole


def _joined(rank: int, parts: list[tuple[str, RankSource]], several: bool) -> RankSource:
    sources = tuple(source for _, source in parts)
    if len(sources) == 1:
        return sources[0]
    first = sources[0]
    return RankSource(rank, first.path, _Parts(sources, several), first.member, first.label)


def _add(rank: Rank, other: Rank, several: bool) -> None:
    """Give ``rank`` what ``other`` has and it lacks."""
    if _is_of_another_run(rank, other, several):
        return
    rank.quality += other.quality
    traced = other.device is not None or other.host is not None
    if traced and rank.format == "trine":
        _add_window(rank, other)
    elif traced and (rank.device is not None or rank.host is not None):
        message = f"{other.format} tells of the same work; device and host are those of {rank.format}"
        rank.note("second-source", "info", message)
    else:
        _take(rank, other, _OF_A_TRACE)
    _choose_memory(rank, other)
    _take(rank, other, _ADDED)
    rank.groups = _groups(rank.groups, other.groups)
    rank.devices = rank.devices or other.devices
    rank.windows = rank.windows or other.windows
    rank.world_size = max(rank.world_size or 0, other.world_size or 0) or None
    rank.host_name = rank.host_name or other.host_name
    rank.metadata = {**other.metadata, **rank.metadata}


def _add_window(rank: Rank, other: Rank) -> None:
    """A trace beside a record is a deep window of it."""
    if rank.windows:
        message = f"{other.format} files lie beside a record with deep windows of its own; those are used"
        rank.note("second-source", "info", message)
    else:
        rank.windows = (replace(other, rank=rank.rank, quality=[]),)


def _choose_memory(rank: Rank, other: Rank) -> None:
    """Of two sources of one rank's memory the one that knows more counts: an allocator's history (a snapshot), then a
    timeline that knows what tensors are, then a trace's ``[memory]`` events. Of host and device the device's."""
    if other.memory is None:
        return
    holder = str(rank.metadata.get(MEMORY_OF) or rank.format)
    if rank.memory is not None:
        known = np.unique(rank.memory["device"][rank.memory["device"] >= 0])
        theirs = other.memory["device"] >= 0
        if other.format == "memory_timeline" and len(known) == 1 and theirs.any():
            # A timeline does not say which device it is of; where there is one, it is that.
            other.memory.columns["device"] = np.where(theirs, known[0], other.memory["device"])
        mine, richer = _knowledge(rank, holder), _knowledge(other, other.format)
        if richer <= mine or (len(known) and not theirs.any()):
            _say_memory(rank, holder, other.format)
            return
        _say_memory(rank, other.format, holder)
        rank.memory = None
    rank.metadata = {**rank.metadata, MEMORY_OF: other.format}


def _knowledge(rank: Rank, format: str) -> int:
    if format == "memory_snapshot":
        return 3
    if format == "memory_timeline" and rank.memory is not None:
        codes = [rank.memory.strings.find(name) for name in _TOLD_CATEGORIES]
        return 2 if np.isin(rank.memory["category"], [code for code in codes if code >= 0]).any() else 0
    return 1


def _say_memory(rank: Rank, used: str, left: str) -> None:
    message = f"memory is that of the {_MEMORY_WORDS.get(used, used)}; left out: the {_MEMORY_WORDS.get(left, left)}"
    rank.note("second-source", "info", message)


def _take(rank: Rank, other: Rank, names: Iterable[str]) -> None:
    for name in names:
        table = getattr(other, name)
        if table is not None and getattr(rank, name) is None:
            setattr(rank, name, _adopted(table, rank.strings))


def _adopted(table: Table, strings: Strings) -> Table:
    """The table with its texts in another pool."""
    if table.strings is strings:
        return table
    codes = np.array([*(strings.code(text) for text in table.strings.values), -1], dtype=np.int32)
    columns = {
        name: codes[table[name]] if kind == "text" else table[name]
        for name, kind in SCHEMAS[table.name].items()
    }
    return Table(table.name, columns, strings)


def _groups(own: tuple[Group, ...], others: tuple[Group, ...]) -> tuple[Group, ...]:
    """All groups; what one source knows of a group completes what the other does."""
    merged = {(group.id, group.ranks): group for group in own}
    for group in others:
        same = next((key for key in merged if key[0] == group.id and key[1] in (group.ranks, ())), None)
        if same is None:
            merged[group.id, group.ranks] = group
        else:
            known = merged[same]
            merged[same] = replace(
                known,
                name=known.name or group.name,
                description=known.description or group.description,
                ranks=known.ranks or group.ranks,
            )
    return tuple(merged.values())


def _is_of_another_run(rank: Rank, other: Rank, several: bool) -> bool:
    """Files of one folder may still be of two runs; their times tell, and it is said."""
    mine, theirs = _span(rank), _span(other)
    if mine is None or theirs is None:
        return False
    apart = max(mine[0] - theirs[1], theirs[0] - mine[1])
    if apart > _APART_NS:
        # In whole days where it is days, so that all ranks say the same.
        hours = apart / 3.6e12
        words = f"{hours / 24:,.0f} days" if hours >= 48 else f"{hours:.0f} hours"
        if several and apart > _OTHER_RUN_NS:
            message = (
                f"several runs lie here: shown is that of the {rank.format} files; the {other.format} files lie about {words} "
                "away and are left out; give them alone to see them"
            )
        else:
            message = f"times of {other.format} lie about {words} from those of {rank.format}: check that they are of one run"
        rank.note("times-apart", "warning", message)
    return several and apart > _OTHER_RUN_NS


def _span(rank: Rank) -> tuple[int, int] | None:
    """First and last time of a rank's tables, ns; ``None`` where they have none that is a date."""
    times: list[Any] = []
    for name in ("steps", "device", "host", "collectives", "memory", "samples", "flight_recorder"):
        table: Table | None = getattr(rank, name)
        if table is None or not len(table):
            continue
        column = next(table[key] for key in ("start_ns", "time_ns", "created_ns") if key in table.columns)
        times += [column[column != MISSING]]
    known = np.concatenate(times) if times else np.zeros(0, dtype=np.int64)
    # A clock that began with the machine or the run says nothing about the date.
    known = known[known > 10**18]
    return (int(known.min()), int(known.max())) if len(known) else None
