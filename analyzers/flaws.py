"""What is wrong with the data of a run, in as few lines as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trine.record.model import Quality

if TYPE_CHECKING:
    from trine.analyzers.run_facts import RunFacts

__all__ = ["Flaw", "RunFlaw", "flaws_of", "flaws_of_runs"]

_ORDER = {"error": 0, "warning": 1}
#: Warnings that comparisons and scaling put into words of their own.
_SAID_ELSEWHERE = frozenset({"no-steps"})


@dataclass(frozen=True, slots=True)
class Flaw:
    """A warning or an error of a run's data quality."""

    id: str
    severity: Literal["warning", "error"]
    message: str


@dataclass(frozen=True, slots=True)
class RunFlaw:
    """A flaw with the runs that have it."""

    sources: tuple[str, ...]
    flaw: Flaw

    @property
    def words(self) -> str:
        """``killed: runs/new-1 and 2 more: the process ended without …``."""
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.flaw.id}: {self.sources[0]}{more}: {self.flaw.message}"


def flaws_of(notes: Sequence[Quality]) -> tuple[Flaw, ...]:
    """The warnings and errors: what makes a number less sure, or is missing."""
    return tuple(
        Flaw(note.id, note.severity, note.message)
        for note in notes
        if note.severity != "info" and note.id not in _SAID_ELSEWHERE
    )


def flaws_of_runs(runs: Sequence[RunFacts]) -> tuple[RunFlaw, ...]:
    """Each flaw once, with its runs."""
    sources: dict[Flaw, list[str]] = {}
    for run in runs:
        for flaw in run.flaws:
            sources.setdefault(flaw, []).append(run.source)
    ordered = sorted(sources.items(), key=lambda pair: _ORDER[pair[0].severity])
    return tuple(RunFlaw(tuple(found), flaw) for flaw, found in ordered)
