"""Figures as plain dictionaries for Plotly: results in, drawing out, nothing computed but units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trine.dashboard import units
from trine.dashboard.theme import PALETTES, Theme, figure_layout, ink, mix

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis, RankResult

__all__ = [
    "MOST_BARS",
    "bars",
    "breakdown",
    "caused_wait",
    "escape",
    "level",
    "loss",
    "phase_markers",
    "phases",
    "shown_ranks",
    "size_scale",
    "step_times",
    "time_scale",
    "wait_heatmap",
]

#: More bars than this say nothing; the ranks that matter most are drawn and the rest counted.
MOST_BARS = 48

Figure = dict[str, Any]


def shown_ranks(analysis: Analysis, chosen: Sequence[int] = ()) -> tuple[RankResult, ...]:
    """The chosen ranks, else all, else those that others waited for most, in order of rank."""
    ranks = [rank for rank in analysis.ranks if not chosen or rank.rank in chosen] or list(analysis.ranks)
    if len(ranks) > MOST_BARS:
        ranks = sorted(ranks, key=lambda r: -(r.communication.caused_wait_ns if r.communication else 0))[
            :MOST_BARS
        ]
    return tuple(sorted(ranks, key=lambda r: r.rank))


def time_scale(longest_ns: float) -> tuple[float, str]:
    """The unit that a time axis is drawn in: (ns a unit, name)."""
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if longest_ns >= 2 * scale:
            return scale, unit
    return 1.0, "ns"


def size_scale(largest_bytes: float) -> tuple[float, str]:
    """The unit that a size axis is drawn in: (bytes a unit, name)."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest_bytes >= scale:
            return float(scale), unit
    return 1.0, "B"


def bars(
    rows: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float], dict[str, Any]]],
    axis: str,
    theme: Theme,
    scale: float,
    words: Any,
) -> Figure:
    """Horizontal stacked bars, a row each; the share of the row is written where it fits."""
    totals = [sum(values[i] for _, values, _ in parts) or 1.0 for i in range(len(rows))]
    data = []
    for name, values, marker in parts:
        shares = [value / total for value, total in zip(values, totals, strict=True)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": list(rows),
                "x": [value / scale for value in values],
                "marker": {"line": {"width": 0}, **marker},
                # Not on hatching, where nobody could read it.
                "text": [units.percent(s) if s >= 0.06 and "pattern" not in marker else "" for s in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "inside",
                "insidetextfont": {"size": 11, "color": ink(marker["color"])},
                "hovertemplate": "%{y}<br>" + name + ": %{customdata}<extra></extra>",
                "customdata": [
                    f"{words(v)} ({units.percent(s)})" for v, s in zip(values, shares, strict=True)
                ],
            }
        )
    layout = figure_layout(
        theme,
        barmode="stack",
        bargap=0.28 if len(rows) > 2 else 0.45,
        height=104 + 27 * max(len(rows), 2),
        showlegend=True,
        legend={"traceorder": "normal"},
        xaxis={"title": {"text": axis}, "range": [0, max(totals) / scale * 1.002]},
        yaxis={"autorange": "reversed", "showgrid": False, "type": "category"},
    )
    return {"data": data, "layout": layout}


def breakdown(ranks: Sequence[RankResult], theme: Theme) -> Figure:
    """A bar a rank: compute, exposed communication, exposed copy and idle sum to the window exactly.

    The part of compute that hides communication is hatched in communication's colour.
    """
    colours = PALETTES[theme]
    known = [(rank, rank.summary.breakdown) for rank in ranks if rank.summary.breakdown is not None]
    rows = [f"rank {rank.rank}" for rank, _ in known]
    found = [part for _, part in known if part is not None]
    scale, unit = time_scale(max((part.window_ns for part in found), default=0))
    hatched = {
        "color": colours["computation"],
        "pattern": {
            "shape": "/",
            "fgcolor": colours["communication"],
            "bgcolor": colours["computation"],
            "size": 6,
            "solidity": 0.3,
        },
    }
    parts: list[tuple[str, list[int], dict[str, Any]]] = [
        ("compute", [part.compute_ns - part.overlap_ns for part in found], {"color": colours["computation"]}),
        ("compute over communication", [part.overlap_ns for part in found], hatched),
        (
            "exposed communication",
            [part.exposed_communication_ns for part in found],
            {"color": colours["communication"]},
        ),
        ("exposed copy", [part.exposed_copy_ns for part in found], {"color": colours["memory"]}),
        ("idle", [part.idle_ns for part in found], {"color": colours["idle"]}),
    ]
    parts = [part for part in parts if any(part[1])]
    return bars(rows, parts, f"time in the window, {unit}", theme, scale, units.duration)


