"""A comparison in words: text for a terminal, Markdown for a pull request, a page, JSON for a program.

The sides are named by their paths, and columns go from old to new: the second side, then the first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from trine.analyzers.comparison import Comparison, Difference, Side
from trine.analyzers.flaws import RunFlaw
from trine.analyzers.reports._causes import cause_lines, cause_table, causes_told, covers
from trine.analyzers.reports._changes import change_tables, findings_table, signed, unit_words
from trine.analyzers.reports.comparison_json import render_json
from trine.analyzers.reports.document import (
    Column,
    Document,
    Items,
    Paragraph,
    Section,
    Table,
    clean,
    shorten,
)
from trine.analyzers.units import count, duration, percent, size

__all__ = [
    "headline",
    "quality_lines",
    "render_html",
    "render_json",
    "render_markdown",
    "render_text",
    "value_text",
]

#: Rows of what changed, in the terminal and elsewhere.
_MOST_CHANGES, _MOST_CHANGES_ELSEWHERE = 12, 40
_WIDTH = 100

_VERDICTS = {
    "regression": "REGRESSION",
    "improvement": "IMPROVEMENT",
    "no change": "NO CHANGE",
    "inconclusive": "INCONCLUSIVE",
    "one run": "NOTHING CONCLUDED FROM ONE RUN",
    "not judged": "WHAT CHANGED, NOT JUDGED",
}

#: Metrics in words, with what they are of: two numbers of one name may be a median and a mean.
_METRICS = {
    "step_time_ns": "step time, median of steady steps",
    "step_time_p95_ns": "step time, 95th percentile",
    "peak_bytes": "peak memory, allocated",
    "reserved_peak_bytes": "peak memory, reserved",
    "tokens_per_s": "tokens per second",
    "samples_per_s": "samples per second",
    "exposed_communication_share": "exposed communication, of the step",
    "idle_share": "idle, of the traced window",
    "data_share": "waiting for data, of the step",
    "mfu": "MFU, by the chosen convention",
    "mfu_palm": "MFU, PaLM's convention",
    "mfu_megatron": "MFU, Megatron's convention",
    "mfu_narayanan": "MFU, Narayanan et al.",
    "mfu_6n": "MFU, 6 FLOPs a parameter and token",
    "mfu_counted": "MFU, FLOPs counted",
}


def value_text(metric: str, value: float) -> str:
    """A metric's value with its unit, which is the ending of its name."""
    if metric.endswith("_ns"):
        return duration(value)
    if metric.endswith("_bytes"):
        return size(value)
    if metric.endswith("_per_s"):
        return f"{count(value)}/s"
    return percent(value)


def headline(comparison: Comparison) -> list[str]:
    """What came out, how sure, and the smallest change that the data could have shown: three lines; of what
    was not judged, one."""
    ratio = comparison.step_time
    if ratio is None:
        return [f"{_VERDICTS[comparison.verdict]}: {unit_words(comparison.difference)}"]
    first, second = duration(comparison.first.median_ns or 0), duration(comparison.second.median_ns or 0)
    runs = [f"{number} run{'s' if number > 1 else ''}" for number in ratio.runs]
    seen = f"{ratio.power * 10:.0f} times in 10"
    at_best = "" if ratio.several else "at best, were all runs alike, "
    smallest = f"{percent(ratio.smallest_change)} or more would {at_best}have been seen {seen}"
    sure = f"{ratio.confidence:.0%} interval of the ratio {ratio.low:.3f} to {ratio.high:.3f}"
    rule = f"{runs[0]} against {runs[1]}; a change counts from {percent(ratio.minimum_effect)} on"
    return [
        f"{_VERDICTS[comparison.verdict]}: a step takes {_change_words(ratio.ratio)} (median {first} against {second})",
        f"{sure} ({rule})",
        f"A slow-down of {smallest}.",
    ]


# --- text ----------------------------------------------------------------------------------------


