"""The signature: a ternary triangle that places a run between computation, communication and memory.

A dot is the run, the hull its spread over ranks, an arrow comes from the run it is compared with.
Pure: points in, SVG text out.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import hypot

from trine.dashboard.theme import PALETTES, Theme

__all__ = ["convex_hull", "describe", "place", "svg", "svg_address"]

Weights = tuple[float, float, float]
Point = tuple[float, float]

# Corners in a box of 100 × 92: the corner of a side is where that side is everything.
_COMPUTATION: Point = (50.0, 8.0)
_COMMUNICATION: Point = (6.0, 84.0)
_MEMORY: Point = (94.0, 84.0)


def place(weights: Weights) -> Point:
    """Where (computation, communication, memory) lies in the 100 × 92 box; negatives count as zero.

    Weights need not sum to one; all zero is the middle.
    """
    parts = [max(0.0, part) for part in weights]
    total = sum(parts) or 1.0
    if sum(parts) == 0:
        parts, total = [1.0, 1.0, 1.0], 3.0
    corners = (_COMPUTATION, _COMMUNICATION, _MEMORY)
    return (
        sum(part * corner[0] for part, corner in zip(parts, corners, strict=True)) / total,
        sum(part * corner[1] for part, corner in zip(parts, corners, strict=True)) / total,
    )


def convex_hull(points: Sequence[Point]) -> list[Point]:
    """Convex hull, counter-clockwise (Andrew's monotone chain, 1979); collinear points are left out."""
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered

    def chain(sequence: Sequence[Point]) -> list[Point]:
        kept: list[Point] = []
        for point in sequence:
            while len(kept) >= 2 and _turn(kept[-2], kept[-1], point) <= 0:
                kept.pop()
            kept.append(point)
        return kept[:-1]

    return chain(ordered) + chain(ordered[::-1])


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def describe(weights: Weights | None) -> str:
    """The glyph in words, for those who cannot see it."""
    if weights is None:
        return "place between computation, communication and memory: unknown"
    names = ("computation", "communication", "memory")
    total = sum(weights) or 1.0
    return ", ".join(f"{name} {part / total:.0%}" for name, part in zip(names, weights, strict=True))


def svg(
    weights: Weights | None,
    hull: Sequence[Weights] = (),
    before: Weights | None = None,
    theme: Theme = "light",
) -> str:
    """The glyph as an SVG document of view box 100 × 92; no weights draws the empty triangle."""
    colours = PALETTES[theme]
    corners = ((_COMPUTATION, "computation"), (_MEMORY, "memory"), (_COMMUNICATION, "communication"))
    parts = []
    for at, (corner, name) in enumerate(corners):
        # From the middle of one edge over the corner to the middle of the other: the corner has its colour.
        last, following = corners[at - 1][0], corners[(at + 1) % 3][0]
        path = " L".join(
            f"{x:.1f} {y:.1f}" for x, y in (_middle(last, corner), corner, _middle(corner, following))
        )
        parts.append(
            f'<path d="M{path}" stroke="{colours[name]}" stroke-width="5.5" stroke-linejoin="round" fill="none"/>'
        )
    if weights is not None:
        outline = convex_hull([place(point) for point in hull])
        if len(outline) >= 2:
            shape = " ".join(f"{x:.2f},{y:.2f}" for x, y in outline)
            parts.append(
                f'<polygon points="{shape}" fill="{colours["text"]}" fill-opacity="0.16" '
                f'stroke="{colours["text"]}" stroke-opacity="0.35" stroke-width="1.5" stroke-linejoin="round"/>'
            )
        if before is not None:
            parts.append(_arrow(place(before), place(weights), colours["quiet"]))
        x, y = place(weights)
        parts.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="7" fill="{colours["text"]}" '
            f'stroke="{colours["surface"]}" stroke-width="2"/>'
        )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 92">{"".join(parts)}</svg>'


def _middle(a: Point, b: Point) -> Point:
    return (a[0] + b[0]) / 2, (a[1] + b[1]) / 2


def _arrow(start: Point, end: Point, colour: str) -> str:
    length = hypot(end[0] - start[0], end[1] - start[1])
    if length < 3:
        return ""
    ux, uy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    tip = (end[0] - 8 * ux, end[1] - 8 * uy)
    back = (tip[0] - 7 * ux, tip[1] - 7 * uy)
    head = [tip, (back[0] - 4 * uy, back[1] + 4 * ux), (back[0] + 4 * uy, back[1] - 4 * ux)]
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in head)
    return (
        f'<circle cx="{start[0]:.2f}" cy="{start[1]:.2f}" r="4" fill="none" stroke="{colour}" stroke-width="2"/>'
        f'<path d="M{start[0]:.2f} {start[1]:.2f}L{back[0]:.2f} {back[1]:.2f}" stroke="{colour}" '
        f'stroke-width="2.5"/><polygon points="{points}" fill="{colour}"/>'
    )


def svg_address(
    weights: Weights | None,
    hull: Sequence[Weights] = (),
    before: Weights | None = None,
    theme: Theme = "light",
) -> str:
    """The same glyph as a ``data:`` address, for an image element."""
    document = svg(weights, hull, before, theme).encode()
    return "data:image/svg+xml;base64," + base64.b64encode(document).decode()
