"""What changes would make of the step, by replay."""

from __future__ import annotations

from collections.abc import Sequence

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
    """How far the replay is off, a row a change that moves the step with what it gains from and to, and what is assumed of it."""
    worth = sorted(
        (each for each in result.answers if abs(each.gain_mid_ns) >= LEAST_SHARE * result.step_ns),
        key=lambda each: -each.gain_mid_ns,
    )
    if result.basis == "phases" or not (worth or result.doubt):
        return None
    worst = max(result.steps, key=lambda step: abs(step.error))
    words = (
        f"{len(result.steps)} recorded step{'s' if len(result.steps) != 1 else ''} replayed from "
        f"{result.basis}: {result.replay_error:.1%} off in the median step, {worst.error:+.1%} at worst; "
        f"{result.usual_error:+.1%} from the usual step of {duration(result.step_ns)}, which gains here are of"
        + "".join(f"; {note}" for note in result.notes)
        + "."
    )
    title = "What would a change make of this step?"
    if not worth:
        return Section("what-if", title, (Paragraph(words),))
    columns = (Column("change"), *right("step", "gain", "of the step", "gain between"))
    table = Table(columns, tuple(_row(each, result) for each in worth[:most_rows]))
    assumed = _assumed(worth[:most_rows])
    return Section("what-if", title, (Paragraph(words), table, *([Paragraph(assumed)] if assumed else [])))


def _assumed(shown: Sequence[Answer]) -> str:
    """What is assumed of single changes, each thing once."""
    notes = dict.fromkeys(note for each in shown for note in each.notes)
    changes = {note: ", ".join(each.change for each in shown if note in each.notes) for note in notes}
    return " ".join(f"{changes[note]}: {note}." for note in notes)


def _row(each: Answer, result: WhatIfs) -> tuple[str, ...]:
    share = percent(abs(each.gain_mid_ns) / result.step_ns)
    return (
        each.change,
        duration(each.predicted_mid_ns),
        _signed(each.gain_mid_ns),
        f"−{share}" if each.gain_mid_ns < 0 else share,
        f"{_signed(each.gain_low_ns)} and {_signed(each.gain_high_ns)}",
    )


def _signed(ns: int) -> str:
    return f"−{duration(-ns)}" if ns < 0 else duration(ns)
