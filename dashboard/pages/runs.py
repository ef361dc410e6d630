"""The list of runs: where each lies in the triangle, what bounds it, how long its step is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from trine.dashboard import units
from trine.dashboard.attributes import aria
from trine.dashboard.background import Outcome
from trine.dashboard.catalogue import Run
from trine.dashboard.holdings import briefly
from trine.dashboard.parts import glyph, notice, pill
from trine.dashboard.urls import State

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis

__all__ = ["body", "rows"]

#: A longer list is filtered, not scrolled.
MOST_ROWS = 300


def body(runs: Sequence[Run], known: Mapping[str, Outcome], state: State, roots: Sequence[str]) -> list[Any]:
    """The page: a filter, and a row a run."""
    return [
        dcc.Interval(id="runs-tick", interval=1500),
        dcc.Store(id="runs-seen", data=""),
        html.Div(
            [
                html.Label("Filter", htmlFor="runs-filter"),
                dcc.Input(
                    id="runs-filter",
                    type="search",
                    placeholder="by name or verdict",
                    debounce=False,
                    className="filter",
                ),
                html.Span("under " + ", ".join(roots), className="quiet"),
            ],
            className="runs-head",
        ),
        html.Div(rows(runs, known, state, ""), id="runs"),
    ]


def rows(runs: Sequence[Run], known: Mapping[str, Outcome], state: State, wanted: str) -> list[Any]:
    """Head and rows; ``wanted`` filters by identifier and verdict."""
    words = wanted.lower().split()
    found = [run for run in runs if all(word in _text(run, known.get(run.id)).lower() for word in words)]
    if not runs:
        return [
            notice(
                "No runs here yet",
                "Record one with trine run or trine.profile, or start the dashboard on a folder that holds traces.",
            )
        ]
    if not found:
        return [notice("Nothing matches", f"None of {len(runs)} runs has {wanted!r} in its name or verdict.")]
    head = html.Div(
        [
            html.Span(),
            html.Span("Run"),
            html.Span("Verdict"),
            html.Span("Step time", className="number"),
            html.Span("State"),
            html.Span("Updated", className="number"),
        ],
        className="run-row run-head",
        **aria(hidden="true"),
    )
    more = (
        [html.P(f"{len(found) - MOST_ROWS} more; filter to see them.", className="quiet")]
        if len(found) > MOST_ROWS
        else []
    )
    return [head, *(_row(run, known.get(run.id), state) for run in found[:MOST_ROWS]), *more]


def _text(run: Run, outcome: Outcome | None) -> str:
    value = outcome.value if outcome is not None else None
    return f"{run.id} {value.verdict.sentence if value is not None else ''}"


def _row(run: Run, outcome: Outcome | None, state: State) -> Any:
    analysis: Analysis | None = outcome.value if outcome is not None else None
    verdict = analysis.verdict if analysis is not None else None
    statistics = analysis.step_statistics if analysis is not None else None
    name, _, parent = run.id[::-1].partition("/")
    link = state.with_(page="overview", run=run.id, ranks=(), steps="complete", against=None)
    said = run.state()
    return dcc.Link(
        [
            glyph(verdict.triangle, verdict.hull, size=42) if verdict is not None else glyph(None, size=42),
            html.Span(
                [
                    html.Span(name[::-1], className="run-name"),
                    html.Span(_place(run, parent[::-1]), className="quiet"),
                ],
                className="run-cell",
            ),
            html.Span(_verdict(outcome, analysis), className="run-verdict"),
            html.Span(
                units.duration(statistics.median_ns if statistics is not None else None), className="number"
            ),
            html.Span(pill(said, said) if run.kind == "record" else html.Span(said, className="quiet")),
            html.Span(units.age(run.updated_s), className="number quiet"),
        ],
        href=link.address,
        className="run-row",
    )


def _place(run: Run, parent: str) -> str:
    held = dict(run.holds)
    files = f"{run.files} files, " if run.files > 1 else ""
    if len(held) > 1 and run.kind == "record":
        files = f"{files}with {briefly([item for item in run.holds if item[0] != 'trine'])}, "
    return f"{parent + ', ' if parent else ''}{files}{units.size(run.size_bytes)}"


def _verdict(outcome: Outcome | None, analysis: Analysis | None) -> Any:
    if analysis is not None:
        return analysis.verdict.sentence
    if outcome is None:
        return html.Span("open it to analyse it", className="quiet")
    if outcome.state == "failed":
        return html.Span(outcome.error, className="fault-text")
    return html.Span("analysing…" if outcome.running else "waiting to be analysed…", className="quiet busy")
