"""The report for a pull request or an issue: GitHub's Markdown, under its limits.

GitHub renders comments of at most 65,536 characters and files of more; this stays under
:data:`MOST_BYTES`, leaves whole sections out from the end where it must, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trine.analyzers.results import Analysis

from .content import compose
from .document import (
    Areas,
    Bars,
    Block,
    Document,
    FindingCard,
    Heat,
    Items,
    Lanes,
    Paragraph,
    Section,
    Series,
    Table,
    fitting,
    shorten,
    with_content,
)
from .wording import words

__all__ = ["MOST_BYTES", "render", "render_document"]

MOST_BYTES = 200_000
MOST_RANKS = 64
MOST_ROWS = 20
#: Longest cell: kernel names reach thousands of characters.
MOST_CELL = 160

#: What Markdown, GitHub (mentions, issues, emoji, links) or the HTML in it would act on, where it would.
#: Entities are read as text everywhere, also in tables.
_SPECIAL = re.compile(r"[&<>|`*\[\]\\~$]|(?<!\w)_|_(?!\w)|[:@#](?=\S)|(?<=/):|(?<=www)\.")
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def render(analysis: Analysis, *, language: str = "en") -> str:
    """The report as Markdown, at most :data:`MOST_BYTES` bytes of UTF-8."""
    document = compose(analysis, language=language, most_ranks=MOST_RANKS, most_rows=MOST_ROWS)
    return render_document(document, language=language)


def render_document(document: Document, *, language: str = "en") -> str:
    """Any document as Markdown within the same limits."""
    text = words(language)
    head = _head(document, text)
    room = MOST_BYTES - len(head.encode()) - 1_000
    parts, left = fitting(((each.title, _section(each)) for each in document.sections), room)
    if left:
        limit = f"{MOST_BYTES // 1000} kB"
        parts.append("> " + _escape(text["cut"].format(limit=limit, what=", ".join(left))))
    return "\n\n".join([head, *parts]) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(lambda found: _NAMED.get(found.group()) or f"&#{ord(found.group())};", text)


def _cell(text: str) -> str:
    return _escape(shorten(text, MOST_CELL))


def _head(document: Document, text: Mapping[str, str]) -> str:
    mark = {"fault": "🟠", "healthy": "🟢", "unknown": "⚪"}[document.bound]
    sides = " · ".join(_escape(words_of_side) for _, words_of_side in document.sides)
    lines = [
        f"## {_escape(document.title)}",
        f"{mark} **{_escape(document.verdict)}**",
        *(_escape(notice) for notice in document.notices),
        _escape(document.subtitle),
        f"{sides} {_escape(text['at_work'])} · {_escape(document.confidence)}"
        if sides
        else _escape(document.confidence),
        " · ".join(f"{_escape(label)}: {_escape(value)}" for label, value in document.facts),
    ]
    return "\n\n".join(line for line in lines if line)


def _section(section: Section) -> str:
    return "\n\n".join([f"### {_escape(section.title)}", *(_block(block) for block in section.blocks)])


def _block(block: Block) -> str:
    if isinstance(block, FindingCard):
        return _finding(block)
    if isinstance(block, Paragraph):
        return _escape(block.text)
    if isinstance(block, Items):
        return "\n".join(
            f"- {_escape(mark)} {_escape(text)}" + (f"  \n  {_escape(further)}" if further else "")
            for mark, text, further in block.items
        )
    if isinstance(block, (Bars, Series, Heat, Lanes, Areas)):
        return f"**{_escape(block.title)}**\n\n{_table(block.table)}"
    return _table(block)


def _finding(card: FindingCard) -> str:
    mark = "🟠" if card.kind == "fault" else "🔵"
    lines = [
        f"#### {mark} {card.number}. {_escape(card.title)}",
        f"{_escape(card.kind_words)} `{card.id}`, {_escape(card.severity)}",
    ]
    if card.change:
        # A fence of four: no value can close it.
        lines.append("````toml\n" + _toml(card.change) + "\n````")
    if card.why:
        lines.append(_escape(card.why))
    facts = [f"- gain: {_escape(card.gain)}"]
    if card.caution:
        facts.insert(0, f"- {_escape(card.caution)}")
    if card.numerics:
        facts.append(f"- numbers: {_escape(card.numerics)}")
    if card.formula:
        facts.append(f"- {_escape(card.formula)}")
    facts.append("- evidence: " + _escape("; ".join(f"{key} {value}" for key, value in card.evidence)))
    lines.append("\n".join(facts))
    return "\n\n".join(lines)


def _toml(change: tuple[tuple[str, str], ...]) -> str:
    """Dotted keys are TOML as they stand. Backticks cannot occur in a key, and would end the fence."""
    return "\n".join(f"{key} = {value}".replace("`", "'") for key, value in change)


def _table(table: Table) -> str:
    if not table.rows:
        return _escape(table.note)
    table = with_content(table)
    head = "| " + " | ".join(_cell(column.title) for column in table.columns) + " |"
    rule = "|" + "|".join("---:" if column.align == "right" else ":---" for column in table.columns) + "|"
    rows = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.rows]
    lines = "\n".join([head, rule, *rows])
    title = f"**{_escape(table.title)}**\n\n" if table.title else ""
    return title + lines + (f"\n\n{_escape(table.note)}" if table.note else "")
