"""The report's blocks as parts of a page, so that a study that has a section in the report has one here too."""

from __future__ import annotations

from typing import Any

from dash import html

from trine.analyzers.reports.document import (
    Areas,
    Bars,
    Block,
    FindingCard,
    Heat,
    Items,
    Lanes,
    Paragraph,
    Section,
    Series,
    Table,
)
from trine.dashboard import block_figures
from trine.dashboard.components import graph
from trine.dashboard.parts import section, table
from trine.dashboard.theme import Theme

__all__ = ["render"]

#: Rows beyond which the numbers under a figure start folded.
OPEN_ROWS = 12
#: A longer cell is cut; the rest is its tooltip.
MOST_CELL = 120


def render(one: Section, theme: Theme) -> Any:
    """A section of the report as a section of a page."""
    parts: list[Any] = []
    for number, block in enumerate(one.blocks):
        parts += _block(block, theme, f"{one.id}-{number}")
    return section(one.title, parts, id=one.id)


def _block(block: Block, theme: Theme, id: str) -> list[Any]:
    if isinstance(block, Paragraph):
        return [html.P(block.text)]
    if isinstance(block, Items):
        return [html.Ul([_item(item) for item in block.items], className="items")]
    if isinstance(block, Table):
        return _table(block, titled=True)
    if isinstance(block, FindingCard):  # findings have a page of their own
        return []
    if isinstance(block, Bars):
        figure = block_figures.bars(block, theme)
    elif isinstance(block, Series):
        figure = block_figures.series(block, theme)
    elif isinstance(block, Heat):
        figure = block_figures.heat(block, theme)
    elif isinstance(block, Lanes):
        figure = block_figures.lanes(block, theme)
    else:
        assert isinstance(block, Areas)
        figure = block_figures.areas(block, theme)
    numbers = _table(block.table, titled=False)
    if len(block.table.rows) > OPEN_ROWS:
        numbers = [html.Details([html.Summary("numbers"), *numbers])]
    return [html.H3(block.title), graph(figure, block.title, id), *numbers]


def _item(item: tuple[str, str, str]) -> Any:
    mark, text, further = item
    words: list[Any] = [html.Div(text)]
    if further:
        words.append(html.Div(further, className="quiet"))
    return html.Li([html.Span(mark, className="quiet"), html.Div(words)])


def _table(block: Table, titled: bool) -> list[Any]:
    parts: list[Any] = [html.H3(block.title)] if titled and block.title else []
    if block.rows:
        rows = [[_cell(cell) for cell in row] for row in block.rows]
        numbers = [at for at, column in enumerate(block.columns) if column.align == "right"]
        parts.append(table([column.title for column in block.columns], rows, numbers))
    if block.note:
        parts.append(html.P(block.note, className="block-note"))
    return parts


def _cell(cell: str) -> Any:
    if len(cell) <= MOST_CELL:
        return cell
    return html.Span(cell[: MOST_CELL - 1] + "…", title=cell[:600], className="wraps")
