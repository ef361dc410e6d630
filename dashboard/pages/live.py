"""A record's steps as they come: step time, loss, memory and phases, extended and never resent."""

from __future__ import annotations

from typing import Any

from dash import Patch, dcc, html, no_update

from trine.dashboard import units
from trine.dashboard.components import graph
from trine.dashboard.figures import phase_markers
from trine.dashboard.live import Feed, MemoryRow, StepRow, Update
from trine.dashboard.parts import section
from trine.dashboard.theme import PALETTES, Theme, figure_layout, merged
from trine.record.model import PHASES

__all__ = ["GRAPHS", "body", "drawing", "extend", "summary", "traces_of"]

GRAPHS = ("live-steps", "live-phases", "live-loss", "live-memory")
_TITLES = ("Step time", "Phases", "Loss", "Memory")

#: Points a line has after a full drawing; a page that has drawn many more starts over with these.
MOST_POINTS = 2000

Figure = dict[str, Any]


def body(update: Update, theme: Theme) -> list[Any]:
    """The section and its clock. Nothing is drawn where no step has ended yet."""
    store = _store(update)
    pictures = []
    for name, title, figure in zip(GRAPHS, _TITLES, _figures(update, theme), strict=True):
        picture = graph(figure, f"{title} as it comes", name)
        empty = not any(trace["x"] for trace in figure["data"])
        pictures.append(
            html.Div(
                [html.H3(title), *(_key(theme) if name == "live-phases" else []), picture],
                className="live-cell" + (" hidden" if empty else ""),
                id=f"{name}-cell",
            )
        )
    return [
        dcc.Store(id="live-cursor", data=store),
        dcc.Interval(id="live-tick", interval=1000),
        section(
            "Training",
            [
                html.Div(summary(update), id="live-summary", role="status"),
                html.Div(pictures, className="live-grid"),
            ],
            id="live",
        ),
    ]


def _store(update: Update) -> dict[str, Any]:
    """What a page keeps of what it has drawn whole."""
    return {
        "cursor": update.cursor,
        "attempt": update.attempt,
        "ranks": _ranks(update.steps),
        "memory": _ranks(update.memory),
        "drawn": 0,
    }


def _key(theme: Theme) -> list[Any]:
    """The legend as text above: in a small figure Plotly's own would leave no room."""
    words = []
    for name, marker in phase_markers(theme).items():
        square = html.Span(className="swatch", style={"background": marker["color"]})
        words.append(html.Span([square, name.replace("_", " ")], className="key"))
    return [html.Div(words, className="live-key")]


def summary(update: Update) -> str:
    """One line: the last step, its time, its loss."""
    if not update.steps:
        return "No step has ended yet."
    last = max(update.steps, key=lambda row: (row.index, -row.rank))
    loss = f", loss {last.loss:.4f}" if last.loss is not None else ""
    return f"Step {units.count(last.index)}, {units.duration(last.duration_ns)}{loss}"


def traces_of(update: Update, ranks: list[int], memory: list[int]) -> list[list[tuple[list[Any], list[Any]]]]:
    """Per figure and trace (x, y) of an update; the order is that of :func:`body`'s traces.

    Step times are ms, phases ms of the lowest rank, memory MiB over seconds of Unix time as dates.
    """
    steps = [[row for row in update.steps if row.rank == rank] for rank in ranks]
    first = steps[0] if steps else []
    phased = [row for row in first if row.phases_ns is not None]
    return [
        [([r.index for r in rows], [r.duration_ns / 1e6 for r in rows]) for rows in steps],
        [
            ([r.index for r in phased], [(r.phases_ns or ())[position] / 1e6 for r in phased])
            for position in range(len(PHASES))
        ],
        [
            ([r.index for r in rows if r.loss is not None], [r.loss for r in rows if r.loss is not None])
            for rows in steps
        ],
        [
            ([_date(r.time_ns) for r in rows], [r.bytes / 2**20 for r in rows])
            for rows in ([row for row in update.memory if row.rank == rank] for rank in memory)
        ],
    ]


def extend(update: Update, ranks: list[int], memory: list[int]) -> list[Patch]:
    """A patch a figure that appends the update's points to its traces."""
    patches = []
    for traces in traces_of(update, ranks, memory):
        patch = Patch()
        for position, (x, y) in enumerate(traces):
            if x:
                patch["data"][position]["x"].extend(x)
                patch["data"][position]["y"].extend(y)
        patches.append(patch)
    return patches


