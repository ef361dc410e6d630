"""The Dash application: one router that turns the address into a page, and small clocks for what moves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from trine.dashboard import routes, units, urls
from trine.dashboard.background import Outcome
from trine.dashboard.catalogue import Run
from trine.dashboard.components import provider
from trine.dashboard.pages import (
    communication,
    explain,
    live,
    memory,
    overview,
    recommendations,
    runs,
    timeline,
)
from trine.dashboard.pages.frame import controls, frame, state_line
from trine.dashboard.parts import notice
from trine.dashboard.service import Service
from trine.dashboard.view import View
from trine.record.errors import TrineError

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis

__all__ = ["create"]

logger = logging.getLogger("trine")

_PAGES = {
    "overview": overview.body,
    "explain": explain.body,
    "timeline": timeline.body,
    "communication": communication.body,
    "memory": memory.body,
    "recommendations": recommendations.body,
}

_INDEX = """<!DOCTYPE html>
<html lang="en">
  <head>
    {%metas%}
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>{%title%}</title>
    <link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
    {%css%}
  </head>
  <body>
    {%app_entry%}
    <noscript>The dashboard needs JavaScript; trine analyze prints the same answers in a terminal.</noscript>
    <footer>{%config%}{%scripts%}{%renderer%}</footer>
  </body>
</html>
"""

#: How often a page asks whether something changed, in ms: while waiting, while the run lives, else.
_WAITING_MS, _LIVING_MS, _RESTING_MS = 700, 2000, 10_000

#: The verdict and what to do come first; live figures stand between them and the rest of the overview.
_ABOVE_LIVE = 2

#: After so many points drawn by patches, the live figures start over thinned.
_MOST_PATCHED = 6 * live.MOST_POINTS


def create(service: Service, hosts: frozenset[str] | None = None) -> Dash:
    """The application over ``service``. ``hosts`` are the Host headers it answers to; None for any."""
    app = Dash(
        "trine.dashboard",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        suppress_callback_exceptions=True,
        title="Trine",
        index_string=_INDEX,
        update_title="",
        eager_loading=False,
    )
    app.layout = provider(
        [
            dcc.Location(id="url", refresh=False),
            html.A("Skip to the content", href="#main", className="skip"),
            html.Div(id="page"),
        ],
        "provider",
    )
    _route(app, service)
    _refresh(app, service)
    _list(app, service)
    _follow(app, service)
    _clientside(app)
    routes.guard(app.server, hosts)
    routes.install(app.server, service)
    return app


def _route(app: Dash, service: Service) -> None:
    @app.callback(Output("page", "children"), Input("url", "pathname"), Input("url", "search"))
    def page(path: str | None, search: str | None) -> Any:
        state = urls.parse(path, search)
        try:
            return _page(service, state)
        except TrineError as error:
            return frame(state, None, (), [notice("This cannot be shown", str(error), "fault")])
        except Exception as error:
            # The reason belongs on the page: Dash would leave the old page standing without a word.
            logger.warning("the page %s failed", state.address, exc_info=True)
            return frame(state, None, (), [notice("This cannot be shown", _unexpected(error), "fault")])


def _page(service: Service, state: urls.State) -> list[Any]:
    if state.page == "runs":
        found = service.catalogue.runs()
        roots = [str(root) for root in service.catalogue.roots]
        content = runs.body(found, service.unasked(found), state, roots)
        return frame(state, None, (), [*content, *_notes(service)])
    run = service.catalogue.find(state.run or "")
    outcome = service.analysis(run, state.steps)
    first, rest = _body(service, run, outcome, state)
    content = [
        dcc.Store(id="token", data=_token(run, outcome, _before(service, state))),
        dcc.Interval(id="page-tick", interval=_pace(run, outcome)),
        html.Div(first, id="body"),
        *_live(service, run, state),
        html.Div(rest, id="rest"),
    ]
    return frame(state, run, _ranks(outcome), content)


def _notes(service: Service) -> list[Any]:
    return [html.P(note, className="quiet") for note in service.catalogue.notes]


def _live(service: Service, run: Run, state: urls.State) -> list[Any]:
    if state.page != "overview" or run.kind != "record" or run.state() not in ("running", "silent"):
        return []
    return live.body(service.feed(run).since(0), state.theme)


def _body(service: Service, run: Run, outcome: Outcome, state: urls.State) -> tuple[list[Any], list[Any]]:
    """The analysis' part of a page, or why there is none (yet): what stands above the live figures, and the rest."""
    analysis: Analysis | None = outcome.value
    if outcome.state == "failed":
        return [notice("This run cannot be shown", outcome.error or "", "fault")], []
    if analysis is None:
        words = f"{run.files} file{'s' if run.files != 1 else ''}, {units.size(run.size_bytes)}. This page fills itself."
        return [notice("Analysing…", words, "busy")], []
    before = None
    others: tuple[Run, ...] = ()
    if state.page == "overview":
        others = tuple(other for other in service.catalogue.runs() if other.id != run.id)[:200]
        before = _before(service, state)
    view = View(run, state, analysis, outcome, before, others)
    parts = list(_PAGES[state.page](view))
    if outcome.error is not None:
        parts.insert(0, notice("The newest data could not be read", outcome.error, "fault"))
    above = _ABOVE_LIVE if state.page == "overview" else len(parts)
    return parts[:above], parts[above:]


