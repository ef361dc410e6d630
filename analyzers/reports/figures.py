"""Figures as inline SVG, drawn by hand: no script, no font, nothing to fetch, a few kilobytes each.

Colours are classes (``side-computation``, ...), so the page's theme decides them. Every text is
escaped here. Each figure carries its numbers as tooltips; its table stands under it in the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from trine.analyzers.units import duration

from ._cells import axis_words, printer
from .document import Areas, Bars, Heat, Lanes, Series, shorten
from .lanes import extent, without_slivers

__all__ = ["areas", "bars", "glyph", "heat", "lanes", "series"]

Point = tuple[float, float, float]

#: Drawing width in user units; the page scales it.
WIDTH = 960
LABEL = 90
#: The most that labels of rows may take, and a line of a legend.
MOST_LABEL = 230
LEGEND_LINE = 18
#: Shades of one side's colour, for parts that share it (forward, backward).
SHADES = (1.0, 0.62, 0.38)
#: Lines whose names are written beside them.
MOST_NAMED_LINES = 3
#: Narrowest span that is drawn by itself, in user units.
MOST_SLIVER = 0.6


def _svg(width: float, height: float, body: str, title: str, kind: str, above: int = 0) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 {-above} {width:g} {height + above:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def _shade(keys: Sequence[str], side: Mapping[str, str], key: str) -> float:
    """Parts of one side get lighter in order."""
    same = [other for other in keys if side[other] == side[key]]
    return SHADES[min(same.index(key), len(SHADES) - 1)]


def bars(figure: Bars) -> str:
    """Stacked horizontal bars on one scale, with a legend."""
    keys, side = list(figure.legend), figure.side
    longest = max((sum(values.values()) for _, values in figure.rows), default=0.0) or 1.0
    row_height = 22 if len(figure.rows) <= 24 else 12
    left = _room_for(label for label, _ in figure.rows)
    legend, above = _legend(figure.legend, side, left)
    body = [legend]
    for number, (label, values) in enumerate(figure.rows):
        y, x = 30 + number * row_height, float(left)
        body.append(_row_label(label, left - 8, y + row_height * 0.68))
        for key in keys:
            width = max(values.get(key, 0.0), 0.0) / longest * (WIDTH - left)
            if width <= 0:
                continue
            tip = f"{label}: {figure.legend[key]} {printer(figure.unit)(values[key])}"
            body.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{row_height - 4}" class="side-{side[key]}" '
                f'fill-opacity="{_shade(keys, side, key):g}"><title>{escape(tip)}</title></rect>'
            )
            x += width
    return _svg(WIDTH, 34 + len(figure.rows) * row_height, "".join(body), figure.title, "bars", above)


def _room_for(labels: Iterable[str]) -> int:
    """Room for the labels of rows, in user units."""
    return min(max([LABEL, *(16 + 7 * len(label) for label in labels)]), MOST_LABEL)


def _row_label(label: str, x: float, y: float) -> str:
    shown = shorten(label, (MOST_LABEL - 16) // 7)
    text = _text(x, y, shown, "label", "end")
    return text if shown == label else f"<g>{text}<title>{escape(label)}</title></g>"


def _legend(legend: Mapping[str, str], side: Mapping[str, str], left: float = LABEL) -> tuple[str, int]:
    """The legend, and how far it reaches above the figure's usual head where it takes several lines."""
    keys, x = list(legend), float(left)
    lines: list[list[tuple[float, str]]] = [[]]
    for key in keys:
        width = 34 + 7.2 * len(legend[key])
        if x + width > WIDTH and lines[-1]:
            lines.append([])
            x = float(left)
        lines[-1].append((x, key))
        x += width
    above = LEGEND_LINE * (len(lines) - 1)
    parts = []
    for number, line in enumerate(lines):
        y = 6 - above + LEGEND_LINE * number
        for place, key in line:
            parts.append(
                f'<rect x="{place:.1f}" y="{y}" width="12" height="12" class="side-{side[key]}" '
                f'fill-opacity="{_shade(keys, side, key):g}"/>'
            )
            parts.append(_text(place + 17, y + 10, legend[key], "label"))
    return "".join(parts), above


