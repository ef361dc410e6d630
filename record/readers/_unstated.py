"""The job of files that do not state their rank: memory snapshots and exported timelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..model import Job, Quality, Rank, RankSource
from ._names import rank_of_name, ranks_of_names

__all__ = ["job_of_unstated"]


def job_of_unstated(
    paths: Sequence[Path],
    origin: Path,
    format: str,
    read: Callable[[RankSource], Rank],
    what: str,
) -> Job:
    """A rank a file, numbered by the files' names, else by their order; ``what`` names the files in the note."""
    notes: list[Quality] = []
    if len(paths) == 1:
        named = rank_of_name(str(paths[0]), certain=True)
        ranks = [named if named is not None else 0]
    else:
        found = ranks_of_names([str(path) for path in paths])
        ranks = found if found is not None else list(range(len(paths)))
        how = "taken from file names" if found is not None else "numbered in order of file names"
        notes.append(Quality("rank-unknown", "info", f"{what} do not state their rank; ranks are {how}"))
    pairs = sorted(zip(ranks, paths, strict=True), key=lambda pair: pair[0])
    sources = tuple(RankSource(rank, path, read) for rank, path in pairs)
    return Job(origin, format, sources, None, quality=notes)
