"""Timeline: ranks × streams and threads on a canvas; the work is done by ``assets/timeline.js``."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from trine.analyzers.studies import result_of
from trine.analyzers.studies.pipeline import Pipeline
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

#: Of the micro-batches of a pipeline; the last only where backwards are split.
_STAGES = (("computation", "forward"), ("backward", "backward"), ("weight", "backward of the weights"))

#: What a source without any span holds instead, by its format.
_INSTEAD = {
    "flight_recorder": "the last collectives that each rank called and how far they came",
    "memory_snapshot": "what memory was allocated, by whom, and when it was freed",
    "memory_timeline": "how much memory each category held over time",
}

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
    """Toolbar, canvas, and the table of what is in view; of what holds no spans, what it holds instead."""
    instead = _without_spans(view)
    if instead is not None:
        return [instead]
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
                _legend(_keys(view)),
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


def _without_spans(view: View) -> Any:
    """A dump or a snapshot says where things stood, not what took how long: nothing to draw here."""
    formats = dict.fromkeys(view.analysis.source.formats or (view.analysis.source.format,))
    if view.analysis.is_timed or not set(formats) <= set(_INSTEAD):
        return None
    held = "; ".join(_INSTEAD[format] for format in formats)
    link = dcc.Link(
        "Explain shows it.",
        href=view.state.with_(page="explain").address,
        className="linked",
        id="to-explain",
    )
    words = f"There are no spans of work to lay out over time here. What these files hold: {held}. "
    return section("Timeline", html.P([words, link], id="no-timeline"))


def _keys(view: View) -> tuple[tuple[str, str], ...]:
    """The colours that can occur."""
    formats = set(view.analysis.source.formats or (view.analysis.source.format,))
    pipeline = result_of(view.analysis, "pipeline", Pipeline)
    if "pipeline_schedule" not in formats and (pipeline is None or pipeline.source != "microbatches"):
        return _LEGEND
    split = pipeline is not None and any(stage.backward_input_ns is not None for stage in pipeline.stages)
    stages = _STAGES if split else _STAGES[:2]
    return stages if formats == {"pipeline_schedule"} else (*_LEGEND, *stages)


def _legend(known: tuple[tuple[str, str], ...]) -> html.Div:
    keys = [html.Span([swatch(kind), words], className="key") for kind, words in known]
    how = (
        "Drag to pan, Ctrl + wheel or pinch to zoom, Shift + drag to zoom to a range, double click to zoom to a "
        "span, click a thread's name to unfold it."
    )
    return html.Div([*keys, html.Span(how, className="quiet")], className="timeline-legend")
