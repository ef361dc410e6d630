"""The look: four colours for the three sides and idle, one for faults, two more for schedules, in light and dark.

The colours are Okabe and Ito's, which people with colour-blind eyes tell apart. CSS has the same
values as variables (``assets/look.css``); a test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["FONT", "PALETTES", "Theme", "figure_layout", "ink", "merged", "mix"]

Theme = Literal["light", "dark"]

FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", '
    '"Liberation Sans", Arial, sans-serif'
)

PALETTES: Mapping[Theme, Mapping[str, str]] = {
    "light": {
        "computation": "#0072B2",
        "communication": "#E69F00",
        "memory": "#009E73",
        "idle": "#9AA0A6",
        "fault": "#D55E00",
        "backward": "#CC79A7",
        "weight": "#D6C400",
        "text": "#1B1F24",
        "quiet": "#59626C",
        "line": "#E3E6EA",
        "surface": "#FFFFFF",
        "ground": "#F6F7F9",
    },
    "dark": {
        "computation": "#56B4E9",
        "communication": "#F0C05A",
        "memory": "#4FC3A1",
        "idle": "#6B7075",
        "fault": "#FF7F50",
        "backward": "#E3A6C9",
        "weight": "#F0E442",
        "text": "#E8EAED",
        "quiet": "#A3ABB3",
        "line": "#30363C",
        "surface": "#1A1D21",
        "ground": "#121417",
    },
}


def figure_layout(theme: Theme, **overrides: Any) -> dict[str, Any]:
    """Layout of every Plotly figure: no frame, no title, our font, quiet grid, room for the labels."""
    colours = PALETTES[theme]
    axis = {
        "gridcolor": colours["line"],
        "zeroline": False,
        "linecolor": colours["line"],
        "tickcolor": colours["line"],
        "automargin": True,
        "title": {"font": {"size": 12, "color": colours["quiet"]}, "standoff": 8},
        "tickfont": {"size": 12, "color": colours["quiet"]},
    }
    layout: dict[str, Any] = {
        "font": {"family": FONT, "size": 13, "color": colours["text"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "height": 260,
        "hoverlabel": {
            "bgcolor": colours["surface"],
            "bordercolor": colours["line"],
            "font": {"family": FONT, "size": 12, "color": colours["text"]},
            "align": "left",
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 12},
            "bgcolor": "rgba(0,0,0,0)",
        },
        "uirevision": "keep",
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }
    return merged(layout, overrides)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, dictionaries within dictionaries alike."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def mix(colour: str, ground: str, share: float) -> str:
    """``share`` of ``colour`` on ``ground``, both ``#RRGGBB``: a tint that is opaque, so that text on it is too."""
    parts = (
        round(int(colour[at : at + 2], 16) * share + int(ground[at : at + 2], 16) * (1 - share))
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02X}" for part in parts)


def ink(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (relative luminance of WCAG 2.1)."""

    def linear(part: int) -> float:
        value = part / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return "#14171A" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 else "#FFFFFF"