def series(figure: Series) -> str:
    """Lines from zero, so that heights compare; a grid of three, the axis in words."""
    words = printer(figure.unit)
    height, left, bottom, top = 220, 90, 190, 16
    points = [point for _, line in figure.lines for point in line]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    high_y = max((y for _, y in points), default=0.0) or 1.0
    across = (WIDTH - left - 10) / ((high_x - low_x) or 1.0)
    down = (bottom - top) / (high_y * 1.05)
    body = []
    for part in (0.0, 0.5, 1.0):
        y = bottom - high_y * part * down
        body.append(f'<line x1="{left}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        body.append(_text(left - 8, y + 4, words(high_y * part), "label", "end"))
    for number, (label, line) in enumerate(figure.lines):
        path = " ".join(f"{left + (x - low_x) * across:.1f},{bottom - y * down:.1f}" for x, y in line)
        opacity = max(1.0 - 0.07 * number, 0.25)
        body.append(
            f'<polyline points="{path}" class="line-{figure.side}" stroke-opacity="{opacity:.2f}">'
            f"<title>{escape(label)}</title></polyline>"
        )
    body += _line_names(figure, lambda x: left + (x - low_x) * across, lambda y: bottom - y * down)
    body.append(_text(left, height - 10, f"{figure.axis} {low_x:g}", "label"))
    body.append(_text(WIDTH - 10, height - 10, f"{high_x:.4g}", "label", "end"))
    return _svg(WIDTH, height, "".join(body), figure.title, "series")


def _line_names(
    figure: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]
) -> Iterator[str]:
    """Names of two or three lines beside their last points; more would cover each other and stay tooltips."""
    if not 1 < len(figure.lines) <= MOST_NAMED_LINES:
        return
    taken: list[float] = []
    for label, line in figure.lines:
        y = at_y(line[-1][1]) - 6
        while any(abs(y - other) < 13 for other in taken):
            y -= 13
        taken.append(y)
        yield _text(at_x(line[-1][0]) - 4, max(y, 12.0), label, "label", "end")


def lanes(figure: Lanes) -> str:
    """Spans on one time axis, a row a lane; each span's words and length are its tooltip."""
    keys, side, whole = list(figure.legend), figure.side, extent(figure)
    left = _room_for(label for label, _ in figure.rows)
    across = (WIDTH - left - 4) / whole
    row_height = 24 if len(figure.rows) <= 24 else 12
    bottom = 30 + len(figure.rows) * row_height
    legend, above = _legend(figure.legend, side, left)
    body = [legend]
    for number, (label, spans) in enumerate(figure.rows):
        y = 30 + number * row_height
        if row_height >= 20 or number % 4 == 0:
            body.append(_row_label(label, left - 8, y + row_height * 0.66))
        body.append(
            f'<line x1="{left}" x2="{WIDTH - 4}" y1="{y + row_height / 2 - 2:g}" y2="{y + row_height / 2 - 2:g}" class="grid"/>'
        )
        for start, end, key, words in without_slivers(spans, MOST_SLIVER / across):
            x, width = left + start * across, max((end - start) * across, MOST_SLIVER)
            said = f"{label}: {' '.join(part for part in (figure.legend[key], words) if part)}"
            tip = f"{said}, {duration(end - start)} at {duration(start)}"
            body.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{row_height - 4}" '
                f'class="side-{side[key]} span" fill-opacity="{_shade(keys, side, key):g}"><title>{escape(tip)}</title></rect>'
            )
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if part == 1.0 else "middle" if part else "start"
        body.append(
            _text(left + part * (WIDTH - left - 4), bottom + 14, duration(part * whole), "label", anchor)
        )
    return _svg(WIDTH, bottom + 20, "".join(body), figure.title, "lanes", above)


