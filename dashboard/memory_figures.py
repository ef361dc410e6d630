"""Figures of memory: over time, and what is alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trine.dashboard import units
from trine.dashboard.figures import bars, escape, level, size_scale, time_scale
from trine.dashboard.theme import PALETTES, Theme, figure_layout, mix

if TYPE_CHECKING:
    from trine.analyzers.results import RankResult

__all__ = ["memory_at_peak", "memory_over_time"]

Figure = dict[str, Any]


def memory_over_time(ranks: Sequence[RankResult], theme: Theme) -> Figure | None:
    """Allocated (solid) and reserved (dotted) memory over time, a line a rank, and the device's capacity."""
    colours = PALETTES[theme]
    known = [(rank.rank, rank.summary.memory) for rank in ranks[:16] if rank.summary.memory is not None]
    known = [(rank, memory) for rank, memory in known if memory is not None and memory.series]
    if not known:
        return None
    begin = min(memory.series[0][0] for _, memory in known)
    scale, unit = time_scale(max(memory.series[-1][0] for _, memory in known) - begin)
    capacity = max((m.capacity_bytes or 0 for _, m in known), default=0)
    top = max(max(a, r or 0) for _, memory in known for _, a, r in memory.series)
    # A capacity far above the use would flatten the curve: it is then said in words instead.
    drawn = capacity if capacity and capacity <= 4 * top else 0
    size, size_unit = size_scale(max(top, drawn))
    data: list[dict[str, Any]] = []
    for position, (rank, memory) in enumerate(known):
        times = [(time - begin) / scale for time, _, _ in memory.series]
        fade = 1.0 if len(known) == 1 else 0.95 - 0.6 * position / len(known)
        data.append(
            _stairs(
                f"rank {rank} {'allocated' if memory.kind == 'device' else 'in use'}",
                times,
                [a / size for _, a, _ in memory.series],
                colours["memory"],
                "solid",
                fade,
                size_unit,
            )
        )
        if any(reserved for _, _, reserved in memory.series):
            data.append(
                _stairs(
                    f"rank {rank} reserved",
                    times,
                    [None if r is None else r / size for _, _, r in memory.series],
                    colours["quiet"],
                    "dot",
                    fade,
                    size_unit,
                )
            )
    layout = figure_layout(
        theme,
        height=320,
        shapes=[level(drawn / size, colours["fault"], "dash")] if drawn else [],
        annotations=[_capacity_words(drawn, size, colours["fault"])] if drawn else [],
        showlegend=len(data) > 1,
        xaxis={"title": {"text": f"time, {unit}"}, "showgrid": False},
        yaxis={"title": {"text": size_unit}, "rangemode": "tozero"},
    )
    return {"data": data, "layout": layout}


def _capacity_words(capacity: int, scale: float, colour: str) -> dict[str, Any]:
    return {
        "xref": "paper",
        "x": 1,
        "y": capacity / scale,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"capacity {units.size(capacity)}",
        "font": {"size": 12, "color": colour},
    }


def _stairs(
    name: str, x: list[float], y: list[Any], colour: str, dash: str, opacity: float, unit: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "opacity": opacity,
        "line": {"shape": "hv", "width": 1.4, "color": colour, "dash": dash},
        "hovertemplate": f"{name}: %{{y:.4~g}} {unit}<extra></extra>",
    }


def memory_at_peak(ranks: Sequence[RankResult], theme: Theme) -> Figure | None:
    """A bar a rank: what was alive at its peak, by category."""
    known = [
        (rank.rank, rank.summary.memory)
        for rank in ranks
        if rank.summary.memory and rank.summary.memory.at_peak
    ]
    if not known:
        return None
    totals: dict[str, int] = {}
    for _, memory in known:
        for name, amount in (memory.at_peak if memory else {}).items():
            totals[name] = totals.get(name, 0) + amount
    names = sorted(totals, key=lambda name: -totals[name])
    scale, unit = size_scale(max(sum(memory.at_peak.values()) for _, memory in known if memory))
    parts = [
        (
            escape(name.replace("_", " ")),
            [float(memory.at_peak.get(name, 0)) if memory else 0.0 for _, memory in known],
            category_marker(position, name, theme),
        )
        for position, name in enumerate(names)
    ]
    return bars(
        [f"rank {rank}" for rank, _ in known], parts, f"alive at the peak, {unit}", theme, scale, units.size
    )


def category_marker(position: int, name: str, theme: Theme) -> dict[str, Any]:
    """Tints of memory's colour, the largest category the fullest; what nobody owns is grey."""
    colours = PALETTES[theme]
    if name in ("unattributed", "other", "unknown"):
        return {"color": colours["idle"]}
    if "communication" in name:
        return {"color": colours["communication"]}
    return {"color": mix(colours["memory"], colours["surface"], max(0.3, 1.0 - 0.17 * position))}
