"""What changes would make of the step, by replay."""

from __future__ import annotations

from trine.analyzers.reports._cells import right
from trine.analyzers.reports.document import Column, Paragraph, Section, Table
from trine.analyzers.results import Analysis
from trine.analyzers.studies.what_if import Answer, WhatIfs
from trine.analyzers.units import duration, percent

__all__ = ["ORDER", "section"]

ORDER = 27

#: Changes that gain or cost less than this of the step are not worth a row.
LEAST_SHARE = 0.01


def section(result: WhatIfs, analysis: Analysis, most_rows: int) -> Section | None:
    """How far the replay is off, and a row a change that moves the step."""
    worth = sorted(
        (each for each in result.answers if abs(each.gain_mid_ns) >= LEAST_SHARE * result.step_ns),
        key=lambda each: -each.gain_mid_ns,
    )
    if not worth or result.basis == "phases":
        return None
    worst = max(result.steps, key=lambda step: abs(step.error))
    words = (
        f"{len(result.steps)} recorded step{'s' if len(result.steps) != 1 else ''} replayed from "
        f"{result.basis}: {result.replay_error:.1%} off in the median step, {worst.error:+.1%} at worst; "
        f"{result.usual_error:+.1%} from the usual step. "
        + "; ".join(result.notes)
        + ("." if result.notes else "")
    )
    columns = (Column("change"), *right("step", "between", "gain", "of the step"))
    return Section(
        "what-if",
        "What would a change make of this step?",
        (Paragraph(words), Table(columns, tuple(_row(each, result) for each in worth[:most_rows]))),
    )


def _row(each: Answer, result: WhatIfs) -> tuple[str, ...]:
    sign = "−" if each.gain_mid_ns < 0 else ""
    return (
        each.change,
        duration(each.predicted_mid_ns),
        f"{duration(each.predicted_low_ns)}–{duration(each.predicted_high_ns)}",
        f"{sign}{duration(abs(each.gain_mid_ns))}",
        f"{sign}{percent(abs(each.gain_mid_ns) / result.step_ns)}",
    )
