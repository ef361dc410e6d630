"""Which files make a job: one run, each rank once. What does not belong is left out, and said.

Where files do not state their ranks, the most certain part of their names that tells them apart does,
and then the order of names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from ..errors import UnreadableInput
from ..model import Job, Quality, Rank, RankSource
from ._kineto_files import FoundTrace, files_below, found_in
from ._names import natural, rank_of_name, ranks_of_names, short_names
from ._strangers import name_of

__all__ = ["job_of_paths", "say_what_is_missing"]

#: Files of which a refusal says what each is.
_MOST_SAID = 4

Read = Callable[[RankSource], Rank]


def job_of_paths(paths: Sequence[Path], origin: Path, read: Read) -> Job:
    """The largest consistent set of ranks in what lies at ``paths``.

    Raises ``UnreadableInput`` where there is no trace at all.
    """
    notes: list[Quality] = []
    found = [each for path in paths for each in found_in(path, notes)]
    if not found:
        raise UnreadableInput(_nothing_found(paths, origin, notes))
    found = _one_run(found, notes)
    ranked = _ranks(found, notes)
    sources = tuple(RankSource(rank, each.path, read, each.member) for rank, each in sorted(ranked.items()))
    world = _world_size(found, max(ranked), notes)
    job = Job(origin, "kineto", sources, world, quality=notes)
    say_what_is_missing(job)
    return job


def say_what_is_missing(job: Job) -> None:
    """Note the ranks of a job's world that have no trace."""
    missing = job.missing_ranks
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        text = f"{len(missing)} of {job.world_size} ranks have no trace ({some}); waits are known for those present only"
        job.quality.append(Quality("missing-ranks", "warning", text))


def _world_size(found: list[FoundTrace], highest: int, notes: list[Quality]) -> int | None:
    """The world that the files state, or what their ranks imply; ``None`` for one silent file."""
    world = max((each.world_size for each in found if each.world_size), default=None)
    if world is None and len(found) > 1:
        world = highest + 1
        text = f"no file states the world size; {world} is taken from the highest rank"
        notes.append(Quality("world-size-unknown", "info", text))
    if world is not None and highest >= world:
        text = f"rank {highest} lies outside the stated world of {world}"
        notes.append(Quality("rank-beyond-world", "warning", text))
        world = highest + 1
    return world


def _nothing_found(paths: Sequence[Path], origin: Path, notes: list[Quality]) -> str:
    stranger = name_of(paths[0]) if len(paths) == 1 else None
    if stranger is not None:
        holds = "holds" if paths[0].is_dir() else "is"
        return f"{paths[0]} {holds} {stranger}, which this version does not read; give a trace of torch.profiler or a record"
    if notes and len(paths) == 1 and not paths[0].is_dir():
        if notes[0].id == "not-a-trace":
            return f"{paths[0]} is not a trace (no traceEvents in it); export one with torch.profiler's export_chrome_trace"
        return notes[0].message
    way_out = "export one with torch.profiler's export_chrome_trace"
    folders = [path for path in paths if path.is_dir()]
    if len(paths) == 1 and not folders:  # an archive
        return f"{origin} holds no trace (looked for *.json and *.json.gz); {way_out}"
    # What lies there and is no trace is told: the user may have meant it.
    looked = list(
        islice(
            (each for path in paths for each in ([path] if path not in folders else files_below(path))),
            _MOST_SAID + 1,
        )
    )
    if not looked:
        return f"{origin} holds no trace (looked for *.json and *.json.gz); {way_out}"
    said = [f"{path} {_what(path, notes)}" for path in looked[:_MOST_SAID]]
    more = "; and more" if len(looked) > _MOST_SAID else ""
    holds = f"{origin} holds no trace" if folders else "none of the files is a trace"
    return f"{holds} ({'; '.join(said)}{more}); {way_out}"


def _what(path: Path, notes: Sequence[Quality]) -> str:
    """What a file is that is no trace, after its name."""
    stranger = name_of(path)
    if stranger is not None:
        return f"is {stranger}"
    named = next(
        (note for note in notes if note.message.startswith(f"{path} ") or f" {path}:" in note.message), None
    )
    if named is None or named.id == "not-a-trace":
        return "has no traceEvents in it"
    if named.id == "empty-file":
        return "is empty"
    return named.message.removeprefix(f"{path} ").split(";")[0]


