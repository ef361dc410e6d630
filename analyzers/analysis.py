"""From a job to its analysis: read and reduce every rank, join them, diagnose."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trine.record.errors import TrineError, UnreadableInput, UsageError
from trine.record.hardware import usable_cores
from trine.record.loading import load
from trine.record.model import Job, Quality, Rank, RankSource

from .conclusion import conclude
from .diagnose import diagnose
from .pool import Outcome, reduce_in_pool, reduce_source
from .results import Analysis, RankSummary
from .selection import Selection, parse_selection

__all__ = ["analyze"]

#: Bytes of input from which a pool pays: two workers need half a second to start, in which one process
#: reads about 50 MB of plain JSON; half of the reading must be longer than that.
_WORTH_A_POOL = 100_000_000
#: How much larger a trace is than its gzip file.
_COMPRESSION = 15


def analyze(
    job: Job | str | Path | Sequence[str | Path],
    steps: str = "complete",
    workers: int | None = None,
    progress: bool = False,
    convention: str | None = None,
    scheduler: str | None = None,
) -> Analysis:
    """Analyse a job: every rank by itself, then all together, then what to do about it.

    Args:
        job: what :func:`trine.load` returned, or what it takes: a path, a URL, a list of them.
        steps: ``complete``, ``all``, or step numbers as ``3:8`` (the end excluded).
        workers: processes that read ranks; by default as many as pay, at most one a processor.
        progress: a bar on standard error while ranks are read, when that is a terminal.
        convention: how MFU counts model FLOPs: ``counted``, ``palm``, ``megatron``, ``narayanan``
            or ``6n``; without it a range over all that are known.
        scheduler: the address of a Dask scheduler whose workers read the ranks instead of processes here
            (``tcp://host:8786``); needs the extra ``dask``.

    Raises ``UsageError`` when ``job`` is nothing of the kind, when ``steps`` cannot be parsed or names no step of any rank, and
    ``UnreadableInput`` when no rank can be read. A rank that cannot be read is named under
    ``data_quality`` and counts as missing.
    """
    selection = parse_selection(steps)
    job = _loaded(job)
    if not job.sources:
        raise UnreadableInput(
            f"{job.path} holds no rank to analyse; give a trace, a folder of traces or a record"
        )
    if scheduler is not None:
        from .scheduler import reduce_on_dask

        outcomes = reduce_on_dask(job.sources, selection, scheduler)
    else:
        outcomes = _outcomes(job, selection, _workers(job, workers))
    if progress and len(job.sources) > 1 and sys.stderr.isatty():
        outcomes = _shown(outcomes, len(job.sources))
    summaries, notes = _sorted_out(job, list(outcomes))
    return diagnose(
        conclude(replace(job, quality=[*job.quality, *notes]), summaries, selection, convention=convention)
    )


def _loaded(job: Any) -> Job:
    """The job itself, or the one at these paths."""
    if isinstance(job, Job):
        return job
    several = isinstance(job, list | tuple)
    paths = [Path(each) if isinstance(each, os.PathLike) else each for each in (job if several else [job])]
    for each in paths:
        if not isinstance(each, str | Path):
            hint = "; of a rank, give its job: job.only((0,))" if isinstance(each, Rank) else ""
            raise UsageError(
                "trine.analyze takes what trine.load returned, a path or a list of paths, "
                f"not {type(each).__name__}{hint}"
            )
    return load(paths)


def _outcomes(job: Job, selection: Selection, workers: int) -> Iterator[tuple[RankSource, Outcome]]:
    if workers > 1:
        yield from reduce_in_pool(job.sources, selection, workers)
    else:
        for source in job.sources:
            yield source, reduce_source(source, selection)


def _sorted_out(
    job: Job, outcomes: list[tuple[RankSource, Outcome]]
) -> tuple[list[RankSummary], list[Quality]]:
    summaries = [outcome for _, outcome in outcomes if not isinstance(outcome, TrineError)]
    failed = sorted(
        ((source.rank, outcome) for source, outcome in outcomes if isinstance(outcome, TrineError)),
        key=lambda item: item[0],
    )
    if not summaries:
        first = failed[0][1]
        if len(failed) == 1 or all(isinstance(error, UsageError) for _, error in failed):
            raise first
        raise UnreadableInput(
            f"none of the {len(failed)} ranks of {job.path} can be read; rank {failed[0][0]}: {first}"
        )
    return summaries, [_note(rank, error) for rank, error in failed]


def _note(rank: int, error: TrineError) -> Quality:
    if isinstance(error, UsageError):  # the selection names steps of other ranks only
        return Quality("rank-without-steps", "warning", str(error), rank)
    return Quality("unreadable-rank", "error", f"rank {rank}: {error}", rank)


def _workers(job: Job, asked: int | None) -> int:
    if asked is not None:
        if asked < 1:
            raise UsageError(f"workers must be at least 1, not {asked}")
        return min(asked, len(job.sources))
    if len(job.sources) < 2 or _input_bytes(job) < _WORTH_A_POOL:
        return 1
    return min(
        usable_cores(),
        len(job.sources),
    )


def _input_bytes(job: Job) -> int:
    """About how much JSON must be decoded."""
    total = 0
    for path in {source.path for source in job.sources}:
        packed = path.suffix in (".gz", ".tgz")
        total += _size(path) * (_COMPRESSION if packed else 1)
    return total


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(_size(inner) for inner in path.iterdir())
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it will say what is wrong


def _shown(
    outcomes: Iterable[tuple[RankSource, Outcome]], total: int
) -> Iterator[tuple[RankSource, Outcome]]:
    from rich.console import Console
    from rich.progress import track

    yield from track(
        outcomes, description="reading ranks", total=total, console=Console(stderr=True), transient=True
    )
