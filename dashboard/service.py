"""The dashboard's back room: which runs there are, and what is known of each, without ever blocking long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trine.dashboard.background import Background, Outcome
from trine.dashboard.catalogue import Catalogue, Run
from trine.dashboard.lanes import RankLanes
from trine.dashboard.live import Feed, Feeds
from trine.dashboard.tasks import analyse_run, rank_lanes

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis

__all__ = ["Service"]

#: The list of runs analyses by itself what is smaller than this; larger ones wait to be opened.
_UNASKED_BYTES = 64 * 2**20
_UNASKED_RUNS = 40

_NOW, _SOON, _SOMETIME = 0, 1, 9


class Service:
    """Catalogue, background work and live feeds behind one door. Thread-safe."""

    def __init__(
        self,
        roots: Sequence[Path],
        background: Background | None = None,
        *,
        analyse: Callable[[str, str, int], Analysis] = analyse_run,
        read: Callable[[str, int], RankLanes] = rank_lanes,
    ) -> None:
        """``analyse`` and ``read`` run in the worker process, so they must be picklable.

        Raises ``UnreadableInput`` when a root does not exist.
        """
        self.catalogue = Catalogue(roots)
        self.background = background or Background()
        self._analyse_run, self._read_lanes = analyse, read
        self._feeds = Feeds()

    def analysis(self, run: Run, steps: str = "complete") -> Outcome:
        """The analysis of a run that somebody looks at; ``value`` is an ``Analysis``."""
        return self._analyse(run, steps, _NOW)

    def unasked(self, runs: Sequence[Run]) -> dict[str, Outcome]:
        """What is known of listed runs; small ones are analysed when nothing else is to do."""
        known: dict[str, Outcome] = {}
        for position, run in enumerate(runs):
            if position < _UNASKED_RUNS and run.size_bytes <= _UNASKED_BYTES:
                known[run.id] = self._analyse(run, "complete", _SOMETIME + position)
            else:
                outcome = self.background.peek(("analysis", run.id, "complete"))
                if outcome is not None:
                    known[run.id] = outcome
        return known

    def _analyse(self, run: Run, steps: str, priority: int) -> Outcome:
        return self.background.request(
            ("analysis", run.id, steps),
            run.fingerprint,
            self._analyse_run,
            str(run.path),
            steps,
            run.size_bytes,
            priority=priority,
        )

    def lanes(self, run: Run, rank: int, wait_s: float = 0.0) -> Outcome:
        """The timeline of one rank; ``value`` is a :class:`~trine.dashboard.lanes.RankLanes`."""
        return self.background.request(
            ("lanes", run.id, rank),
            run.fingerprint,
            self._read_lanes,
            str(run.path),
            rank,
            priority=_SOON,
            wait_s=wait_s,
        )

    def shift_ns(self, run: Run, lanes: RankLanes, base: RankLanes) -> float:
        """What to add to a rank's times to have them from the run's time zero: the lowest rank's first span.

        Integers until the difference is small enough for a float64 to hold it exactly.
        """
        return float(lanes.origin_ns + self.clock_offset_ns(run, lanes.rank) - base.origin_ns)

    def clock_offset_ns(self, run: Run, rank: int) -> int:
        """The rank's clock offset by the analysis, 0 while it is unknown."""
        outcome = self.background.peek(("analysis", run.id, "complete"))
        analysis: Analysis | None = outcome.value if outcome is not None else None
        for known in analysis.ranks if analysis is not None else ():
            if known.rank == rank:
                return known.clock_offset_ns or 0
        return 0

    def lowest_rank(self, run: Run) -> int | None:
        """The lowest rank that is present, by any analysis of the run."""
        for steps in ("complete", "all"):
            outcome = self.background.peek(("analysis", run.id, steps))
            if outcome is not None and outcome.value is not None and outcome.value.source.ranks:
                return int(min(outcome.value.source.ranks))
        return None

    def feed(self, run: Run) -> Feed:
        """The live rows of a record."""
        return self._feeds.of(run.path)

    def close(self) -> None:
        """Stop the background work."""
        self.background.close()