def _one_run(found: list[FoundTrace], notes: list[Quality]) -> list[FoundTrace]:
    """The largest group of files that can be one run: one world size, times that belong together, each rank once."""
    if len(found) == 1:
        return found
    groups: list[list[FoundTrace]] = []
    by_world: dict[int | None, list[FoundTrace]] = defaultdict(list)
    for each in found:
        by_world[each.world_size].append(each)
    unknown = by_world.pop(None, [])
    if not by_world:
        by_world[None] = unknown
    elif unknown:
        max(by_world.values(), key=len).extend(unknown)
    for files in by_world.values():
        groups += _windows(files)
    best = max(
        groups, key=lambda group: (len(group), sum(each.size for each in group), group[0].start_ns or 0)
    )
    if len(groups) > 1:
        names = [each.name for each in found]
        left = [each.name for each in found if each not in best]
        why = "world sizes" if len(by_world) > 1 else "times"
        notes.append(
            Quality(
                "mixed-runs",
                "warning",
                f"several runs lie here ({len(groups)}, by their {why}): shown is "
                f"{short_names([each.name for each in best], names, 2)}; left out {'is' if len(left) == 1 else 'are'} "
                f"{len(left)}: {short_names(left, names)}; give the files of one run alone to see it",
            )
        )
    return best


_APART_NS = (
    600 * 10**9
)  # clocks of one job's hosts do not differ by ten minutes, and no window lasts that long


def _windows(files: list[FoundTrace]) -> list[list[FoundTrace]]:
    """Files by time: a new window begins where a rank comes again, or after a long pause."""
    timed = sorted((each for each in files if each.start_ns is not None), key=lambda each: each.start_ns or 0)
    untimed = [each for each in files if each.start_ns is None]
    windows: list[list[FoundTrace]] = []
    seen: dict[int, FoundTrace] = {}
    for each in timed:
        rank = each.rank if each.rank is not None else rank_of_name(each.name)
        last = windows[-1][-1] if windows else None
        apart = last is None or (each.start_ns or 0) - (last.start_ns or 0) > _APART_NS
        again = rank is not None and rank in seen and seen[rank].start_ns != each.start_ns
        if apart or again:
            windows.append([])
            seen = {}
        windows[-1].append(each)
        if rank is not None:
            seen[rank] = each
    if untimed:
        if windows:
            max(windows, key=len).extend(untimed)
        else:
            windows.append(untimed)
    return windows


def _ranks(found: list[FoundTrace], notes: list[Quality]) -> dict[int, FoundTrace]:
    """Rank → file, each rank once."""
    if len(found) == 1:
        only = found[0]
        # Of one file alone a number in its name may be anything; only "rank3" is a rank.
        named = rank_of_name(only.name, certain=True)
        if only.rank is None and named is None:
            text = f"{only.name} does not state its rank (distributedInfo.rank); it is read as rank 0"
            notes.append(Quality("rank-unknown", "info", text))
        return {next((rank for rank in (only.rank, named) if rank is not None), 0): only}
    stated: dict[int, list[FoundTrace]] = defaultdict(list)
    silent = []
    for each in found:
        if each.rank is not None:
            stated[each.rank].append(each)
        else:
            silent.append(each)
    ranked = {rank: _one_of(rank, files, notes) for rank, files in stated.items()}
    if silent:
        _name_ranks(silent, ranked, notes)
    return ranked


def _one_of(rank: int, files: list[FoundTrace], notes: list[Quality]) -> FoundTrace:
    best = max(files, key=lambda each: each.size)
    for other in files:
        if other is not best:
            notes.append(
                Quality(
                    "duplicate-rank",
                    "warning",
                    f"{other.name} is rank {rank} too; the larger file {best.name} is used",
                    rank,
                )
            )
    return best


def _name_ranks(silent: list[FoundTrace], ranked: dict[int, FoundTrace], notes: list[Quality]) -> None:
    """Ranks of files that do not state one: from names when those tell them apart, else in order of name."""
    named = ranks_of_names([each.name for each in silent])
    if named is not None and not set(named) & set(ranked):
        for rank, each in zip(named, silent, strict=True):
            ranked[rank] = each
        how = "ranks are taken from file names"
    else:
        free = (rank for rank in range(len(silent) + len(ranked) + 1) if rank not in ranked)
        ordered = sorted(silent, key=lambda each: natural(each.name))
        for each in ordered:
            rank = next(free)
            ranked[rank] = each
        how = "ranks are numbered in order of file names"
    notes.append(Quality("rank-unknown", "info", f"{len(silent)} files do not state their rank; {how}"))
