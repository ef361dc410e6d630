"""What a page is given: the run, what is known of it, and what the address says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trine.dashboard.background import Outcome
from trine.dashboard.catalogue import Run
from trine.dashboard.urls import State

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """A run, its analysis, and the state of the page. ``before`` is the analysis it is compared with."""

    run: Run
    state: State
    analysis: Analysis
    outcome: Outcome
    before: Analysis | None = None
    others: tuple[Run, ...] = ()
