"""Timeline: ranks × streams and threads on a canvas; the work is done by ``assets/timeline.js``."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from trine.dashboard.attributes import aria, data
from trine.dashboard.detail import LIMIT
from trine.dashboard.parts import section, swatch
from trine.dashboard.view import View

__all__ = ["MOST_RANKS", "body", "shown_ranks"]

#: More ranks than this at once fit on no screen; the control chooses others.
MOST_RANKS = 8

_LEGEND = (
    ("computation", "compute"),
    ("communication", "communication"),
    ("memory", "copy"),
    ("operator", "operator"),
    ("idle", "runtime, Python, other host work"),
)

_BUTTONS = (
    ("zoom-in", "+", "Zoom in (W or +)"),
    ("zoom-out", "−", "Zoom out (S or −)"),
    ("left", "←", "Pan left (A or ←)"),
    ("right", "→", "Pan right (D or →)"),
    ("fit", "All", "Show all (Home or 0)"),
)


def shown_ranks(view: View) -> tuple[int, ...]:
    """The chosen ranks that exist, else the first eight."""
    present = view.analysis.source.ranks
    chosen = tuple(rank for rank in view.state.ranks if rank in present)
    return (chosen or present)[:MOST_RANKS]


def body(view: View) -> list[Any]:
    """Toolbar, canvas, and the table of what is in view."""
    ranks = shown_ranks(view)
    spec = {
        "run": view.run.id,
        "ranks": list(ranks),
        "limit": LIMIT // max(1, len(ranks)),
        "begin": view.state.begin_ns,
        "end": view.state.end_ns,
        "version": view.outcome.version,
    }
    hidden = len(view.analysis.source.ranks) - len(ranks)
    note = f"{hidden} more ranks: choose them above." if hidden > 0 else None
    return [
        dcc.Store(id="timeline-spec", data=spec),
        html.Div(
            [
                _toolbar(),
                html.Div(
                    id="timeline",
                    className="timeline",
                    tabIndex=0,
                    role="application",
                    **aria(
                        label="Timeline. W and S zoom, A and D pan, Home shows all, brackets select the previous and "
                        "the next span, up and down change the lane, Enter zooms to the selection."
                    ),
                ),
                html.Div(id="timeline-selection", className="timeline-selection", **aria(live="polite")),
                _legend(),
            ],
            className="timeline-frame",
        ),
        section("In view", html.Div(id="timeline-table"), note),
    ]


def _toolbar() -> html.Div:
    buttons = [
        html.Button(sign, className="quiet-button", title=words, **data(timeline=action), **aria(label=words))
        for action, sign, words in _BUTTONS
    ]
    download = html.A(
        "Download this range",
        id="timeline-download",
        href="#",
        className="quiet-button",
        title="As a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing",
    )
    return html.Div(
        [
            html.Div(buttons, className="timeline-buttons", role="toolbar"),
            html.Span(id="timeline-status", className="quiet", role="status"),
            html.Span(id="timeline-newer"),
            download,
        ],
        className="timeline-bar",
    )


def _legend() -> html.Div:
    keys = [html.Span([swatch(kind), words], className="key") for kind, words in _LEGEND]
    how = (
        "Drag to pan, Ctrl + wheel or pinch to zoom, Shift + drag to zoom to a range, double click to zoom to a "
        "span, click a thread's name to unfold it."
    )
    return html.Div([*keys, html.Span(how, className="quiet")], className="timeline-legend")
