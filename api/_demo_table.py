"""The demo's result for people: what was tried, before and after, whether it still trains the same."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trine._demo_changes import spelled
from trine.analyzers.results import Analysis, Gain
from trine.analyzers.units import count, duration, percent, size
from trine.demo import DemoResult, Measured, Outcome, Side

__all__ = ["render"]

WIDTH = 100


def render(result: DemoResult) -> str:
    """The whole table, at most :data:`WIDTH` columns wide; paths are never cut."""
    lines = [
        "",
        *_changes(result),
        *_skipped(result),
        "",
        *_sides(result),
        *_two_ratios(result),
        "",
        *_parity(result),
        "",
        *_paths(result),
    ]
    return "\n".join(lines)


def _changes(result: DemoResult) -> list[str]:
    """Milliseconds throughout, so that columns can be compared at a glance."""
    rows = [("change", "predicted", "measured alone", "with the others")]
    for outcome in result.outcomes:
        first, *rest = _setting_lines(outcome.candidate.change)
        rows.append((first, _predicted(outcome.candidate.predicted), _gain(outcome.alone), _verdict(outcome)))
        rows += [(line, "", "", "") for line in rest]
    kept = sum(outcome.kept for outcome in result.outcomes)
    together = "-" if result.predicted_together_s is None else _ms(result.predicted_together_s * 1e9)
    ratio = f"{1 / result.together_ratio:.2f} × as fast"
    rows.append(
        (
            f"all {kept} kept together" if kept > 1 else "what was kept",
            together,
            _gain(result.together),
            ratio,
        )
    )
    bases = sorted({outcome.candidate.basis for outcome in result.outcomes})
    rounds = result.outcomes[0].alone.rounds
    notes = (
        f"Gains are milliseconds a step. Measured: medians of {rounds} alternated rounds with their 95 % intervals. "
        f"Predicted from: {', '.join(bases)}; together, each on what the others leave."
    )
    return [*_narrow_table(rows), *_wrapped(notes, "")]


def _setting_lines(change: Mapping[str, Any]) -> list[str]:
    return [spelled({key: value}) for key, value in change.items()]


def _predicted(gain: Gain | None) -> str:
    if gain is None:
        return "not predicted"
    return f"{_ms(gain.mid)} ({_ms(gain.low)} to {_ms(gain.high)})"


def _gain(measured: Measured) -> str:
    middle, low, high = (_ms(value * 1e9) for value in (measured.gain_s, measured.low_s, measured.high_s))
    return f"{middle} ({low} to {high})"


def _ms(ns: float) -> str:
    """Milliseconds to three digits, none behind the point from a hundred on."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return "0" if float(text) == 0 else text


def _span(low: float, high: float) -> str:
    """``12 to 30 ms``: the unit once where both have it."""
    first, last = duration(low), duration(high)
    value, _, unit = first.partition(" ")
    return f"{value} to {last}" if unit and last.endswith(f" {unit}") else f"{first} to {last}"


def _verdict(outcome: Outcome) -> str:
    """What it did on top of the others, and why it stays or goes where the interval does not tell it from nothing."""
    middle, low, high = outcome.on_top
    if low <= 1 <= high:
        words = "not slower" if outcome.kept else "no clear gain"  # short, so that the table fits
    else:
        words = f"{percent(abs(middle - 1))} {'slower' if middle > 1 else 'faster'}"
    return f"{'kept' if outcome.kept else 'left out'}: {words}"


def _skipped(result: DemoResult) -> list[str]:
    lines: list[str] = []
    for each in result.skipped:
        lines += _wrapped(f"not tried: {each.change}: {each.reason}", "           ")
    return ["", *lines] if lines else []


def _sides(result: DemoResult) -> list[str]:
    plain, tuned = result.plain, result.tuned
    rows = [("", "plain", "tuned")]
    rows.append(("step time, median", _step(plain.analysis), _step(tuned.analysis)))
    rows.append(("left out as warm-up", _warm_up(plain.analysis), _warm_up(tuned.analysis)))
    rows.append(("tokens a second", _tokens(plain.analysis), _tokens(tuned.analysis)))
    rows.append(("MFU (counted FLOPs)", _mfu(plain.analysis), _mfu(tuned.analysis)))
    rows.append(("peak memory, largest rank", _memory(plain.analysis), _memory(tuned.analysis)))
    rows.append(("exposed communication", _exposed(plain.analysis), _exposed(tuned.analysis)))
    rows.append((f"loss of step {_last_step(plain)}", _loss(plain), _loss(tuned)))
    return _table([row for row in rows if row[1:] != ("-", "-")])