def areas(figure: Areas) -> str:
    """Layers on top of each other, the first at the bottom; each one's highest value is its tooltip."""
    words, x = printer(figure.unit), figure.x
    height, left, bottom, top = 250, LABEL, 214, 34
    legend = {str(number): label for number, (label, _, _) in enumerate(figure.layers)}
    side = {str(number): role for number, (_, role, _) in enumerate(figure.layers)}
    total = [sum(values) for values in zip(*(values for _, _, values in figure.layers), strict=True)]
    high = max(total, default=0.0) or 1.0
    drawn, over = _legend(legend, side)
    body = [drawn]
    if not total:
        return _svg(WIDTH, top, "".join(body), figure.title, "areas", over)
    across, down = (WIDTH - left - 10) / ((x[-1] - x[0]) or 1.0), (bottom - top) / (high * 1.03)
    for part in (0.0, 0.5, 1.0):
        y = bottom - high * part * down
        body.append(f'<line x1="{left}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        body.append(_text(left - 8, y + 4, words(high * part), "label", "end"))
    below = [0.0] * len(x)
    for number, (label, role, values) in enumerate(figure.layers):
        above = [low + value for low, value in zip(below, values, strict=True)]
        outline = [*zip(x, above, strict=True), *reversed(list(zip(x, below, strict=True)))]
        path = " ".join(f"{left + (at - x[0]) * across:.1f},{bottom - y * down:.1f}" for at, y in outline)
        most = max(range(len(x)), key=values.__getitem__)
        tip = f"{label}: at most {words(values[most])} at {axis_words(figure.axis, x[most])}"
        body.append(
            f'<polygon points="{path}" class="side-{role}" '
            f'fill-opacity="{_shade(list(legend), side, str(number)):g}"><title>{escape(tip)}</title></polygon>'
        )
        below = above
    body.append(_text(left, height - 14, axis_words(figure.axis, x[0]), "label"))
    body.append(_text(WIDTH - 10, height - 14, axis_words(figure.axis, x[-1]), "label", "end"))
    return _svg(WIDTH, height, "".join(body), figure.title, "areas", over)


def heat(figure: Heat) -> str:
    """A cell a rank and collective; its opacity is its wait over the largest."""
    largest = max((value for row in figure.values for value in row if value is not None), default=0.0) or 1.0
    row_height = 20 if len(figure.rows) <= 32 else 9
    width = (WIDTH - LABEL) / max(len(figure.columns), 1)
    body = []
    for number, name in enumerate(figure.columns):
        most = max(int(width / 7), 3)
        shown = name if len(name) <= most else name[: most - 1] + "…"
        body.append(
            f"<g>{_text(LABEL + (number + 0.5) * width, 16, shown, 'label', 'middle')}<title>{escape(name)}</title></g>"
        )
    for number, (label, row) in enumerate(zip(figure.rows, figure.values, strict=True)):
        y = 24 + number * row_height
        if row_height >= 20 or number % 4 == 0:
            body.append(_text(LABEL - 8, y + row_height * 0.7, label, "label", "end"))
        for place, value in enumerate(row):
            tip = f"{label}, {figure.columns[place]}: {'–' if value is None else duration(value)}"
            opacity = 0.0 if value is None else 0.04 + 0.96 * value / largest
            body.append(
                f'<rect x="{LABEL + place * width:.1f}" y="{y}" width="{max(width - 2, 1):.1f}" height="{row_height - 2}" '
                f'class="side-{figure.side} cell" fill-opacity="{opacity:.3f}"><title>{escape(tip)}</title></rect>'
            )
    return _svg(WIDTH, 28 + len(figure.rows) * row_height, "".join(body), figure.title, "heat")


def glyph(point: Point | None, hull: Sequence[Point], labels: Sequence[str], extent: int = 170) -> str:
    """The triangle: a dot for the job, one small dot a rank and their hull. Corners are computation
    (top), communication (left), memory (right)."""
    margin, corners = 14.0, []
    side = extent - 2 * margin
    tall = side * 3**0.5 / 2
    corners = [(extent / 2, margin), (margin, margin + tall), (extent - margin, margin + tall)]

    def place(share: Point) -> tuple[float, float]:
        x = sum(part * corner[0] for part, corner in zip(share, corners, strict=True))
        y = sum(part * corner[1] for part, corner in zip(share, corners, strict=True))
        return x, y

    top, left, right = corners
    body = [
        f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" class="ground"/>',
        f'<circle cx="{top[0]:.1f}" cy="{top[1]:.1f}" r="6" class="side-computation"/>',
        f'<circle cx="{left[0]:.1f}" cy="{left[1]:.1f}" r="6" class="side-communication"/>',
        f'<circle cx="{right[0]:.1f}" cy="{right[1]:.1f}" r="6" class="side-memory"/>',
    ]
    outline = _hull([place(share) for share in hull])
    if len(outline) > 2:
        body.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in outline)}" class="hull"/>')
    elif len(outline) == 2:
        (x1, y1), (x2, y2) = outline
        body.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="hull"/>')
    if point is not None:
        x, y = place(point)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="dot"/>')
    return _svg(extent, margin * 2 + tall, "".join(body), ", ".join(labels) or "–", "glyph")


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Convex hull by Andrew's monotone chain (1979)."""
    ordered = sorted({(round(x, 2), round(y, 2)) for x, y in points})
    if len(ordered) <= 2:
        return ordered

    def half(walk: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        chain: list[tuple[float, float]] = []
        for x, y in walk:
            while len(chain) >= 2:
                (x1, y1), (x2, y2) = chain[-2:]
                if (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1) > 0:
                    break
                chain.pop()
            chain.append((x, y))
        return chain[:-1]

    return half(ordered) + half(ordered[::-1])