def render_text(comparison: Comparison) -> str:
    """Plain text, at most 100 columns wide but for paths."""
    lines = [f"{_names(comparison.first)} against {_names(comparison.second)}", ""]
    head, *rest = headline(comparison)
    lines += textwrap.wrap(head, _WIDTH) + rest
    lines += _section("", cause_lines(comparison, _labels(comparison)))
    for table in change_tables(
        comparison.difference,
        _labels(comparison),
        _MOST_CHANGES,
        causes_told=causes_told(comparison),
        narrow=True,
        covers=covers(comparison),
    ):
        lines += _section("", _table_lines(table))
    lines += _section("Findings (share of the step or window at stake)", _finding_lines(comparison))
    lines += _section("", _metric_lines(comparison))
    lines += _section("Environment", _difference_lines(comparison, comparison.environment))
    lines += _section("Configuration", _difference_lines(comparison, comparison.configuration))
    lines += _section("Runs", _run_lines(comparison))
    lines += _section("Data quality", _wrapped(quality_lines(comparison.quality)))
    lines += _section("Notes", _wrapped(comparison.notes))
    return "\n".join(lines) + "\n"


def _labels(comparison: Comparison) -> tuple[str, str]:
    """What the columns are called: the second side's, then the first's."""
    return clean(comparison.second.label) or "second", clean(comparison.first.label) or "first"


