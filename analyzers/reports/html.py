"""The report as one HTML file: no script, no request, both themes, at most :data:`MOST_BYTES`.

A page that fetches nothing opens anywhere and leaks nothing; its policy header forbids both.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from trine.analyzers.results import Analysis

from . import figures
from ._style import STYLE
from .content import compose
from .document import (
    Areas,
    Bars,
    Block,
    Column,
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

__all__ = ["MOST_BYTES", "framed", "render", "render_document"]

MOST_BYTES = 2_000_000
MOST_RANKS = 128
MOST_ROWS = 50
#: Longest cell that is printed whole; the rest is in its tooltip, up to the second number.
MOST_CELL = 110
MOST_TOOLTIP = 600
#: Tables longer than this start folded.
OPEN_ROWS = 12

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(analysis: Analysis, *, language: str = "en") -> str:
    """The report as one self-contained page of at most :data:`MOST_BYTES` bytes of UTF-8."""
    document = compose(analysis, language=language, most_ranks=MOST_RANKS, most_rows=MOST_ROWS)
    return render_document(document, language=language)


def framed(analysis: Analysis, *, height: int = 720) -> str:
    """The report for a notebook's cell: the whole page inside an ``iframe``, which keeps its style, its links and the
    notebook apart. ``sandbox`` without a word in it: what is shown can run, send and open nothing."""
    # Without a base of its own, a link to a section would lead to one of the notebook's address.
    page = render(analysis).replace("<head>", '<head><base href="about:srcdoc">', 1)
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox title="Report of Trine" loading="lazy" '
        f'style="width:100%;height:{height}px;border:0;border-radius:4px;resize:vertical"></iframe>'
    )


def render_document(document: Document, *, language: str = "en") -> str:
    """Any document as such a page."""
    text = words(language)
    head = _head(document, text, language)
    room = MOST_BYTES - len(head.encode()) - 4_000
    parts, left = fitting(((each.title, _section(each, text)) for each in document.sections), room)
    if left:
        cut = text["cut"].format(limit=f"{MOST_BYTES // 1_000_000} MB", what=", ".join(left))
        parts.append(f'<p class="note">{escape(cut)}</p>')
    footer = f"<footer>{escape(text['footer'])}</footer>"
    return f"{head}{''.join(parts)}{footer}</main></body></html>\n"


def _head(document: Document, text: Mapping[str, str], language: str) -> str:
    sides = "".join(
        f'<li><span class="key side-{side}"></span>{escape(label)}</li>' for side, label in document.sides
    )
    if sides:
        sides += f"<li>{escape(text['at_work'])}</li>"
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in document.facts)
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in document.sections)
    notices = "".join(f'<p class="notice">{escape(notice)}</p>' for notice in document.notices)
    figure = _triangle(document, sides)
    confidence = f"{document.confidence}. {text['triangle_note']}" if figure else document.confidence
    return (
        f'<!doctype html><html lang="{escape(language)}"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(document.title)}</title><style>{STYLE}</style></head><body><main>"
        f'<header class="{document.bound}">{figure}<div>'
        f'<p class="quiet">{escape(document.title)} · {escape(document.subtitle)}</p>'
        f"<h1>{escape(document.verdict)}</h1>{notices}"
        f'<p class="quiet">{escape(confidence)}</p>'
        f'<dl class="facts">{facts}</dl></div></header><nav>{links}</nav>'
    )


def _triangle(document: Document, sides: str) -> str:
    """The place between the three sides, of documents about a job; others have none."""
    if not document.sides:
        return ""
    glyph = figures.glyph(document.triangle, document.hull, [label for _, label in document.sides])
    return f'<figure>{glyph}<ul class="sides">{sides}</ul></figure>'


def _section(section: Section, text: Mapping[str, str]) -> str:
    blocks = "".join(_block(block, text) for block in section.blocks)
    return f'<section id="{escape(section.id)}"><h2>{escape(section.title)}</h2>{blocks}</section>'


def _block(block: Block, text: Mapping[str, str]) -> str:
    if isinstance(block, FindingCard):
        return _finding(block, text)
    if isinstance(block, Paragraph):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Items):
        rows = "".join(
            f'<li class="{_MARKS.get(mark, "plain")}"><span class="mark">{escape(mark)}</span><div>{escape(line)}'
            + (f'<div class="quiet">{escape(further)}</div>' if further else "")
            + "</div></li>"
            for mark, line, further in block.items
        )
        return f'<ul class="items">{rows}</ul>'
    if isinstance(block, Bars):
        return _figure(block.title, figures.bars(block), block.table, text)
    if isinstance(block, Series):
        return _figure(block.title, figures.series(block), block.table, text)
    if isinstance(block, Heat):
        return _figure(block.title, figures.heat(block), block.table, text)
    if isinstance(block, Lanes):
        return _figure(block.title, figures.lanes(block), block.table, text)
    if isinstance(block, Areas):
        return _figure(block.title, figures.areas(block), block.table, text)
    return f"<h3>{escape(block.title)}</h3>{_table(block)}" if block.title else _table(block)


_MARKS = {"✓": "good", "✗": "bad", "?": "plain"}


def _figure(title: str, drawing: str, table: Table, text: Mapping[str, str]) -> str:
    opened = " open" if len(table.rows) <= OPEN_ROWS else ""
    return (
        f'<figure class="wide"><figcaption>{escape(title)}</figcaption>{drawing}</figure>'
        f"<details{opened}><summary>{escape(text['figure_table'])}</summary>{_table(table)}</details>"
    )


def _table(table: Table) -> str:
    table = with_content(table)
    heads = "".join(
        f'<th class="{column.align}" scope="col">{escape(column.title)}</th>' for column in table.columns
    )
    rows = "".join(
        "<tr>"
        + "".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    )


def _cell(cell: str, column: Column) -> str:
    tip = f' title="{escape(shorten(cell, MOST_TOOLTIP))}"' if len(cell) > MOST_CELL else ""
    kind = f"{column.align} flexible" if column.flexible else column.align
    return f'<td class="{kind}"{tip}>{escape(shorten(cell, MOST_CELL))}</td>'


def _finding(card: FindingCard, text: Mapping[str, str]) -> str:
    change = "\n".join(f"{key} = {value}" for key, value in card.change)
    evidence = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in card.evidence)
    # The labels and their order are those of the text, so that the two can be read side by side.
    rows = [(text["do"], card.why or text["by_hand"]), (text["caution"], card.caution)]
    rows += [(text["gain"], card.gain), (text["numbers"], card.numerics)]
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in rows if value)
    return (
        f'<article class="finding {card.kind}"><p class="kind">{escape(card.kind_words)} · {escape(card.severity)}'
        f" · <code>{escape(card.id)}</code></p><h3>{escape(card.title)}</h3>"
        + (f"<pre>{escape(change)}</pre>" if change else "")
        + f'<dl class="facts">{facts}</dl><details><summary>{escape(text["evidence"])}</summary>'
        + (f'<p class="note">{escape(card.formula)}</p>' if card.formula else "")
        + f'<dl class="facts">{evidence}</dl></details></article>'
    )
