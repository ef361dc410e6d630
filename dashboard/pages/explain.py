"""Explain: every study that has an answer about this run, in the report's order, with an index; then what has none."""

from __future__ import annotations

from typing import Any

from dash import html

from trine.analyzers.reports.studies import sections
from trine.dashboard.attributes import aria
from trine.dashboard.blocks import render
from trine.dashboard.parts import section, table
from trine.dashboard.view import View

__all__ = ["body"]

#: Rows of a table: as many as a page bears.
MOST_ROWS = 40


def body(view: View) -> list[Any]:
    """The page; where no study has an answer, why each has none."""
    found = sections(view.analysis, MOST_ROWS)
    parts = [render(one, view.state.theme) for one in found]
    missing = _missing(view)
    if not parts:
        return [
            section("Explain", html.P("No study has an answer about this run.", id="no-studies")),
            *missing,
        ]
    links = [html.A(one.title, href=f"#{one.id}") for one in found]
    index = html.Nav(
        links, className="section index", id="explain-index", **aria(label="Studies of this run")
    )
    return [*([index] if len(found) > 1 else []), *parts, *missing]


def _missing(view: View) -> list[Any]:
    """What studies say they lack."""
    rows = []
    for note in view.analysis.data_quality:
        name, _, reason = note.message.partition(" is null: ")
        if reason and note.id == f"no-{name.replace('_', '-')}":
            rows.append([name.replace("_", " "), reason])
    if not rows:
        return []
    return [
        section(
            "Not answered", table(["Study", "What is missing, and how to get it"], rows), id="not-answered"
        )
    ]