def _table_lines(table: Table) -> list[str]:
    """A table of text whose flexible columns give way until it fits."""
    rows = [[column.title for column in table.columns], *(list(row) for row in table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    while sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
        flexible = [
            place for place, column in enumerate(table.columns) if column.flexible and widths[place] > 12
        ]
        widest = max(flexible or range(len(widths)), key=lambda place: widths[place])
        widths[widest] -= 1
    lines = [table.title] if table.title else []
    for row in rows:
        cells = [
            shorten(cell, width).rjust(width)
            if column.align == "right"
            else shorten(cell, width).ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines + (textwrap.wrap(table.note, _WIDTH) if table.note else [])


def _finding_lines(comparison: Comparison) -> list[str]:
    """What appeared, vanished or stays; what stays needs no words, since either side's report has them."""
    lines = []
    for one in comparison.findings or ():
        old, new = ("none" if share is None else percent(share) for share in (one.second, one.first))
        lines.append(f"  {one.state:<9} {one.id}: {old} → {new}")
        if one.state != "stays":
            lines += textwrap.wrap(
                clean(one.title), _WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12
            )
    return lines


def _metric_lines(comparison: Comparison) -> list[str]:
    metrics = comparison.metrics
    if not metrics:
        return []
    old, new = (shorten(label, 14) for label in _labels(comparison))
    lines = [f"{'Metrics (median of the runs)':<46}{old:>15}{new:>15}{'change':>11}"]
    return lines + [
        f"  {_METRICS.get(m.name, m.name):<44}{value_text(m.name, m.second):>15}{value_text(m.name, m.first):>15}{_relative(m.ratio):>11}"
        for m in metrics
    ]


def quality_lines(quality: Sequence[RunFlaw]) -> list[str]:
    """What is wrong with the data of runs, a line each."""
    return [f"{each.flaw.severity} {clean(each.words)}" for each in quality]


def _difference_lines(comparison: Comparison, differences: Sequence[Difference]) -> list[str]:
    old, new = (shorten(label, 20) for label in _labels(comparison))
    return [
        f"  {d.name}: {_short(_said(d.first), 30)} in {new}, {_short(_said(d.second), 30)} in {old}"
        for d in differences
    ]


def _said(value: object) -> str:
    return "not said" if value is None else str(value)


def _run_lines(comparison: Comparison) -> list[str]:
    lines = []
    for side in (comparison.first, comparison.second):
        rows = zip(side.sources, side.steps, side.warm_up, side.run_medians_ns, strict=True)
        for source, steps, warm_up, found in rows:
            left_out = f", {warm_up} of warm-up left out" if warm_up else ""
            if found is None:
                lines.append(f"  {source}: no steps that can be timed{left_out}")
                continue
            median, low, high = found
            spread = f"median {duration(median)} ({duration(low)} to {duration(high)})"
            lines.append(f"  {source}: {spread} of {steps} steady step{'s' if steps != 1 else ''}{left_out}")
    return lines


# --- Markdown and HTML ---------------------------------------------------------------------------


def render_markdown(comparison: Comparison) -> str:
    """Markdown: the headline, then a table each of causes, changes, metrics and differences."""
    head, *rest = headline(comparison)
    verdict, _, what = head.partition(": ")
    lines = [f"**{verdict}**: {what}", "", *rest, ""]
    for table in _tables(comparison):
        if table.title:
            lines += [f"**{table.title}**", ""]
        lines += _table([column.title for column in table.columns], table.rows)
        if table.note:
            lines += [table.note, ""]
    if comparison.quality:
        lines += ["**Data quality**", "", *(f"- {line}" for line in quality_lines(comparison.quality)), ""]
    lines += [f"- {note}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def render_html(comparison: Comparison) -> str:
    """One self-contained page."""
    from trine.analyzers.reports import html

    head, *rest = headline(comparison)
    verdict, _, what = head.partition(": ")
    blocks = tuple(_tables(comparison))
    sections = [Section("changes", "What changed", (*(Paragraph(line) for line in rest), *blocks))]
    runs = tuple(("", line.strip(), "") for line in _run_lines(comparison))
    sections.append(Section("runs", "Runs", (Items(runs),)))
    if comparison.quality:
        flaws = tuple((each.flaw.severity, clean(each.words), "") for each in comparison.quality)
        sections.append(Section("quality", "Data quality", (Items(flaws),)))
    if comparison.notes:
        notes = tuple(("", note, "") for note in comparison.notes)
        sections.append(Section("notes", "Notes", (Items(notes),)))
    worse = comparison.verdict == "regression"
    document = Document(
        title="Trine: comparison",
        subtitle=f"{_names(comparison.first)} against {_names(comparison.second)}",
        verdict=what[:1].upper() + what[1:],
        confidence=verdict.capitalize(),
        bound="fault" if worse else "healthy" if comparison.verdict == "improvement" else "unknown",
        triangle=None,
        hull=(),
        sides=(),
        sections=tuple(sections),
    )
    return html.render_document(document)


def _tables(comparison: Comparison) -> Iterator[Table]:
    old, new = _labels(comparison)
    causes = cause_table(comparison, (old, new))
    if causes is not None:
        yield causes
    yield from change_tables(
        comparison.difference,
        (old, new),
        _MOST_CHANGES_ELSEWHERE,
        causes_told=causes_told(comparison),
        covers=covers(comparison),
    )
    if comparison.findings:
        yield findings_table(comparison.findings, (old, new))
    if comparison.metrics:
        yield Table(
            (Column("metric"), *(Column(title, "right") for title in (old, new, "change"))),
            tuple(
                (
                    _METRICS.get(m.name, m.name),
                    value_text(m.name, m.second),
                    value_text(m.name, m.first),
                    _relative(m.ratio),
                )
                for m in comparison.metrics
            ),
            "Metrics (median of the runs)",
        )
    differences = (*comparison.environment, *comparison.configuration)
    if differences:
        yield Table(
            (Column("differs"), Column(old), Column(new)),
            tuple((d.name, _said(d.second), _said(d.first)) for d in differences),
            "Environment and configuration",
        )


def _table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    escaped = [" | ".join(_escaped(cell) for cell in row) for row in (titles, *rows)]
    return [f"| {escaped[0]} |", f"|{'---|' * len(titles)}", *(f"| {row} |" for row in escaped[1:]), ""]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


# --- JSON ----------------------------------------------------------------------------------------


def _change_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.0005:
        return "as long as before"
    return f"{percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'less time'}"


def _names(side: Side) -> str:
    more = f" and {len(side.sources) - 1} more" if len(side.sources) > 1 else ""
    return f"{side.sources[0]}{more}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["", *([title] if title else []), *lines]


def _relative(ratio: float | None) -> str:
    return "" if ratio is None else signed(ratio - 1, percent)


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [
        line
        for note in notes
        for line in textwrap.wrap(
            note, 98, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )
    ]


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"
