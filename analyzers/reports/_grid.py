"""A table as lines of text: what gives way where a row is too long, and in which order.

Titles of several words take several lines first; then flexible columns are shortened in their middle (of the last
one, and of those that wrap, words go on in further lines instead); then whatever is widest.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .document import Column, shorten

__all__ = ["head_lines", "row_lines", "widths_of", "wrap"]

#: Between two columns.
_GAP = 2
#: A flexible column is not made narrower than this while another can give way.
_NARROWEST = 12
#: Lines that a sentence, or a cell that wraps, may take.
_MOST_LINES = 3
#: Between the parts of a layout.
_DOT = " · "
#: The space between a number and its unit.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµn]?s|min|h|days|[KMGT]?i?B(?:/s)?)(?![\w]))")
_MEASURING = Console(file=io.StringIO(), width=100)


def wrap(text: str, width: int) -> list[str]:
    """Lines of whole words; a number stays with its unit."""
    bound = _UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(bound, width, break_on_hyphens=False) or [""]
    if any(cell_len(line) > width for line in lines):  # characters two cells wide
        lines = [line.plain for line in Text(text).wrap(_MEASURING, width)]
    return [line.replace("\u00a0", " ").rstrip() for line in lines]


def widths_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """A width for each column, so that a row fits into ``width`` cells."""
    cells = [max((cell_len(row[number]) for row in rows), default=0) for number in range(len(columns))]
    words = [max((cell_len(word) for word in column.title.split()), default=0) for column in columns]
    widths = [max(cell, cell_len(column.title)) for cell, column in zip(cells, columns, strict=True)]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        titled = [n for n in range(len(columns)) if widths[n] > max(cells[n], words[n])]
        flexible = [n for n, column in enumerate(columns) if column.flexible and widths[n] > _NARROWEST]
        widest = max(titled or flexible or range(len(widths)), key=lambda n: widths[n])
        widths[widest] -= 1
    return widths


def head_lines(columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """The titles, the last line of each at the bottom."""
    titles = [wrap(column.title, max(width, 1)) for column, width in zip(columns, widths, strict=True)]
    tall = max(len(title) for title in titles)
    padded = [[""] * (tall - len(title)) + title for title in titles]
    return [_line([title[line] for title in padded], columns, widths) for line in range(tall)]


def row_lines(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """One row: one line, or several where a column that wraps, or the last, holds more than its room."""
    last = len(cells) - 1
    stacks = [
        _lines_of(cell, width)
        if column.wraps or (number == last and column.flexible and column.align == "left")
        else [cell]
        for number, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True))
    ]
    tall = max(map(len, stacks))
    return [
        _line([stack[line] if line < len(stack) else "" for stack in stacks], columns, widths)
        for line in range(tall)
    ]


def _lines_of(cell: str, width: int) -> list[str]:
    """Of whole words, a few at most; of parts between dots, where each has room."""
    if cell_len(cell) <= width or " " not in cell:
        return [cell]
    parts = cell.split(_DOT)
    if len(parts) > 1 and max(cell_len(part) for part in parts) + 2 <= width:
        cell = f"{_DOT.rstrip()} ".join(part.replace(" ", "\u00a0") for part in parts).replace(
            _DOT.rstrip(), "\u00a0" + _DOT.strip()
        )
    lines = wrap(cell, width)
    rest = " ".join(lines[_MOST_LINES - 1 :])
    return [*lines[: _MOST_LINES - 1], *([rest] if rest else [])]


def _fitted(text: str, width: int) -> str:
    """Text in at most ``width`` cells; some characters take two."""
    most = width
    while cell_len(shorten(text, most)) > width and most > 1:
        most -= 1
    return shorten(text, most)


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = _fitted(cell, width)
        space = " " * max(width - cell_len(text), 0)
        padded.append(space + text if column.align == "right" else text + space)
    return (" " * _GAP).join(padded)