def phase_markers(theme: Theme) -> Mapping[str, dict[str, Any]]:
    """How each phase is drawn: computing solid and tinted, what waits hatched or grey."""
    colours = PALETTES[theme]
    return {
        "data": {
            "color": colours["idle"],
            "pattern": {
                "shape": "\\",
                "fgcolor": colours["surface"],
                "bgcolor": colours["idle"],
                "size": 6,
                "solidity": 0.25,
            },
        },
        "copy": {"color": colours["memory"]},
        "forward": {"color": colours["computation"]},
        "backward": {"color": mix(colours["computation"], colours["surface"], 0.72)},
        "optimizer": {"color": mix(colours["computation"], colours["surface"], 0.45)},
        "exposed_communication": {"color": colours["communication"]},
        "other": {"color": mix(colours["idle"], colours["surface"], 0.55)},
    }


def phases(ranks: Sequence[RankResult], theme: Theme) -> Figure:
    """A bar a rank: where the selected steps went, by phase; sums to the steps exactly."""
    known = [(rank, rank.summary.phases_ns) for rank in ranks if rank.summary.phases_ns]
    rows = [f"rank {rank.rank}" for rank, _ in known]
    scale, unit = time_scale(max((sum(p.values()) for _, p in known if p), default=0))
    parts = [
        (name.replace("_", " "), [float((p or {}).get(name, 0)) for _, p in known], marker)
        for name, marker in phase_markers(theme).items()
        if any((p or {}).get(name, 0) for _, p in known)
    ]
    return bars(rows, parts, f"time in the selected steps, {unit}", theme, scale, units.duration)


def step_times(analysis: Analysis, ranks: Sequence[RankResult], theme: Theme) -> Figure | None:
    """Step time over steps, a line a rank (up to eight), with the median and its interval."""
    colours = PALETTES[theme]
    tables = [(rank.rank, rank.summary.steps) for rank in ranks[:8] if rank.summary.steps is not None]
    tables = [(rank, steps) for rank, steps in tables if steps is not None and len(steps) >= 3]
    statistics = analysis.step_statistics
    if not tables or statistics is None:
        return None
    longest = max(int((steps["end_ns"] - steps["start_ns"]).max()) for _, steps in tables)
    scale, unit = time_scale(longest)
    data: list[dict[str, Any]] = []
    for position, (rank, steps) in enumerate(tables):
        thin = slice(None, None, max(1, len(steps) // 2000))
        lengths = (steps["end_ns"] - steps["start_ns"])[thin]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(steps) <= 60 else "lines",
                "name": f"rank {rank}",
                "x": steps["index"][thin].tolist(),
                "y": (lengths / scale).tolist(),
                "line": {"width": 1.3, "color": colours["text"]},
                "marker": {"size": 4},
                "opacity": 1.0 if len(tables) == 1 else 0.85 - 0.6 * position / len(tables),
                "customdata": [units.duration(float(length)) for length in lengths],
                "hovertemplate": f"rank {rank}, step %{{x}}: %{{customdata}}<extra></extra>",
            }
        )
    low, mid, high = (
        value / scale for value in (statistics.low_ns, statistics.median_ns, statistics.high_ns)
    )
    shapes = [
        {
            "type": "rect",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": low,
            "y1": high,
            "line": {"width": 0},
            "fillcolor": colours["computation"],
            "opacity": 0.22,
            "layer": "below",
        },
        level(mid, colours["computation"], layer="below"),
    ]
    layout = figure_layout(
        theme,
        height=240,
        shapes=shapes,
        showlegend=len(tables) > 1,
        xaxis={"title": {"text": "step"}, "showgrid": False},
        yaxis={"title": {"text": f"step time, {unit}"}, "rangemode": "tozero"},
    )
    return {"data": data, "layout": layout}


