"""What the worker process runs: read, analyse, and reduce to what a page needs. All picklable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trine.dashboard.lanes import RankLanes, build

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis

__all__ = ["analyse_run", "rank_lanes"]

#: Below this, starting a pool of processes costs more than reading in one.
_SMALL_BYTES = 8 * 2**20


def analyse_run(path: str, steps: str, size_bytes: int) -> Analysis:
    """``trine.analyze(trine.load(path), steps)``."""
    from trine.analyzers import analyze
    from trine.record import load

    return analyze(load(Path(path)), steps=steps, workers=1 if size_bytes < _SMALL_BYTES else None)


def rank_lanes(path: str, rank: int) -> RankLanes:
    """The timeline of one rank."""
    from trine.record import load

    return build(load(Path(path)).rank(rank))
