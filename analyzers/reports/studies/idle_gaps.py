"""What the device waited for, gap by gap."""

from __future__ import annotations

from trine.analyzers.kernel_names import short_name
from trine.analyzers.reports._cells import left, right, share
from trine.analyzers.reports.document import Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.idle_gaps import NAMELESS, GapGroup, IdleGaps
from trine.analyzers.units import duration, percent

__all__ = ["ORDER", "section"]

ORDER = 22

#: Idle time below this share of the window explains nothing.
_LEAST = 0.02
_MOST = 10
_WORDS = {
    "data": "loader",
    "host": "host",
    "sync": "blocking call",
    "dependency": "queued, not started",
    "bubble": "pipeline bubble",
    "other": "no launch known",
}


def section(result: IdleGaps, analysis: Analysis, most_rows: int) -> Section | None:
    """The largest groups of gaps; None where there is next to no idle time."""
    if not result.groups or result.idle_ns < _LEAST * result.window_ns:
        return None
    shown = result.groups[: min(most_rows, _MOST)]
    ranks = len(result.ranks) + result.ranks_left_out
    of = "the ranks' windows" if ranks > 1 else "the window"
    head = (
        f"{duration(result.idle_ns)} ({percent(result.idle_ns / result.window_ns)} of {of}) nothing ran; "
        f"these groups hold {percent(sum(group.total_ns for group in shown) / result.idle_ns)} of it."
    )
    columns = (
        left("cause"),
        left("ended by", flexible=True),
        left("meanwhile the host was in", flexible=True),
        left("where", flexible=True),
        *right("gaps", "time", "longest"),
    )
    cells = tuple(
        (
            _WORDS[group.cause],
            clean(_ended(group)),
            clean(group.doing or "–"),
            clean(group.where or "–"),
            str(group.count),
            share(group.total_ns, result.window_ns),
            duration(group.longest_ns),
        )
        for group in shown
    )
    return Section("idle-gaps", "What idle time waited for", (Paragraph(head), Table(columns, cells)))


def _ended(group: GapGroup) -> str:
    """The operator says more to its user than the kernel that it launched; copies are told apart."""
    if group.operator is None:
        return group.ended_by if group.ended_by in NAMELESS else short_name(group.ended_by)
    if group.ended_by.startswith("Mem"):
        return f"{group.operator} ({group.ended_by})"
    return group.operator