def level(y: float, colour: str, dash: str = "solid", **more: Any) -> dict[str, Any]:
    """A horizontal line across the whole figure, as one of a layout's ``shapes``."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"width": 1.5, "dash": dash, "color": colour},
        **more,
    }


def loss(ranks: Sequence[RankResult], theme: Theme) -> Figure | None:
    """Loss over steps, a line a rank (up to eight); None where no loss was given."""
    data: list[dict[str, Any]] = []
    for rank in ranks[:8]:
        steps = rank.summary.steps
        if steps is None:
            continue
        known = np.flatnonzero(np.isfinite(steps["loss"]))
        if len(known) < 2:
            continue
        thin = known[:: max(1, len(known) // 2000)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"rank {rank.rank}",
                "x": steps["index"][thin].tolist(),
                "y": steps["loss"][thin].tolist(),
                "line": {"width": 1.3, "color": PALETTES[theme]["text"]},
                "opacity": 0.9 - 0.08 * len(data),
                "hovertemplate": f"rank {rank.rank}, step %{{x}}: %{{y:.5~g}}<extra></extra>",
            }
        )
    if not data:
        return None
    layout = figure_layout(
        theme, height=220, showlegend=len(data) > 1, xaxis={"title": {"text": "step"}, "showgrid": False}
    )
    return {"data": data, "layout": layout}


def wait_heatmap(analysis: Analysis, ranks: Sequence[RankResult], theme: Theme) -> Figure | None:
    """Rank × collective: how long each rank waited in each kind of collective."""
    colours = PALETTES[theme]
    shown = {rank.rank for rank in ranks}
    cells = [cell for cell in analysis.heatmap if cell.rank in shown]
    if not cells:
        return None
    totals: dict[str, int] = {}
    for cell in cells:
        totals[cell.collective] = totals.get(cell.collective, 0) + cell.wait_ns
    columns = sorted(totals, key=lambda name: -totals[name])[:40]
    rows = sorted(shown)
    scale, unit = time_scale(max(cell.wait_ns for cell in cells))
    place = {(cell.rank, cell.collective): cell for cell in cells}
    z = [[_waited(place.get((rank, name)), scale) for name in columns] for rank in rows]
    words = [[_cell_words(place.get((rank, name))) for name in columns] for rank in rows]
    data = [
        {
            "type": "heatmap",
            "z": z,
            "x": list(range(len(columns))),
            "y": [f"rank {rank}" for rank in rows],
            "customdata": words,
            "colorscale": [[0, colours["ground"]], [1, colours["communication"]]],
            "zmin": 0,
            "zmax": max(max(cell.wait_ns for cell in cells) / scale, 1e-9),
            "xgap": 2,
            "ygap": 2,
            "hoverongaps": False,
            "colorbar": {
                "title": {"text": f"wait, {unit}", "side": "right"},
                "thickness": 10,
                "outlinewidth": 0,
                "tickfont": {"size": 11},
            },
            "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
        }
    ]
    layout = figure_layout(
        theme,
        height=max(170, 90 + 26 * len(rows)),
        xaxis={
            "tickvals": list(range(len(columns))),
            "ticktext": [_short(name, 26) for name in columns],
            "showgrid": False,
            "tickangle": -20 if len(columns) > 3 else 0,
        },
        yaxis={"autorange": "reversed", "showgrid": False, "type": "category"},
    )
    return {"data": data, "layout": layout}


def _waited(cell: Any, scale: float) -> float | None:
    return None if cell is None else cell.wait_ns / scale


def _cell_words(cell: Any) -> str:
    if cell is None:
        return "not in this collective"
    return (
        f"{escape(cell.collective)}<br>waited {units.duration(cell.wait_ns)}, transferred "
        f"{units.duration(cell.transfer_ns)}, {units.count(cell.calls)} calls"
    )


def caused_wait(ranks: Sequence[RankResult], culprits: Sequence[int], theme: Theme) -> Figure:
    """A bar a rank: how long all others together waited because this rank entered late."""
    colours = PALETTES[theme]
    known = [(rank.rank, rank.communication) for rank in ranks if rank.communication is not None]
    scale, unit = time_scale(max((c.caused_wait_ns for _, c in known if c), default=0))
    values = [c.caused_wait_ns if c else 0 for _, c in known]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "caused wait",
            "y": [f"rank {rank}" for rank, _ in known],
            "x": [value / scale for value in values],
            "marker": {
                "color": [colours["fault" if rank in culprits else "communication"] for rank, _ in known]
            },
            "customdata": [units.duration(value) for value in values],
            "hovertemplate": "%{y} made the others wait %{customdata}<extra></extra>",
        }
    ]
    layout = figure_layout(
        theme,
        height=max(110, 56 + 24 * len(known)),
        bargap=0.3,
        xaxis={"title": {"text": f"wait caused to the others, {unit}"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False, "type": "category"},
    )
    return {"data": data, "layout": layout}


def escape(text: str) -> str:
    """Names of traces in hover texts, which Plotly reads as a small HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _short(text: str, most: int) -> str:
    return escape(text if len(text) <= most else text[: most - 1] + "…")
