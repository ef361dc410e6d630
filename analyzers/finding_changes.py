"""Which findings appeared or vanished between two sides of a comparison.

A finding is of a side where more than half of its runs show it: one run of three is that run's, not the change's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trine.analyzers.run_facts import RunFacts, Told

__all__ = ["FindingChange", "finding_changes"]


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding on the two sides. Severities are shares of the step (median over the runs that show it), None on a
    side that does not show it; ``title`` is the first side's, of what vanished the second's."""

    id: str
    kind: str
    state: Literal["appeared", "vanished", "stays"]
    first: float | None
    second: float | None
    title: str


def finding_changes(
    first: Sequence[RunFacts], second: Sequence[RunFacts]
) -> tuple[FindingChange, ...] | None:
    """What appeared, vanished and stays, each in order of severity; None where a side's findings are not known."""
    if any(run.findings is None for run in (*first, *second)):
        return None
    new, old = _of(first), _of(second)
    changes = []
    for id in dict.fromkeys((*new, *old)):
        now, before = new.get(id), old.get(id)
        shown = now or before
        assert shown is not None
        changes.append(
            FindingChange(
                id=id,
                kind=shown[0].kind,
                state="stays" if now and before else "appeared" if now else "vanished",
                first=_severity(now),
                second=_severity(before),
                title=shown[0].title,
            )
        )
    order = ("appeared", "vanished", "stays")
    return tuple(
        sorted(
            changes,
            key=lambda one: (order.index(one.state), -max(one.first or 0.0, one.second or 0.0), one.id),
        )
    )


def _of(side: Sequence[RunFacts]) -> dict[str, list[Told]]:
    found: dict[str, list[Told]] = {}
    for run in side:
        for told in run.findings or ():
            found.setdefault(told.id, []).append(told)
    return {id: told for id, told in found.items() if 2 * len(told) > len(side)}


def _severity(told: list[Told] | None) -> float | None:
    return median(one.severity for one in told) if told else None
