"""Overview: what bounds this run, how sure, what to do, what it would gain; then why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import html

from trine.analyzers.notices import notices
from trine.analyzers.reports.studies import sections
from trine.dashboard import figures, units
from trine.dashboard.attributes import aria
from trine.dashboard.blocks import render
from trine.dashboard.components import choice, graph
from trine.dashboard.pages.recommendations import finding_line
from trine.dashboard.parts import facts, glyph, pill, section, swatch, table, words
from trine.dashboard.view import View

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis, RankResult

__all__ = ["body"]

_CONFIDENCE = {"high": "sure", "medium": "fairly sure", "low": "unsure"}
#: Rows of a study's table where there is nothing else to show.
_MOST_ROWS = 20
_STATES = {"pass": "✓", "fail": "✗", "unknown": "?"}


def body(view: View) -> list[Any]:
    """The page, top to bottom: the verdict first, a table under every picture."""
    analysis, theme = view.analysis, view.state.theme
    ranks = figures.shown_ranks(analysis, view.state.ranks)
    if not analysis.is_timed:
        # A dump, a snapshot or a schedule: what it does show is the studies' to say.
        found = [render(one, theme) for one in sections(analysis, _MOST_ROWS)]
        above = [part for part in (_verdict(view), _findings(view)) if part is not None]
        return [*above, *found, *_steps_if_marked(analysis, ranks, theme), _quality(analysis)]
    parts = [
        _verdict(view),
        _findings(view),
        _breakdown(analysis, ranks, theme),
        _phases(ranks, theme),
        _steps(analysis, ranks, theme),
        _loss(ranks, theme),
        html.Div([_mfu(analysis), _healthy(analysis)], className="columns"),
        _checklist(analysis),
        _quality(analysis),
    ]
    return [part for part in parts if part is not None]


def _verdict(view: View) -> Any:
    analysis, before = view.analysis, view.before
    verdict = analysis.verdict
    return html.Section(
        [
            glyph(
                verdict.triangle,
                verdict.hull,
                before.verdict.triangle if before is not None else None,
                size=132,
            ),
            html.Div(
                [
                    html.P(verdict.sentence, className="verdict-sentence", id="verdict"),
                    *(html.P(words_of_it, className="verdict-notice") for words_of_it in notices(analysis)),
                    html.Div(
                        [pill(_CONFIDENCE[verdict.confidence], verdict.confidence), *_triangle_key(analysis)],
                        className="verdict-line",
                    ),
                    _facts(analysis, before),
                ],
                className="verdict-text",
            ),
            html.Div(
                choice(
                    "against",
                    "Compare with",
                    [(run.id, run.id) for run in view.others],
                    view.state.against,
                    "another run",
                ),
                className="verdict-compare",
            )
            if view.others
            else None,
        ],
        className="verdict",
    )


def _triangle_key(analysis: Analysis) -> list[Any]:
    weights = analysis.verdict.triangle
    if weights is None:
        return []
    names = ("computation", "communication", "memory")
    keys = [
        html.Span([swatch(name), f"{name} {units.percent(part)}"], className="key")
        for name, part in zip(names, weights, strict=True)
    ]
    # Without this a run that mostly idles would seem to be bound by what little it does.
    return [*keys, html.Span("of the time at work", className="key")]


def _facts(analysis: Analysis, before: Analysis | None) -> Any:
    source, statistics, mfu = analysis.source, analysis.step_statistics, analysis.mfu
    rows: list[tuple[str, Any, str | None]] = []
    if statistics is not None:
        note = "one step, so no interval"
        if statistics.count > 1:
            note = f"median; 95 % interval {_interval(statistics)}"
        rows.append(("Step time", units.duration(statistics.median_ns), note))
        earlier = before.step_statistics if before is not None else None
        if earlier is not None:
            change = statistics.median_ns / earlier.median_ns - 1
            rows.append(
                (
                    "Against",
                    f"{change * 100:+.1f} %".replace("-", "−"),
                    f"was {units.duration(earlier.median_ns)}",
                )
            )
    if mfu is not None and (mfu.value is not None or mfu.range):
        rows.append(("MFU", *_mfu_words(analysis)))
    missing = f"{len(source.missing_ranks)} missing" if source.missing_ranks else "all present"
    world = f"of {source.world_size}, {missing}" if source.world_size else "world size unknown"
    rows.append(("Ranks", str(len(source.ranks)), world))
    if source.steps:
        rows.append(("Steps", str(source.steps), f"selection: {source.selection}"))
    elif analysis.is_timed:
        rows.append(("Steps", "none marked", None))
    if analysis.hardware.name:
        rows.append(("Device", analysis.hardware.name, f"{analysis.hardware.count or '?'} in the run"))
    return facts(rows)


def _mfu_words(analysis: Analysis) -> tuple[str, str]:
    mfu = analysis.mfu
    if mfu is None:
        return units.NOTHING, ""
    if mfu.value is not None:
        return units.percent(mfu.value), f"convention: {mfu.convention}"
    low, high = min(mfu.range.values()), max(mfu.range.values())
    shown = units.percent(low) if low == high else f"{units.percent(low)} to {units.percent(high)}"
    names = sorted(mfu.range)
    return shown, f"convention: {names[0]}" if len(names) == 1 else "over conventions: " + ", ".join(names)


def _findings(view: View) -> Any:
    found = view.analysis.findings
    if not found:
        return section(
            "What to do",
            html.P(
                "No fault was found, and no change with a predicted gain of at least 5 % of the step."
                if view.analysis.is_timed
                else "Nothing to mend in what these files show."
            ),
        )
    link = view.state.with_(page="recommendations", begin_ns=None, end_ns=None)
    rows = [finding_line(finding, view.analysis, link) for finding in found[:3]]
    more = f"{len(found) - 3} more under Recommendations." if len(found) > 3 else None
    return section("What to do", html.Div(rows, className="finding-lines"), more)


def _breakdown(analysis: Analysis, ranks: tuple[RankResult, ...], theme: Any) -> Any:
    known = [rank for rank in ranks if rank.summary.breakdown is not None]
    if not known:
        why = next((rank.summary.breakdown_missing for rank in ranks if rank.summary.breakdown_missing), None)
        return section("Breakdown of the window", html.P(why or "No rank has device or operator events."))
    rows = []
    for rank in known:
        part = rank.summary.breakdown
        assert part is not None
        window = part.window_ns
        rows.append(
            [
                f"{rank.rank}",
                units.duration(window),
                _share(part.compute_ns, window),
                _share(part.exposed_communication_ns, window),
                _share(part.exposed_copy_ns, window),
                _share(part.idle_ns, window),
                _idle_words(part),
                units.percent(part.overlap_efficiency),
            ]
        )
    names = ["Rank", "Window", "Compute", "Exposed comm.", "Exposed copy", "Idle", "Idle because", "Overlap"]
    basis = {rank.summary.breakdown.basis for rank in known if rank.summary.breakdown}
    note = "Each bar sums to its window exactly. Hatched: compute that hides communication."
    if basis == {"host"}:
        note += " There is no device here: operators of the host stand for compute."
    if len(analysis.ranks) > len(ranks):
        note += f" {len(ranks)} of {len(analysis.ranks)} ranks are shown."
    picture = graph(figures.breakdown(known, theme), "Breakdown of the window by rank", "breakdown")
    return section("Breakdown of the window", [picture, table(names, rows, (1, 2, 3, 4, 5, 7))], note)


def _share(part: int, whole: int) -> Any:
    return html.Span(
        [units.duration(part), html.Span(f" {units.ratio(part, whole)}", className="quiet share")]
    )


def _idle_words(part: Any) -> str:
    causes = {
        "data": part.idle.data,
        "host": part.idle.host,
        "sync": part.idle.sync,
        "dependency": part.idle.dependency,
        "bubble": part.idle.bubble,
        "other": part.idle.other,
    }
    known = sorted(((ns, name) for name, ns in causes.items() if ns > 0.01 * part.window_ns), reverse=True)
    return ", ".join(f"{name} {units.ratio(ns, part.window_ns)}" for ns, name in known[:3]) or units.NOTHING


def _phases(ranks: tuple[RankResult, ...], theme: Any) -> Any:
    known = [rank for rank in ranks if rank.summary.phases_ns]
    if not known:
        return None
    names = [
        name
        for name in figures.phase_markers(theme)
        if any((r.summary.phases_ns or {}).get(name) for r in known)
    ]
    rows = []
    for rank in known:
        phases = rank.summary.phases_ns or {}
        total = sum(phases.values())
        rows.append(
            [f"{rank.rank}", units.duration(total), *(_share(phases.get(n, 0), total) for n in names)]
        )
    columns = ["Rank", "Steps", *(name.replace("_", " ").capitalize() for name in names)]
    picture = graph(figures.phases(known, theme), "Phases of the steps by rank", "phases")
    return section(
        "Phases of the steps",
        [picture, table(columns, rows, range(1, len(columns)))],
        "Where the selected steps went, measured around the training loop; sums to the steps exactly.",
    )


def _steps_if_marked(analysis: Analysis, ranks: tuple[RankResult, ...], theme: Any) -> list[Any]:
    return [] if analysis.step_statistics is None else [_steps(analysis, ranks, theme)]


def _steps(analysis: Analysis, ranks: tuple[RankResult, ...], theme: Any) -> Any:
    statistics = analysis.step_statistics
    if statistics is None:
        return section("Step times", html.P("The source marks no steps, so there is no step time."))
    rows = []
    for rank in ranks:
        own = rank.summary.step_statistics
        if own is not None:
            rows.append(_statistics_row(f"{rank.rank}", own))
    if len(rows) > 1:
        rows.insert(0, _statistics_row("slowest of each step", statistics))
    names = ["Rank", "Steps", "Median", "95 % interval", "95th percentile", "Warm-up", "Outliers"]
    if statistics.count == 1:
        names, rows = ["Rank", "Step time"], [[row[0], row[2]] for row in rows]
    figure = figures.step_times(analysis, ranks, theme)
    picture = [graph(figure, "Step time over steps", "step-times")] if figure is not None else []
    note = "The band is the interval of the median." if figure is not None else None
    return section("Step times", [*picture, table(names, rows, range(1, min(5, len(names))))], note)


def _loss(ranks: tuple[RankResult, ...], theme: Any) -> Any:
    """Loss over steps, where the training loop gave one."""
    drawn = figures.loss(ranks, theme)
    if drawn is None:
        return None
    rows = []
    for trace in drawn["data"]:
        values = trace["y"]
        rows.append([trace["name"], *(f"{value:.4g}" for value in (values[0], min(values), values[-1]))])
    picture = graph(drawn, "Loss over steps", "loss")
    return section("Loss", [picture, table(["", "First", "Lowest", "Last"], rows, (1, 2, 3))])


def _statistics_row(name: str, own: Any) -> list[Any]:
    return [
        name,
        str(own.count),
        units.duration(own.median_ns),
        _interval(own) if own.count > 1 else units.NOTHING,
        units.duration(own.p95_ns) if own.count > 1 else units.NOTHING,
        _some(own.warm_up),
        _some(own.outliers),
    ]


def _interval(own: Any) -> str:
    return f"{units.duration(own.low_ns)} to {units.duration(own.high_ns)}"


def _some(steps: tuple[int, ...]) -> str:
    if not steps:
        return units.NOTHING
    listed = ", ".join(str(step) for step in steps[:5])
    return f"{listed} and {len(steps) - 5} more" if len(steps) > 5 else listed


def _mfu(analysis: Analysis) -> Any:
    mfu = analysis.mfu
    if mfu is None:
        reasons = [note.message for note in analysis.data_quality if "mfu" in note.id.lower()]
        return section(
            "MFU", html.P(words(reasons[0] if reasons else "Model FLOPs or the device's peak are unknown."))
        )
    rows: list[list[Any]] = [
        [name + (" (chosen)" if name == mfu.convention else ""), units.percent(value)]
        for name, value in sorted(mfu.range.items())
    ]
    if mfu.value is not None and mfu.convention not in mfu.range:
        rows.insert(0, [f"{mfu.convention} (chosen)", units.percent(mfu.value)])
    if mfu.hfu is not None:
        rows.append(["with recomputation (HFU)", units.percent(mfu.hfu)])
    inputs: list[list[Any]] = [[name.replace("_", " "), said] for name, said in mfu.inputs.items()]
    shown = []
    if rows:
        shown.append(table(["Convention", "MFU"], rows, (1,)))
    else:
        shown.append(html.P("It cannot be said: an input is missing."))
    if inputs:
        shown.append(table(["Input", "Value and where it is from"], inputs))
    note = (
        None
        if mfu.value is not None
        else "No convention was chosen, so there is a range and no single value."
    )
    return section("MFU", shown, note if rows else None)


def _healthy(analysis: Analysis) -> Any:
    if not analysis.not_bound_by:
        return None
    rows = [html.Li(item.statement) for item in analysis.not_bound_by]
    return section("Not bound by", html.Ul(rows, className="plain"))


def _checklist(analysis: Analysis) -> Any:
    if not analysis.checklist:
        return None
    rows = [
        [
            html.Span(
                [html.Span(_STATES[item.state], **aria(hidden="true")), f" {item.state}"],
                className=f"check {item.state}",
            ),
            item.title,
            words(item.evidence),
            words(item.next),
        ]
        for item in analysis.checklist
    ]
    return section("Checklist", table(["", "In the field's own order of work", "Evidence", "Next"], rows))


def _quality(analysis: Analysis) -> Any:
    if not analysis.data_quality:
        return section("Data quality", html.P("Nothing to report: the data is whole."))
    notes: dict[tuple[str, str, str], list[int]] = {}
    unanswered = 0
    for note in analysis.data_quality:
        if " is null: " in note.message and note.id.startswith("no-"):
            unanswered += 1  # the page Explain has a table of them
            continue
        ranks = notes.setdefault((note.severity, note.id, note.message), [])
        if note.rank is not None:
            ranks.append(note.rank)
    order = {"error": 0, "warning": 1, "info": 2}
    rows = [
        [pill(severity, severity), _rank_words(ranks), words(message)]
        for (severity, _, message), ranks in sorted(notes.items(), key=lambda item: order[item[0][0]])
    ]
    said = (
        f"{unanswered} studies have no answer for want of data; Explain says what each needs."
        if unanswered
        else None
    )
    return section("Data quality", table(["", "Rank", "What to know about these numbers"], rows), said)


def _rank_words(ranks: list[int]) -> str:
    if not ranks:
        return ""
    listed = ", ".join(str(rank) for rank in sorted(ranks)[:6])
    return f"{listed} and {len(ranks) - 6} more" if len(ranks) > 6 else listed
