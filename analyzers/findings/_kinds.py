"""A rank's compute by class: arithmetic, or moving memory."""

from __future__ import annotations

from collections.abc import Iterable

from trine.analyzers.kernel_classes import classify
from trine.analyzers.results import NamedTime, RankSummary

__all__ = ["by_class", "classify", "work"]


def work(summary: RankSummary) -> tuple[NamedTime, ...]:
    """The rank's compute by name: kernels, or operators (self time) where there is no device."""
    return tuple(row for row in (summary.kernels or summary.operators) if row.kind != "communication")


def by_class(rows: Iterable[NamedTime]) -> dict[str, int]:
    """Time of ``rows`` by class, ns."""
    total: dict[str, int] = {}
    for row in rows:
        label = classify(row.name)
        total[label] = total.get(label, 0) + row.total_ns
    return total