def _before(service: Service, state: urls.State) -> Analysis | None:
    if state.against is None or state.page != "overview":
        return None
    try:
        other = service.catalogue.find(state.against)
    except TrineError:
        return None
    value: Analysis | None = service.analysis(other).value
    return value


def _token(run: Run, outcome: Outcome, before: Analysis | None) -> str:
    """Changes when the body must be drawn anew."""
    return f"{outcome.state}:{outcome.version}:{before is not None}"


def _ranks(outcome: Outcome) -> tuple[int, ...]:
    return tuple(outcome.value.source.ranks) if outcome.value is not None else ()


def _pace(run: Run, outcome: Outcome) -> int:
    if outcome.state == "pending" or outcome.running:
        return _WAITING_MS
    return _LIVING_MS if run.state() == "running" else _RESTING_MS


def _unexpected(error: Exception) -> str:
    return f"unexpected {type(error).__name__}: {' '.join(str(error).split())}; please report it"


def _refresh(app: Dash, service: Service) -> None:
    @app.callback(
        Output("body", "children"),
        Output("rest", "children"),
        Output("token", "data"),
        Output("page-tick", "interval"),
        Output("run-state", "children"),
        Output("controls", "children"),
        Input("page-tick", "n_intervals"),
        State("token", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def refresh(_: int | None, token: str, path: str | None, search: str | None) -> Any:
        state = urls.parse(path, search)
        if state.page == "runs":
            return [no_update] * 6
        try:
            run = service.catalogue.find(state.run or "")
            outcome = service.analysis(run, state.steps)
            before = _before(service, state)
            new = _token(run, outcome, before)
            pace, line = _pace(run, outcome), state_line(run)
            if new == token:
                return no_update, no_update, no_update, pace, line, no_update
            drawn = token.startswith("ready") and state.page == "timeline"
            # A timeline that is on show keeps its place; it says itself that there is newer data.
            first, rest = (no_update, no_update) if drawn else _body(service, run, outcome, state)
            return first, rest, new, pace, line, controls(state, _ranks(outcome))
        except TrineError as error:
            gone = [notice("This cannot be shown", str(error), "fault")]
            return gone, [], "gone", _RESTING_MS, no_update, no_update


def _list(app: Dash, service: Service) -> None:
    @app.callback(
        Output("runs", "children"),
        Output("runs-seen", "data"),
        Input("runs-tick", "n_intervals"),
        Input("runs-filter", "value"),
        State("runs-seen", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def listed(_: int | None, wanted: str | None, seen: str, search: str | None) -> Any:
        found = service.catalogue.runs()
        known = service.unasked(found)
        marks = [
            f"{run.id}:{run.fingerprint}:{run.state()}:{units.age(run.updated_s)}:"
            + (f"{known[run.id].version}:{known[run.id].running}" if run.id in known else "")
            for run in found
        ]
        now = f"{hash((wanted or '', *marks))}"
        if now == seen:
            return no_update, no_update
        return runs.rows(found, known, urls.parse("/", search), wanted or ""), now


def _follow(app: Dash, service: Service) -> None:
    @app.callback(
        *[Output(name, "figure") for name in live.GRAPHS],
        *[Output(f"{name}-cell", "className") for name in live.GRAPHS],
        Output("live-summary", "children"),
        Output("live-cursor", "data"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("live-cursor", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def follow(_: int | None, cursor: dict[str, Any], path: str | None, search: str | None) -> Any:
        nothing = [no_update] * (2 * len(live.GRAPHS) + 2)
        try:
            run = service.catalogue.find(urls.parse(path, search).run or "")
        except TrineError:
            return [*nothing, True]
        update = service.feed(run).since(cursor["cursor"])
        ended = True if run.state() not in ("running", "silent") else no_update
        if not update.steps and not update.memory:
            return [*nothing, ended]
        return [
            *live.drawing(service.feed(run), update, cursor, urls.parse(path, search).theme, _MOST_PATCHED),
            ended,
        ]


def _clientside(app: Dash) -> None:
    # Dash has no types for this method.
    register: Any = app.clientside_callback

    def call(name: str) -> ClientsideFunction:
        return ClientsideFunction("trine", name)

    register(call("look"), Output("provider", "forceColorScheme"), Input("url", "search"))
    register(
        call("otherTheme"), Output("url", "search"), Input("theme", "n_clicks"), prevent_initial_call=True
    )
    for id, parameter in (("steps", "steps"), ("ranks", "rank"), ("against", "against")):
        register(
            call(f"set_{parameter}"),
            Output("url", "search", allow_duplicate=True),
            Input(id, "value"),
            prevent_initial_call=True,
        )
    register(call("timeline"), Output("timeline-status", "title"), Input("timeline-spec", "data"))
    register(
        call("newer"), Output("timeline-newer", "children"), Input("token", "data"), State("url", "pathname")
    )
