"""The report's figures as Plotly dictionaries: bars, lines, heat maps, schedules and stacked areas.

A study says with blocks of :mod:`trine.analyzers.reports.document` what is to be seen; here it becomes a figure that
can be zoomed. Nothing is computed but units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trine.analyzers.reports.document import Areas, Bars, Heat, Lanes, Series, Unit
from trine.analyzers.reports.lanes import extent, without_slivers
from trine.dashboard import units
from trine.dashboard.figures import bars as stacked_bars
from trine.dashboard.figures import escape, size_scale, time_scale
from trine.dashboard.theme import PALETTES, Theme, figure_layout, mix

__all__ = ["areas", "bars", "heat", "lanes", "series"]

Figure = dict[str, Any]

#: Parts of one colour role get lighter in order, as in the report.
SHADES = (1.0, 0.62, 0.38)
#: Spans shorter than this part of the drawing are joined: no screen shows them apart, and zooming shows the joint.
SLIVER = 1 / 4_000


def _scale(unit: Unit, largest: float) -> tuple[float, str, Callable[[float], str]]:
    """(values a unit of the axis, its name, words for a value)."""
    if unit == "duration":
        return (*time_scale(largest), units.duration)
    if unit == "size":
        return (*size_scale(largest), units.size)
    return 1.0, "", units.count


def _colours(keys: Sequence[str], side: Mapping[str, str], theme: Theme) -> dict[str, str]:
    palette, seen, found = PALETTES[theme], dict[str, int](), dict[str, str]()
    for key in keys:
        place = seen.get(side[key], 0)
        seen[side[key]] = place + 1
        found[key] = mix(palette[side[key]], palette["surface"], SHADES[min(place, len(SHADES) - 1)])
    return found


def bars(block: Bars, theme: Theme) -> Figure:
    """A stacked bar a row."""
    keys = list(block.legend)
    colours = _colours(keys, block.side, theme)
    longest = max((sum(values.values()) for _, values in block.rows), default=0.0)
    scale, name, words = _scale(block.unit, longest)
    parts = [
        (block.legend[key], [values.get(key, 0.0) for _, values in block.rows], {"color": colours[key]})
        for key in keys
        if any(values.get(key) for _, values in block.rows)
    ]
    return stacked_bars([label for label, _ in block.rows], parts, name, theme, scale, words)


def series(block: Series, theme: Theme) -> Figure:
    """A line each, from zero."""
    scale, name, words = _scale(block.unit, max((y for _, line in block.lines for _, y in line), default=0.0))
    data = []
    for position, (label, line) in enumerate(block.lines):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(label),
                "x": [x for x, _ in line],
                "y": [y / scale for _, y in line],
                "line": {"width": 1.4, "color": PALETTES[theme][block.side]},
                "opacity": max(1.0 - 0.08 * position, 0.25),
                "customdata": [words(y) for _, y in line],
                "hovertemplate": f"{escape(label)}, %{{x:.6~g}}: %{{customdata}}<extra></extra>",
            }
        )
    layout = figure_layout(
        theme,
        height=260,
        showlegend=len(data) > 1,
        xaxis={"title": {"text": block.axis}, "showgrid": False},
        yaxis={"title": {"text": name}, "rangemode": "tozero"},
    )
    return {"data": data, "layout": layout}


def heat(block: Heat, theme: Theme) -> Figure:
    """A cell a row and column; the colour is the value over the largest."""
    colours = PALETTES[theme]
    largest = max((value for row in block.values for value in row if value is not None), default=0.0)
    scale, name = time_scale(largest)
    data = [
        {
            "type": "heatmap",
            "z": [[None if value is None else value / scale for value in row] for row in block.values],
            "x": list(range(len(block.columns))),
            "y": list(block.rows),
            "customdata": [
                [
                    f"{escape(column)}<br>{units.duration(value)}"
                    for column, value in zip(block.columns, row, strict=True)
                ]
                for row in block.values
            ],
            "colorscale": [[0, colours["ground"]], [1, colours[block.side]]],
            "zmin": 0,
            "zmax": max(largest / scale, 1e-9),
            "xgap": 2,
            "ygap": 2,
            "hoverongaps": False,
            "colorbar": {"title": {"text": name, "side": "right"}, "thickness": 10, "outlinewidth": 0},
            "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
        }
    ]
    layout = figure_layout(
        theme,
        height=max(170, 90 + 26 * len(block.rows)),
        xaxis={
            "tickvals": list(range(len(block.columns))),
            "ticktext": [escape(name if len(name) <= 26 else name[:25] + "…") for name in block.columns],
            "showgrid": False,
            "tickangle": -20 if len(block.columns) > 3 else 0,
        },
        yaxis={"autorange": "reversed", "showgrid": False, "type": "category"},
    )
    return {"data": data, "layout": layout}


def lanes(block: Lanes, theme: Theme) -> Figure:
    """Spans on one time axis, a row a lane; drag to zoom, double click for all."""
    whole = extent(block)
    scale, name = time_scale(whole)
    keys = list(block.legend)
    colours = _colours(keys, block.side, theme)
    found: dict[str, list[tuple[str, int, int, str]]] = {key: [] for key in keys}
    for label, spans in block.rows:
        for start, end, key, words in without_slivers(spans, whole * SLIVER):
            found[key].append((label, start, end, words))
    data = []
    for key in keys:
        spans_of_key = found[key]
        if not spans_of_key:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": block.legend[key],
                "y": [label for label, *_ in spans_of_key],
                "base": [start / scale for _, start, _, _ in spans_of_key],
                "x": [(end - start) / scale for _, start, end, _ in spans_of_key],
                "marker": {
                    "color": colours[key],
                    "line": {"width": 0.8, "color": PALETTES[theme]["surface"]},
                },
                "customdata": [
                    f"{escape(words)}<br>{units.duration(end - start)} at {units.duration(start)}".removeprefix(
                        "<br>"
                    )
                    for _, start, end, words in spans_of_key
                ],
                "hovertemplate": "%{y}: " + escape(block.legend[key]) + " %{customdata}<extra></extra>",
            }
        )
    labels = [label for label, _ in block.rows]
    layout = figure_layout(
        theme,
        barmode="overlay",
        bargap=0.18,
        height=90 + 26 * max(len(labels), 2),
        showlegend=True,
        legend={"traceorder": "normal"},
        xaxis={"title": {"text": f"time, {name}"}, "range": [0, whole / scale * 1.002]},
        yaxis={
            "autorange": "reversed",
            "showgrid": False,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": labels,
            "fixedrange": True,
        },
    )
    return {"data": data, "layout": layout}


def areas(block: Areas, theme: Theme) -> Figure:
    """Layers on top of each other."""
    totals = [sum(values) for values in zip(*(values for _, _, values in block.layers), strict=True)]
    scale, name, words = _scale(block.unit, max(totals, default=0.0))
    is_time = block.axis.startswith("time")
    across, axis = time_scale(block.x[-1] - block.x[0]) if is_time and block.x else (1.0, "")
    keys = [str(number) for number in range(len(block.layers))]
    colours = _colours(keys, {key: block.layers[int(key)][1] for key in keys}, theme)
    begin = block.x[0] if is_time and block.x else 0.0
    data = []
    for number, (label, _, values) in enumerate(block.layers):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "layers",
                "name": escape(label),
                "x": [(x - begin) / across for x in block.x],
                "y": [value / scale for value in values],
                "line": {"width": 0.6, "color": colours[str(number)]},
                "fillcolor": colours[str(number)],
                "customdata": [words(value) for value in values],
                "hovertemplate": f"{escape(label)}: %{{customdata}}<extra></extra>",
            }
        )
    layout = figure_layout(
        theme,
        height=320,
        hovermode="x unified",
        showlegend=True,
        legend={"traceorder": "normal"},
        xaxis={"title": {"text": f"{block.axis}, {axis}" if axis else block.axis}, "showgrid": False},
        yaxis={"title": {"text": name}, "rangemode": "tozero"},
    )
    return {"data": data, "layout": layout}