def _step(analysis: Analysis) -> str:
    statistics = analysis.step_statistics
    if statistics is None:
        return "-"
    return f"{duration(statistics.median_ns)} ({_span(statistics.low_ns, statistics.high_ns)})"


def _warm_up(analysis: Analysis) -> str:
    statistics = analysis.step_statistics
    if statistics is None:
        return "-"
    steps = max(
        (len(rank.summary.steps) for rank in analysis.ranks if rank.summary.steps is not None), default=0
    )
    return f"{len(statistics.warm_up)} of {max(steps, len(statistics.warm_up))} steps"


def _two_ratios(result: DemoResult) -> list[str]:
    """Both speed-ups where their intervals lie apart: one was alternated, the other compares two runs in turn."""
    before, after = result.plain.analysis.step_statistics, result.tuned.analysis.step_statistics
    if before is None or after is None or not after.low_ns:
        return []
    apart = before.low_ns / after.high_ns, before.high_ns / after.low_ns
    alternated = 1 / result.together_range[1], 1 / result.together_range[0]
    if apart[0] <= alternated[1] and alternated[0] <= apart[1]:
        return []
    return [
        "",
        *_wrapped(
            f"By these two records it is {before.median_ns / after.median_ns:.2f} × as fast ({apart[0]:.2f} to "
            f"{apart[1]:.2f}), alternated {1 / result.together_ratio:.2f} × ({alternated[0]:.2f} to {alternated[1]:.2f}). "
            f"The records were made one after the other, each with its own warm-up ({_warm_up(result.plain.analysis)} and "
            f"{_warm_up(result.tuned.analysis)} left out), on a machine whose speed may have changed: the alternated figure "
            "is the fair one.",
            "",
        ),
    ]


def _tokens(analysis: Analysis) -> str:
    tokens, statistics = 0, analysis.step_statistics
    for rank in analysis.ranks:
        steps = rank.summary.steps
        if steps is None or not len(steps) or int(steps["tokens"].min()) < 0:
            return "-"
        tokens += int(steps["tokens"].mean())
    return count(tokens / statistics.median_ns * 1e9) if statistics and tokens else "-"


def _mfu(analysis: Analysis) -> str:
    mfu = analysis.mfu
    share = None if mfu is None else mfu.range.get("counted", mfu.value)
    if mfu is None or share is None:
        return "-"
    return f"{percent(share)} of {mfu.dtype} peak" if mfu.dtype else percent(share)


def _memory(analysis: Analysis) -> str:
    peaks = [rank.summary.memory.peak_bytes for rank in analysis.ranks if rank.summary.memory is not None]
    known = [peak for peak in peaks if peak]
    return size(max(known)) if known else "-"


def _exposed(analysis: Analysis) -> str:
    shares = []
    for rank in analysis.ranks:
        phases, statistics = rank.summary.phases_ns, rank.summary.step_statistics
        if phases and statistics is not None and statistics.count:
            shares.append(phases.get("exposed_communication", 0) / statistics.count)
    return f"{duration(max(shares))} a step" if shares else "-"


def _last_step(side: Side) -> int:
    return max(side.losses, default=0)


def _loss(side: Side) -> str:
    return f"{side.losses[_last_step(side)]:.4f}" if side.losses else "-"


def _parity(result: DemoResult) -> list[str]:
    word = "the same" if result.same else "NOT the same"
    shared = len(result.plain.losses.keys() & result.tuned.losses.keys())
    return _wrapped(
        f"Losses of {shared} steps are {word} within the tolerance: the largest relative difference is "
        f"{result.loss_difference:.1e}, allowed are {result.tolerance:.0e}.",
        "",
    )


def _paths(result: DemoResult) -> list[str]:
    plain, tuned = result.plain, result.tuned
    folder = _short(result.config_path.parent)
    return [
        f"Configuration  {_short(result.config_path)}",
        f"Reports        {_short(plain.report)} and {tuned.report.name} beside it",
        f"Compare        trine compare {_short(tuned.record)} --against {_short(plain.record)}",
        f"Dashboard      trine dashboard {folder}",
    ]


def _short(path: Path) -> str:
    """The path from here where it lies below, quoted for a shell where it must be."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return shlex.quote(str(whole.relative_to(here) if whole.is_relative_to(here) else whole))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _narrow_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table, or one whose first column stands on lines of its own: on a slow machine figures are long."""
    table = _table(rows)
    if max(map(len, table)) <= WIDTH:
        return table
    lines: list[str] = []
    figures = ""
    for row, rest in zip(rows, _table([row[1:] for row in rows]), strict=True):
        if rest:  # a row without figures is one more setting of the change above
            lines += [figures] if figures else []
            figures = f"  {rest}"
        lines.append(row[0])
    return [*lines, figures]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
