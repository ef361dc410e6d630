"""Kineto traces: what ``torch.profiler`` exports, torch 1.8 to today, CUDA, ROCm, XPU and CPU.

    job = open_job(Path("traces"))      a file, a folder of ranks, an archive
    rank = read_file(Path("rank0.json.gz"))

Facts about the format that the reader leans on are in ``docs/reading.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..model import Job, Quality, Rank, RankSource
from ._kineto_files import is_candidate, open_source
from ._kineto_merged import may_hold_several, ranks_of_parts
from ._kineto_runs import job_of_paths, say_what_is_missing
from ._kineto_trace import Trace, parse, rank_of

__all__ = ["FORMAT", "open_job", "open_paths", "read_file", "read_source", "recognizes"]

FORMAT = "kineto"


def recognizes(path: Path) -> bool:
    """Whether the path may hold Kineto traces: a trace file by name or content, an archive, a folder of such."""
    return is_candidate(path)


def open_job(path: Path) -> Job:
    """The job of a file, a folder or an archive. Raises ``UnreadableInput`` when it holds no trace."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The job that several paths together make; ``origin`` is what the user named.

    One file in which the traces of several processes were put together makes a rank of each.
    """
    job = job_of_paths(paths, origin, read_source)
    if len(job.sources) == 1 and may_hold_several(job.sources[0].path, job.sources[0].member):
        return _apart(job)
    return job


def read_source(source: RankSource) -> Rank:
    """Read the rank of a source, of an archive's member as well."""
    with open_source(source.path, source.member) as file:
        return _main_rank(parse(file, _where(source)), source.rank)


def read_file(path: Path, rank: int | None = None) -> Rank:
    """Read one trace file, ``.json`` or gzip of it.

    ``rank`` is what to call it; by default what the file says, else 0. Raises ``UnreadableInput``
    where nothing can be shown; all lesser faults become notes in ``Rank.quality``.
    """
    with open_source(path, None) as file:
        return _main_rank(parse(file, str(path)), rank)


def _where(source: RankSource) -> str:
    return f"{source.path}:{source.member}" if source.member else str(source.path)


def _main_rank(trace: Trace, rank: int | None) -> Rank:
    """The rank of a file; where several processes share it, of the one that did most, which is said."""
    number = max(range(len(trace.parts)), key=lambda index: len(trace.parts[index].rows.get("host", ())))
    result = rank_of(trace, number, rank)
    if len(trace.parts) > 1:
        others = ", ".join(part.process for part in trace.parts[:9] if part is not trace.parts[number])
        message = (
            f"{trace.where} holds {len(trace.parts)} processes; this is process {trace.parts[number].process}, and what "
            f"the others ({others}) did is left out; load the file alone to see each as a rank"
        )
        result.note("merged-file", "warning", message)
    return result


# --- one file of several processes -----------------------------------------------------------------


class Held:
    """Ranks that were read while a job was opened, each for its first reader. Empty on arrival in another process."""

    def __init__(self, ranks: dict[int, Rank] | None = None) -> None:
        self._ranks = ranks or {}

    def take(self, number: int) -> Rank | None:
        """The rank of a part, once."""
        return self._ranks.pop(number, None)

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()


def _read_part(source: RankSource, number: int, held: Held) -> Rank:
    found = held.take(number)
    if found is not None:
        return found
    with open_source(source.path, source.member) as file:
        return rank_of(parse(file, _where(source)), number, source.rank)


def _apart(job: Job) -> Job:
    """The job of a file that seems to hold several processes, which it is read for."""
    source = job.sources[0]
    with open_source(source.path, source.member) as file:
        trace = parse(file, _where(source))
    if len(trace.parts) == 1:
        held = Held({0: rank_of(trace, 0, source.rank)})
        return replace(job, sources=(replace(source, read=partial(_read_part, number=0, held=held)),))
    devices = [frozenset(trace.devices(part)) for part in trace.parts]
    numbers, how = ranks_of_parts(trace.parts, trace.columns.labels, devices)
    parts = sorted(zip(numbers, range(len(numbers)), strict=True))
    held = Held({number: rank_of(trace, number, rank) for rank, number in parts})
    sources = tuple(
        RankSource(rank, source.path, partial(_read_part, number=number, held=held), source.member)
        for rank, number in parts
    )
    message = (
        f"{trace.where} holds the traces of {len(parts)} processes ({', '.join(part.process for part in trace.parts[:8])}); "
        f"each is read as a rank, numbered {how}"
    )
    notes = [note for note in job.quality if note.id not in ("missing-ranks", "rank-beyond-world")]
    world = max(job.world_size or 0, max(numbers) + 1)
    job = replace(job, sources=sources, world_size=world, quality=notes)
    job.quality.append(Quality("merged-file", "warning", message))
    say_what_is_missing(job)
    return job
