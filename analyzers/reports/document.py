"""A report before it has a form: blocks that text, Markdown and HTML each draw in their own way.

    Analysis ──content.compose──► Document ──► text.render | markdown.render | html.render

Every string here is plain text, already cleaned of control characters; each renderer escapes for its
own language. Numbers that are drawn stay numbers beside the words that print them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Areas",
    "Bars",
    "Block",
    "Column",
    "Document",
    "FindingCard",
    "Heat",
    "Items",
    "Lanes",
    "Paragraph",
    "Section",
    "Series",
    "Table",
    "Unit",
    "clean",
    "fitting",
    "shorten",
    "with_content",
]

Point = tuple[float, float, float]
#: What the values of a figure are: ns, bytes, or plain numbers.
Unit = Literal["duration", "size", "count"]

#: Terminal sequences go whole; other unprintable characters (control, direction, surrogates) one by one.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")


def clean(text: object) -> str:
    """Text from a trace as one printable line: no control, ANSI or direction characters."""
    plain = _ANSI.sub("", str(text))
    if not plain.isprintable():
        plain = "".join(character if character.isprintable() else " " for character in plain)
    return " ".join(plain.split())


#: ``folder/file.py:12``, or ``folder/file.py(12)`` as the profiler writes it; the group is without folders.
_PLACE = re.compile(r"(?:[^\s/<>]*/)*([^\s/<>]+\.py(?::\d+|\(\d+\)))")


def _around(before: str, place: str, after: str, most: int) -> str:
    """The place whole, as long as it fits, and of what stands around it as much as does, the function's name first."""
    room = most - len(place)
    if room < 0:
        return f"…{place[len(place) - (most - 1) :]}" if most > 1 else "…"[:most]
    after = after if len(after) <= room else f"{after[: room - 1]}…" if room > 2 else ""
    room -= len(after)
    before = before if len(before) <= room else f"{before[: room - 1]}…" if room > 2 else ""
    return before + place + after


def shorten(text: str, most: int) -> str:
    """At most ``most`` characters; the middle goes, since kernel names differ at both ends. Of a place in a program the
    file's name and the line stay: ``model/layers.py:350 forward`` is ``layers.py:350 for…``, then ``…ers.py:350``."""
    if len(text) <= most:
        return text
    place = _PLACE.search(text)
    if place is not None:
        return _around(text[: place.start()], place[1], text[place.end() :], most)
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def fitting(sections: Iterable[tuple[str, str]], room: int) -> tuple[list[str], list[str]]:
    """Of (title, rendered) sections: those that fit into ``room`` bytes of UTF-8, and the titles of the others.

    A section that does not fit is left out and later ones are still tried: what to do is worth more than one
    long table.
    """
    parts, left = [], []
    for title, rendered in sections:
        used = len(rendered.encode())
        if used > room:
            left.append(title)
            continue
        room -= used
        parts.append(rendered)
    return parts, left


@dataclass(frozen=True, slots=True)
class Column:
    """``flexible`` columns may be shortened where room is short; those that ``wraps`` go on in further lines instead."""

    title: str
    align: Literal["left", "right"] = "left"
    flexible: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; ``note`` says what was left out."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""


def with_content(table: Table) -> Table:
    """The table without the columns in which nothing is known; the first always stays."""
    kept = [
        number
        for number in range(len(table.columns))
        if number == 0 or not table.rows or any(row[number] not in ("", "–") for row in table.rows)
    ]
    if len(kept) == len(table.columns):
        return table
    columns = tuple(table.columns[number] for number in kept)
    rows = tuple(tuple(row[number] for number in kept) for row in table.rows)
    return Table(columns, rows, table.title, table.note)


@dataclass(frozen=True, slots=True)
class Bars:
    """A stacked bar a row: ``rows`` are (label, value by part key), ``legend`` is part key → label.
    ``side`` is part key → colour role (computation, communication, memory, idle, fault, backward, weight)."""

    title: str
    legend: Mapping[str, str]
    side: Mapping[str, str]
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    table: Table
    unit: Unit = "duration"


@dataclass(frozen=True, slots=True)
class Series:
    """Lines over a common axis: ``lines`` are (label, ((x, y), …)); ``unit`` says how a value of y is printed."""

    title: str
    side: str
    unit: Unit
    axis: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    table: Table


@dataclass(frozen=True, slots=True)
class Heat:
    """``values[row][column]`` in ns; None where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    side: str
    table: Table


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Plain words."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list; each item is (mark, text, further text)."""

    items: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class FindingCard:
    """A finding as users read it: severity, number, fix, side effect, gain, and how it was predicted."""

    number: int
    kind: Literal["fault", "opportunity"]
    kind_words: str
    id: str
    severity: str
    title: str
    change: tuple[tuple[str, str], ...]  # key, value as TOML
    why: str
    numerics: str
    gain: str
    formula: str
    evidence: tuple[tuple[str, str], ...]
    caution: str = ""  # keys of the change that this version's runtime does not apply


@dataclass(frozen=True, slots=True)
class Lanes:
    """Spans over a common time axis, a row a lane, as a schedule is drawn: ``rows`` are (label, spans), a span is
    (start, end, key, words), in ns from the drawing's start. ``legend`` is key → label, ``side`` key → colour
    role as in :class:`Bars` (and ``backward``, ``weight`` for schedules). ``words`` may be empty."""

    title: str
    legend: Mapping[str, str]
    side: Mapping[str, str]
    rows: tuple[tuple[str, tuple[tuple[int, int, str, str], ...]], ...]
    table: Table


@dataclass(frozen=True, slots=True)
class Areas:
    """Layers that add up over a common axis: ``layers`` are (label, colour role, values), each with a value for
    every ``x``, in ascending order. ``axis`` names ``x``: one that begins with "time" is printed as ns, any other as
    a plain number."""

    title: str
    unit: Unit
    axis: str
    x: tuple[float, ...]
    layers: tuple[tuple[str, str, tuple[float, ...]], ...]
    table: Table


Block = Table | Bars | Series | Heat | Lanes | Areas | Paragraph | Items | FindingCard


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report with a heading; ``id`` is its anchor."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The whole report. ``facts`` are the head's (label, value) pairs, ``notices`` sentences right under the verdict."""

    title: str
    subtitle: str
    verdict: str
    confidence: str
    bound: Literal["fault", "healthy", "unknown"]
    triangle: Point | None
    hull: tuple[Point, ...]
    sides: tuple[tuple[str, str], ...]  # side → "computation 88 %"
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = field(default=())
    notices: tuple[str, ...] = ()