def _figures(update: Update, theme: Theme) -> list[Figure]:
    colours = PALETTES[theme]
    ranks, memory = _ranks(update.steps), _ranks(update.memory)
    points = [[(_thin(x), _thin(y)) for x, y in traces] for traces in traces_of(update, ranks, memory)]
    line = [colours["text"], colours["text"], colours["memory"]]
    drawn = [
        [
            _line(f"rank {rank}", x, y, colour, position, len(names))
            for position, (rank, (x, y)) in enumerate(zip(names, traces, strict=True))
        ]
        for names, traces, colour in zip(
            (ranks, ranks, memory), (points[0], points[2], points[3]), line, strict=True
        )
    ]
    stacked = [
        {
            "type": "bar",
            "name": name.replace("_", " "),
            "x": x[-MOST_POINTS // 10 :],
            "y": y[-MOST_POINTS // 10 :],
            "marker": {"line": {"width": 0}, **phase_markers(theme)[name]},
            "hovertemplate": f"step %{{x}}, {name.replace('_', ' ')}: %{{y:.3~g}} ms<extra></extra>",
        }
        for name, (x, y) in zip(PHASES, points[1], strict=True)
    ]
    several = len(ranks) > 1
    return [
        {"data": drawn[0], "layout": _layout(theme, "step", "ms", several)},
        {"data": stacked, "layout": _layout(theme, "step", "ms", False, barmode="stack", bargap=0)},
        {"data": drawn[1], "layout": _layout(theme, "step", "", several, yaxis={"rangemode": "normal"})},
        {"data": drawn[2], "layout": _layout(theme, "UTC", "MiB", len(memory) > 1, xaxis={"type": "date"})},
    ]


def _layout(theme: Theme, x: str, y: str, legend: bool, **more: Any) -> dict[str, Any]:
    layout = figure_layout(
        theme,
        height=210,
        showlegend=legend,
        xaxis={"title": {"text": x}, "showgrid": False},
        yaxis={"title": {"text": y}, "rangemode": "tozero"},
    )
    return merged(layout, more)


def _line(name: str, x: list[Any], y: list[Any], colour: str, position: int, count: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"width": 1.3, "color": colour},
        "opacity": 1.0 if count == 1 else 0.9 - 0.6 * position / count,
        "hovertemplate": f"{name}: %{{y:.4~g}}<extra></extra>",
    }


def _thin(values: list[Any]) -> list[Any]:
    return values[:: max(1, len(values) // MOST_POINTS)]


def _ranks(rows: tuple[StepRow, ...] | tuple[MemoryRow, ...]) -> list[int]:
    return sorted({row.rank for row in rows})


def _date(time_ns: int) -> float:
    """Unix milliseconds, which Plotly's date axes take."""
    return time_ns / 1e6


def drawing(feed: Feed, update: Update, cursor: dict[str, Any], theme: Theme, most_patched: int) -> list[Any]:
    """Figures (patches, or whole where ranks appeared or the lines grew too long), cell classes, summary, cursor."""
    ranks, memory = _ranks(update.steps), _ranks(update.memory)
    new = (
        update.attempt != cursor["attempt"]
        or not set(ranks) <= set(cursor["ranks"])
        or not set(memory) <= set(cursor["memory"])
    )
    drawn = cursor["drawn"] + len(update.steps) + len(update.memory)
    if new or drawn > most_patched:
        whole = feed.since(0)
        figures = _figures(whole, theme)
        shown = [any(trace["x"] for trace in figure["data"]) for figure in figures]
        store = _store(whole)
        cells = ["live-cell" if some else "live-cell hidden" for some in shown]
        return [*figures, *cells, summary(whole), store]
    traces = traces_of(update, cursor["ranks"], cursor["memory"])
    # A figure that was empty so far, such as a loss that is first given later, comes out of hiding.
    classes: list[Any] = ["live-cell" if any(x for x, _ in part) else no_update for part in traces]
    patches = [
        patch if any(x for x, _ in part) else no_update
        for patch, part in zip(extend(update, cursor["ranks"], cursor["memory"]), traces, strict=True)
    ]
    words = summary(update) if update.steps else no_update
    return [*patches, *classes, words, {**cursor, "cursor": update.cursor, "drawn": drawn}]
