"""Where a comparison's change is: the parts of a step by kind, closed by what they add up to."""

from __future__ import annotations

import textwrap
from itertools import groupby

from trine.analyzers.causes import Cause
from trine.analyzers.comparison import Comparison
from trine.analyzers.reports._changes import part_name, signed
from trine.analyzers.reports.document import Column, Table, shorten
from trine.analyzers.units import duration, percent

__all__ = ["cause_lines", "cause_table", "causes_told", "covers"]

#: Causes shown of a kind; the JSON has them all.
_MOST_CAUSES = 5
_WIDTH = 100
#: Why the sums of the parts are not the verdict's change.
_MEANS = (
    "Parts are means, since only means add up (to all, with parts too small to list); the verdict compares medians,"
    " which a few slow steps do not move."
)
#: Kinds that are told here, with the steps that they are of; of the others the table of what changed speaks.
_KINDS = {"phase": "phases of all steady steps", "breakdown": "breakdown of the traced steps"}
_TITLE = "Where the change is (mean of a step and rank)"


def cause_lines(comparison: Comparison, labels: tuple[str, str]) -> list[str]:
    """For a terminal; empty where no part changed. ``labels``: what the second side and the first are called."""
    rows = _rows(comparison)
    if not rows:
        return []
    old, new = (shorten(label, 14) for label in labels)
    lines = [f"{_TITLE:<46}{old:>15}{new:>15}{'change':>11}{'of step':>10}"]
    for kind, group in groupby(rows, key=lambda row: row.kind):
        lines.append(f"  {_kind_words(kind, comparison)}")
        lines += [
            f"    {part_name(c.name):<42}{duration(c.second_ns):>15}{duration(c.first_ns):>15}"
            f"{signed(c.change_ns, duration):>11}{signed(c.share, percent):>10}"
            for c in group
        ]
    return lines + textwrap.wrap(_MEANS, _WIDTH)


def cause_table(comparison: Comparison, labels: tuple[str, str]) -> Table | None:
    """For Markdown and pages; None where no part changed."""
    rows = _rows(comparison)
    if not rows:
        return None
    cells = tuple(
        (
            _kind_words(c.kind, comparison),
            part_name(c.name),
            duration(c.second_ns),
            duration(c.first_ns),
            signed(c.change_ns, duration),
            signed(c.share, percent),
        )
        for c in rows
    )
    numbers = (Column(title, "right") for title in (*labels, "change", "of the step"))
    return Table((Column("where"), Column("what"), *numbers), cells, _TITLE, _MEANS)


def causes_told(comparison: Comparison) -> bool:
    """Whether the causes say already how the step is divided."""
    return any(cause.kind in _KINDS for cause in comparison.causes)


def covers(comparison: Comparison) -> str:
    """Of how many traced steps the breakdown, the kernels and the operators are, old side first; empty without any."""
    counts = comparison.second.window_steps, comparison.first.window_steps
    if comparison.difference.unit.name != "step" or None in counts:
        return ""
    return f", {_each(*counts)} traced steps"


def _rows(comparison: Comparison) -> list[Cause]:
    """The largest causes of each kind, closed by what all of its parts add up to."""
    if not causes_told(comparison):
        return []
    rows: list[Cause] = []
    for kind in _KINDS:
        rows += [cause for cause in comparison.causes if cause.kind == kind][:_MOST_CAUSES]
        rows += [whole for whole in comparison.wholes if whole.kind == kind]
    return rows


def _kind_words(kind: str, comparison: Comparison) -> str:
    """What causes of a kind are of, and of how many steps, old side first."""
    sides = (comparison.second, comparison.first)
    counts = [sum(side.steps) for side in sides] if kind == "phase" else [side.window_steps for side in sides]
    many = f" ({_each(*counts)})" if None not in counts else ""
    return f"{_KINDS[kind]}{many}"


def _each(old: int | None, new: int | None) -> str:
    return f"{old}" if old == new else f"{old} and {new}"
