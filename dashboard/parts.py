"""Parts that every page is made of: sections, tables, the glyph, notes. Plain HTML, no library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dash import html

from trine.dashboard.attributes import aria
from trine.dashboard.glyph import describe, svg_address
from trine.dashboard.units import NOTHING

__all__ = ["facts", "glyph", "notice", "pairs", "pill", "section", "swatch", "table", "words"]

Weights = tuple[float, float, float]


def glyph(
    weights: Weights | None,
    hull: Sequence[Weights] = (),
    before: Weights | None = None,
    size: int = 40,
) -> Any:
    """The triangle as two images, one a theme; CSS shows one of them."""
    return html.Span(
        [
            html.Img(
                src=svg_address(weights, hull, before, theme), className=f"only-{theme}", width=size, alt=""
            )
            for theme in ("light", "dark")
        ],
        className="glyph",
        role="img",
        title=describe(weights),
        **aria(label=describe(weights)),
    )


def section(title: str, children: Any, note: str | None = None, id: str | None = None) -> Any:
    """A titled part of a page; ``note`` is one quiet line under the title."""
    head: list[Any] = [html.H2(title)]
    if note:
        head.append(html.P(note, className="quiet"))
    named: dict[str, Any] = {} if id is None else {"id": id}
    return html.Section(
        [html.Div(head, className="section-head"), *_listed(children)], className="section", **named
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = (), caption: str = ""
) -> Any:
    """A plain table; ``numbers`` are the columns that are right-aligned. A column of nothing is left out."""
    listed = [list(row) for row in rows]
    kept = [
        at for at in range(len(columns)) if not listed or any(row[at] not in (NOTHING, "") for row in listed)
    ]
    right = set(numbers)
    align = {at: "number" if at in right else "" for at in kept}
    head = html.Thead(html.Tr([html.Th(columns[at], className=align[at], scope="col") for at in kept]))
    body = html.Tbody([html.Tr([html.Td(row[at], className=align[at]) for at in kept]) for row in listed])
    parts = [html.Caption(caption)] if caption else []
    return html.Div(html.Table([*parts, head, body]), className="table-frame")


def pairs(rows: Iterable[tuple[str, Any]]) -> Any:
    """A table of names and values, which needs no head."""
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value, className="number")]) for name, value in rows]
    return html.Div(html.Table(html.Tbody(body)), className="table-frame pairs")


def facts(pairs: Iterable[tuple[str, Any, str | None]]) -> Any:
    """A row of labelled numbers: (label, value, quiet second line)."""
    return html.Dl(
        [
            html.Div(
                [
                    html.Dt(label),
                    html.Dd(value, className="fact-value"),
                    html.Dd(note, className="fact-note") if note else None,
                ],
                className="fact",
            )
            for label, value, note in pairs
        ],
        className="facts",
    )


def pill(text: str, kind: str = "") -> Any:
    """A small word in a frame: a state, a kind, how sure."""
    return html.Span(text, className=f"pill {kind}".strip())


def swatch(kind: str) -> Any:
    """A small square in the colour of ``kind`` (a CSS class)."""
    return html.Span(className=f"swatch {kind}", **aria(hidden="true"))


def notice(title: str, text: str, kind: str = "") -> Any:
    """A panel that says why there is nothing else to see."""
    return html.Div(
        [html.H2(title), html.P(text)],
        className=f"notice {kind}".strip(),
        role="alert" if kind == "fault" else "status",
    )


def words(text: str) -> Any:
    """A sentence in which ``code`` between backticks looks like code."""
    parts = text.split("`")
    return html.Span([html.Code(part) if at % 2 else part for at, part in enumerate(parts)])


def _listed(children: Any) -> list[Any]:
    return list(children) if isinstance(children, (list, tuple)) else [children]
