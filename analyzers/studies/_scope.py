"""What a study may look at: one rank's tables, or all ranks' summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trine.analyzers.clocks import Clock
from trine.analyzers.collectives import Blame
from trine.analyzers.matching import Calls
from trine.analyzers.results import Hardware, Mfu, RankSummary, StepStatistics
from trine.analyzers.selection import Selected, Selection
from trine.record.model import Job, Quality, Rank, Table

__all__ = ["Scope", "Whole"]

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One rank and the selected steps.

    ``traced`` are the parts that have device and host tables, each with its selection: the rank itself
    where its source is a trace, the deep windows of a native record. ``collectives`` are the rows that
    the rank's summary keeps, in the order in which ``Whole.calls`` number them.
    """

    rank: Rank
    selection: Selection
    selected: Selected
    traced: tuple[tuple[Rank, Selected], ...]
    collectives: Table | None
    quality: list[Quality] = field(default_factory=list)

    def note(self, id: str, severity: Severity, message: str) -> None:
        """Say something about the data of this rank."""
        self.quality.append(Quality(id, severity, message, self.rank.rank))


@dataclass(frozen=True, slots=True)
class Whole:
    """All ranks' summaries and what was worked out of them before the studies.

    ``calls`` are the collectives matched across ranks; their ``rows`` count in each rank's
    ``RankSummary.collectives``. ``blames`` measure them, one for one. Clock corrections are to be added to a rank's times.
    """

    job: Job
    summaries: Mapping[int, RankSummary]
    calls: Sequence[Calls]
    blames: Sequence[Blame]
    clocks: Mapping[int, Clock]
    hardware: Hardware
    step_statistics: StepStatistics | None
    mfu: Mfu | None
    quality: list[Quality] = field(default_factory=list)

    def note(self, id: str, severity: Severity, message: str, rank: int | None = None) -> None:
        """Say something about the data."""
        self.quality.append(Quality(id, severity, message, rank))
