"""The report for a terminal: at most 100 columns, its answer in the first ten lines, colours optional.

Colours repeat what marks and words already say: parts of a bar have characters of their own, so the
report reads the same when it is piped.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from trine.analyzers.results import Analysis
from trine.analyzers.units import duration

from ._cells import axis_words, printer
from ._grid import head_lines, row_lines, widths_of, wrap
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
    shorten,
    with_content,
)
from .lanes import extent, letters, row_of_cells
from .wording import words

__all__ = ["WIDTH", "render", "render_document"]

WIDTH = 100
#: Ranks and rows a terminal shows; the other forms show more.
MOST_RANKS = 8
MOST_ROWS = 6
MOST_DETAIL = 4
MOST_LANES = 16

#: The look's colours; of each pair the one that reads on black and on white.
COLOURS = {
    "computation": "#56B4E9",
    "communication": "#E69F00",
    "memory": "#009E73",
    "idle": "#9AA0A6",
    "fault": "#D55E00",
    "backward": "#CC79A7",
    "weight": "#D6C400",
}
#: Parts of a bar in order; each has its own texture, so colour is not needed.
TEXTURES = ("█", "▓", "▒", "░", "■", "▪", "·", "◆", "●", "◇", "○", "▲", "△")
_MOST_LABEL = 20
_LEVELS = "▁▂▃▄▅▆▇█"


def render(analysis: Analysis, *, colour: bool = False, width: int = WIDTH, language: str = "en") -> str:
    """The report as text, lines of at most ``width`` columns (60 to 100); ``colour`` adds ANSI colours."""
    document = compose(
        analysis,
        language=language,
        most_ranks=MOST_RANKS,
        most_rows=MOST_ROWS,
        most_detail=MOST_DETAIL,
        brief=True,
    )
    return render_document(document, colour=colour, width=width, language=language)


def render_document(
    document: Document, *, colour: bool = False, width: int = WIDTH, language: str = "en"
) -> str:
    """Any document as text."""
    width = max(60, min(width, WIDTH))
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    _Writer(console, width, words(language)).document(document)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


class _Writer:
    """Prints blocks; keeps nothing but where to print."""

    def __init__(self, console: Console, width: int, text: Mapping[str, str]) -> None:
        self.console, self.width, self.text = console, width, text

    def line(self, *parts: str | tuple[str, str]) -> None:
        self.console.print(Text.assemble(*parts), no_wrap=True, crop=True, overflow="ellipsis")

    def wrapped(self, text: str, indent: int = 0, style: str = "", first: str = "") -> None:
        """Words in lines; ``first`` stands before the first line, within the indent."""
        for number, line in enumerate(wrap(text, self.width - indent)):
            lead = first.ljust(indent) if number == 0 else " " * indent
            self.line((lead, "dim" if first and number == 0 else ""), (line, style))

    def document(self, document: Document) -> None:
        style = {"fault": COLOURS["fault"], "healthy": COLOURS["memory"], "unknown": "dim"}[document.bound]
        self.line((f"▲ {document.subtitle}", "dim"))
        self.wrapped(document.verdict, style=f"bold {style}" if document.bound != "unknown" else "bold")
        for notice in document.notices:
            self.wrapped(notice)
        parts: list[str | tuple[str, str]] = []
        for side, words_of_side in document.sides:
            parts += [("● ", COLOURS[side]), words_of_side + "  "]
        if document.sides:
            parts.append(self.text["at_work"] + "  ")
        self.line(*parts, (document.confidence, "dim"))
        for section in document.sections:
            self.section(section)
        self.line()
        for label, value in document.facts:
            self.wrapped(value, 14, first=label)

    def section(self, section: Section) -> None:
        self.line()
        # What to do follows the verdict at once: no heading stands between them.
        if section.id != "findings":
            self.line((section.title, "bold"), " ", ("─" * (self.width - cell_len(section.title) - 1), "dim"))
        before: Block | None = None
        for block in section.blocks:
            if before is not None and not (isinstance(block, Paragraph) and isinstance(before, Paragraph)):
                self.line()
            before = block
            self.block(block)

    def block(self, block: Block) -> None:
        if isinstance(block, FindingCard):
            self.finding(block)
        elif isinstance(block, Paragraph):
            self.wrapped(block.text)
        elif isinstance(block, Items):
            indent = max((cell_len(mark) for mark, _, _ in block.items), default=0) + 1
            for mark, text, further in block.items:
                style = COLOURS["fault"] if mark == "✗" else COLOURS["memory"] if mark == "✓" else ""
                self.wrapped(text, indent, first=mark, style=style if mark == "✗" else "")
                if further:
                    self.wrapped(further, indent, "dim")
        elif isinstance(block, Bars):
            self.bars(block)
            self.table(block.table)
        elif isinstance(block, Series):
            self.series(block)
            self.table(block.table)
        elif isinstance(block, Heat):
            self.heat(block)
        elif isinstance(block, Lanes):
            self.lanes(block)
            self.table(block.table)
        elif isinstance(block, Areas):
            self.areas(block)
            self.table(block.table)
        else:
            self.table(block)

    def finding(self, card: FindingCard) -> None:
        fault = card.kind == "fault"
        lead = f"{card.kind_words.upper() if fault else card.kind_words} {card.severity}"
        self.line((lead, f"bold {COLOURS['fault' if fault else 'computation']}"), f"  {card.id}")
        self.wrapped(card.title, 2, "bold")
        change = ", ".join(f"{key} = {value}" for key, value in card.change)
        if change:
            self.wrapped(f"{change}  ({card.why})", 9, first="  " + self.text["set"])
        else:
            self.wrapped(card.why or self.text["by_hand"], 9, first="  " + self.text["do"])
        if card.caution:
            self.wrapped(card.caution, 9, "dim")
        self.wrapped(card.gain, 9, first="  " + self.text["gain"])
        if card.numerics:
            self.wrapped(self.text["numerics"].format(text=card.numerics), 9, "dim")

    def legend(self, marks: Sequence[tuple[str, str, str]]) -> None:
        """(mark, colour, label) each, in as many lines as it takes."""
        parts: list[str | tuple[str, str]] = []
        used = 0
        for mark, colour, label in marks:
            room = cell_len(label) + 4
            if used and used + room - 2 > self.width:
                self.line(*parts)
                parts, used = [], 0
            parts += [(mark, colour), f" {label}  "]
            used += room
        self.line(*parts)

    def bars(self, bars: Bars) -> None:
        self.line((bars.title, "underline"))
        keys = list(bars.legend)
        textures = dict(zip(keys, itertools.cycle(TEXTURES), strict=False))
        self.legend([(textures[key], COLOURS[bars.side[key]], bars.legend[key]) for key in keys])
        room = self.width - (lead := _lead(label for label, _ in bars.rows))
        # One scale for all rows: a shorter bar is a shorter time.
        longest = max((sum(values.values()) for _, values in bars.rows), default=0) or 1
        for label, values in bars.rows:
            parts: list[str | tuple[str, str]] = [shorten(label, lead - 1).ljust(lead)]
            for key, cells in zip(keys, _cells([values[key] for key in keys], room, longest), strict=True):
                parts.append((textures[key] * cells, COLOURS[bars.side[key]]))
            self.line(*parts)

    def series(self, series: Series) -> None:
        self.line((series.title, "underline"))
        word = printer(series.unit)
        lead = _lead(label for label, _ in series.lines[:8])
        shown = [
            (label, _sampled([y for _, y in points], self.width - 30 - lead))
            for label, points in series.lines[:8]
        ]
        # One scale for all lines: what looks higher is more.
        least = min((min(values) for _, values in shown), default=0.0)
        most = max((max(values) for _, values in shown), default=0.0)
        for label, values in shown:
            spark = "".join(_LEVELS[_level(value, least, most)] for value in values)
            ends = f"  {word(min(values))} – {word(max(values))}"
            self.line(shorten(label, lead - 1).ljust(lead), (spark, COLOURS[series.side]), (ends, "dim"))

    def lanes(self, lanes: Lanes) -> None:
        """A capital where a span begins, small letters where it goes on, dots where nothing runs."""
        self.line((lanes.title, "underline"))
        keys, letter = list(lanes.legend), letters(lanes.legend)
        self.legend([(letter[key], COLOURS[lanes.side[key]], lanes.legend[key]) for key in keys])
        lead = _lead(label for label, _ in lanes.rows)
        whole, room = extent(lanes), self.width - lead
        for label, spans in lanes.rows[:MOST_LANES]:
            parts: list[str | tuple[str, str]] = [shorten(label, lead - 1).ljust(lead)]
            for filled, begins in row_of_cells(spans, keys, whole, room):
                if filled is None:
                    parts.append(("·", "dim"))
                else:
                    shown = letter[filled] if begins else letter[filled].lower()
                    parts.append((shown, COLOURS[lanes.side[filled]]))
            self.line(*parts)
        end = duration(whole)
        self.line((" " * lead + "0" + end.rjust(room - 1), "dim"))
        if len(lanes.rows) > MOST_LANES:
            self.wrapped(self.text["more_rows"].format(left=len(lanes.rows) - MOST_LANES), style="dim")

    def areas(self, areas: Areas) -> None:
        """The sum of the layers as one line of bars; the layers themselves are in the table."""
        self.line((areas.title, "underline"))
        totals = [sum(values) for values in zip(*(values for _, _, values in areas.layers), strict=True)]
        if not totals:
            return
        word, room = printer(areas.unit), self.width - 42
        values, high = _sampled(totals, room), max(totals)
        spark = "".join(_LEVELS[_level(value, 0.0, high)] for value in values)
        ends = f"  {self.text['at_most']} {word(high)}"
        self.line(
            self.text["total"].ljust(12),
            (spark, COLOURS["memory" if areas.unit == "size" else "computation"]),
            (ends, "dim"),
        )
        first, last = axis_words(areas.axis, areas.x[0]), axis_words(areas.axis, areas.x[-1])
        self.line((" " * 12 + first + last.rjust(max(len(spark) - len(first), len(last) + 1)), "dim"))

    def heat(self, heat: Heat) -> None:
        self.table(
            Table(heat.table.columns[:5], tuple(r[:5] for r in heat.table.rows), heat.title, heat.table.note)
        )

    def table(self, table: Table) -> None:
        if not table.rows:
            return
        table = with_content(table)
        if table.title:
            self.line((table.title, "underline"))
        widths = widths_of(table.columns, table.rows, self.width)
        for line in head_lines(table.columns, widths):
            self.line((line, "dim"))
        for row in table.rows:
            for line in row_lines(row, table.columns, widths):
                self.line(line)
        if table.note:
            self.wrapped(table.note, style="dim")


def _lead(labels: Iterable[str]) -> int:
    """Columns for the labels of a figure's rows."""
    return min(max([11, *(len(label) for label in labels)]), _MOST_LABEL) + 1


def _cells(values: Sequence[float], room: int, longest: float) -> list[int]:
    """Whole cells for each part; rounding is carried on, so the bar's length is right."""
    cells, carried, drawn = [], 0.0, 0
    for value in values:
        carried += max(value, 0.0) / longest * room
        cells.append(max(round(carried) - drawn, 0))
        drawn += cells[-1]
    return cells


def _sampled(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` values, each the highest of its stretch."""
    if len(values) <= most:
        return list(values)
    edges = [round(n * len(values) / most) for n in range(most + 1)]
    return [max(values[start:end]) for start, end in itertools.pairwise(edges)]


def _level(value: float, low: float, high: float) -> int:
    return round((value - low) / (high - low) * (len(_LEVELS) - 1)) if high > low else 3
