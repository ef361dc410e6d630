"""Goodput: what part of the whole run made progress, and what the rest went into."""

from __future__ import annotations

from trine.analyzers.reports._cells import left, right, share
from trine.analyzers.reports.document import Bars, Block, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.goodput import CAUSES, Goodput
from trine.analyzers.units import duration, percent

__all__ = ["ORDER", "section"]

ORDER = 80

_WORDS = {
    "productive": "training",
    "start_up": "start-up",
    "warm_up": "warm-up",
    "loader": "waiting for batches",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "profiling": "the profiler's deep windows",
    "setup": "set-up",
    "other": "named other",
    "between_steps": "between steps",
    "repeated": "steps done again",
    "restart": "down between attempts",
    "shut_down": "after the last step",
}
_SIDES = {
    "productive": "computation",
    "evaluation": "memory",
    "checkpoint": "communication",
    "repeated": "fault",
    "restart": "fault",
}
#: Of the losses, those that are drawn by themselves; the others are one part, so that a bar can be read.
_MOST_PARTS = 5
#: Of the losses, as many are listed in any form: they are few, and a checkpoint may be the last of them.
_LEAST_ROWS = 8


def section(result: Goodput, analysis: Analysis, most_rows: int) -> Section | None:
    """A bar an attempt, and the losses by size."""
    losses = {cause: result.losses_ns.get(cause, 0) for cause in CAUSES}
    ordered = sorted((cause for cause in CAUSES if losses[cause]), key=lambda cause: -losses[cause])
    restarts = f", {result.restarts} restart{'' if result.restarts == 1 else 's'}" if result.restarts else ""
    head = Paragraph(
        f"{percent(result.goodput)} of {duration(result.wall_ns)} was training ({result.steps} steps{restarts}); "
        "the clock runs from the start of the process to its end."
    )
    cells = tuple(
        (_WORDS[cause], share(losses[cause], result.wall_ns), _about(cause, result)) for cause in ordered
    )
    table = Table(
        (left("not training"), *right("time"), left("what is known of it", flexible=True)),
        cells[: max(most_rows, _LEAST_ROWS)],
    )
    drawn = ordered[:_MOST_PARTS]
    keys = ("productive", *drawn, *(("rest",) if len(ordered) > len(drawn) else ()))
    rows = []
    for one in result.attempts[-most_rows:]:
        parts = {cause: float(one.losses_ns.get(cause, 0)) for cause in drawn}
        rest = float(sum(one.losses_ns.get(cause, 0) for cause in ordered[_MOST_PARTS:]))
        rows.append(
            (f"attempt {one.attempt}", {"productive": float(one.productive_ns), **parts, "rest": rest})
        )
    bars = Bars(
        "Where the run's time went",
        {key: "the rest" if key == "rest" else _WORDS[key] for key in keys},
        {key: _SIDES.get(key, "idle") for key in keys},
        tuple((label, {key: values[key] for key in keys}) for label, values in rows),
        table,
    )
    blocks: list[Block] = [head, bars]
    if len(result.attempts) > 1:
        blocks.append(_attempts(result, most_rows))
    return Section("goodput", "Goodput", tuple(blocks))


def _about(cause: str, result: Goodput) -> str:
    if cause == "checkpoint" and result.checkpoints:
        saved = ", ".join(clean(name) for name in result.checkpoint_names)
        return f"{result.checkpoints} before the last step, {duration(result.checkpoint_ns / result.checkpoints)} each ({saved})"
    if cause == "evaluation" and result.evaluations:
        return f"{result.evaluations} before the last step, {duration(result.evaluation_ns / result.evaluations)} each"
    if cause == "repeated" and result.repeated_steps:
        return f"{result.repeated_steps} steps that the attempt before had done"
    return {
        "start_up": "from the start of the process to its first step",
        "warm_up": "what the first steps took longer than the median",
        "loader": "phase data",
        "between_steps": "in no step and in nothing else that was seen",
        "restart": "from the end of an attempt that failed to the next start",
        "shut_down": "from the last step to the end",
    }.get(cause, "")


def _attempts(result: Goodput, most_rows: int) -> Table:
    cells = tuple(
        (
            str(one.attempt),
            clean(one.state),
            "–" if one.first_step is None else f"{one.first_step} to {one.last_step}",
            str(one.steps),
            duration(one.ended_ns - one.started_ns),
            percent(one.productive_ns / max(one.ended_ns - one.started_ns, 1)),
        )
        for one in result.attempts[-most_rows:]
    )
    note = (
        ""
        if result.repeated_steps is not None
        else "Attempts number their steps from 0, so steps done twice are not known."
    )
    return Table(
        (*right("attempt"), left("ended as"), *right("steps", "number", "time", "training")),
        cells,
        "Attempts",
        note,
    )
