"""The frame around every page: brand, run, tabs, controls."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from trine.dashboard import units
from trine.dashboard.attributes import aria
from trine.dashboard.catalogue import Run
from trine.dashboard.components import choices, free_choice
from trine.dashboard.holdings import in_words
from trine.dashboard.parts import glyph, pill
from trine.dashboard.urls import PAGES, State

__all__ = ["controls", "frame", "state_line"]

#: Parts of a run that its title links to.
_MOST_PARTS = 6
_STATES = {
    "running": "running",
    "silent": "silent for over two minutes",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
}


def frame(state: State, run: Run | None, ranks: tuple[int, ...], content: list[Any]) -> list[Any]:
    """Header and content. ``ranks`` are those that the run has, for the control; empty while unknown."""
    top = html.Header(
        [
            dcc.Link(
                [glyph(None, size=26), html.Span("Trine")],
                href=State(theme=state.theme).address,
                className="brand",
                title="All runs",
            ),
            html.Div(_title(state, run), className="run-title"),
            html.Button(
                "Light" if state.theme == "dark" else "Dark",
                id="theme",
                className="quiet-button",
                **aria(label=f"Switch to the {'light' if state.theme == 'dark' else 'dark'} look"),
            ),
        ],
        className="top",
    )
    tabs = _tabs(state, ranks) if state.page != "runs" and run is not None else None
    return [top, *([tabs] if tabs is not None else []), html.Main(content, id="main", tabIndex=-1)]


def _title(state: State, run: Run | None) -> list[Any]:
    if state.page == "runs":
        return [html.H1("Runs")]
    if run is None:
        return [html.H1(state.run or "")]
    title = [html.H1(run.id, title=str(run.path)), html.Div(state_line(run), id="run-state")]
    return [*title, *_parts(state, run)]


def _parts(state: State, run: Run) -> list[Any]:
    """Links to what of the run can be looked at alone."""
    links = []
    for part in run.parts[:_MOST_PARTS]:
        link = State(page="overview", run=part, theme=state.theme)
        links.append(dcc.Link(part.removeprefix(run.id).lstrip("/"), href=link.address))
    return [html.Div(["open alone:", *links], className="quiet run-parts", id="run-parts")] if links else []


def state_line(run: Run) -> list[Any]:
    """Kind, state and age of a run."""
    state = run.state()
    words = [pill(_STATES[state], state)] if state in _STATES else []
    text = f"{_kind(run)}, {units.size(run.size_bytes)}, updated {units.age(run.updated_s)}"
    return [*words, html.Span(text, className="quiet")]


def _kind(run: Run) -> str:
    if run.format == "kineto":
        return "traces of several ranks" if run.kind == "traces" else "trace"
    return in_words(run.holds)


def controls(state: State, ranks: tuple[int, ...]) -> list[Any]:
    """What of the run is shown; the choice of ranks comes once they are known."""
    shown = [free_choice("steps", "Steps", ["complete", "all"], state.steps, "complete, all, 3:8")]
    if len(ranks) > 1:
        options = [(str(rank), f"rank {rank}") for rank in ranks]
        shown.append(choices("ranks", "Ranks", options, [str(rank) for rank in state.ranks], "all"))
    return shown


def _tabs(state: State, ranks: tuple[int, ...]) -> Any:
    here: dict[str, Any] = {"id": "here"}
    links = [
        dcc.Link(
            title,
            href=state.with_(page=page, begin_ns=None, end_ns=None).address,
            className="page-tab here" if page == state.page else "page-tab",
            **(here if page == state.page else {}),
        )
        for page, title in PAGES.items()
        if page != "runs"
    ]
    return html.Nav(
        [
            html.Div(links, className="tabs"),
            html.Div(controls(state, ranks), className="controls", id="controls"),
        ],
        className="navigation",
        **aria(label="Pages of this run"),
    )
