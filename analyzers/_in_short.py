"""What analyses look like in a console: a few lines, not all of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .units import duration

if TYPE_CHECKING:
    from .results import Analysis, RankSummary

__all__ = ["analysis_in_short", "summary_in_short"]

#: Characters of a path that are shown, from its end.
MOST_PATH = 60


def analysis_in_short(analysis: Analysis) -> str:
    """Verdict, ranks, steps, and the studies that have a result."""
    source = analysis.source
    ranks = _count(len(source.ranks), "rank")
    if source.missing_ranks:
        ranks += f" of {source.world_size}"
    steps = _count(source.steps, "step") if source.steps else "no steps"
    if analysis.step_statistics is not None:
        steps += f" of {duration(analysis.step_statistics.median_ns)} (median)"
    faults = sum(finding.kind == "fault" for finding in analysis.findings)
    others, notes = len(analysis.findings) - faults, len(analysis.data_quality)
    lines = [
        f"Analysis of {_path(source.path)} ({source.format}): {ranks}, {steps}",
        analysis.verdict.sentence,
        f"{_count(faults, 'fault')}, {_count(others, 'opportunity', 'opportunities')}, {_count(notes, 'note')} on the data",
        f"studies with a result: {', '.join(sorted(analysis.studies)) or 'none'}",
    ]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def summary_in_short(summary: RankSummary) -> str:
    """The rank, where it comes from, and what is known of it."""
    from dataclasses import fields

    empty: tuple[object, ...] = (None, (), {})
    known = [one.name for one in fields(summary) if getattr(summary, one.name) not in empty]
    parts = [
        name
        for name in ("steps", "breakdown", "collectives", "memory", "kernels", "operators")
        if name in known
    ]
    return (
        f"RankSummary(rank={summary.rank}, format={summary.format!r}, source={_path(summary.source)!r}, "
        f"with {', '.join(parts) or 'nothing measured'})"
    )


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _path(path: str) -> str:
    return path if len(path) <= MOST_PATH else f"…{path[-MOST_PATH:]}"
