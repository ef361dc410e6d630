"""Schedules and stacked areas in the three forms of a report, against a cell-by-cell reference."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from analysis_builders import build
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trine.analyzers.diagnose import diagnose
from trine.analyzers.reports import figures, html, markdown, text
from trine.analyzers.reports.document import Areas, Bars, Block, Column, Lanes, Section, Table
from trine.analyzers.reports.lanes import letters, row_of_cells, without_slivers
from trine.analyzers.results import Analysis

NUMBERS = Table((Column("stage"), Column("bubble", "right")), (("0", "30 %"), ("1", "33 %")))
SCHEDULE = Lanes(
    "Schedule as it ran",
    {"forward": "forward", "backward": "backward"},
    {"forward": "computation", "backward": "backward"},
    (
        ("stage 0", ((0, 25, "forward", "micro-batch <0>"), (75, 100, "backward", ""))),
        ("stage 1", ((25, 50, "forward", "micro-batch 0"), (50, 75, "backward", ""))),
    ),
    NUMBERS,
)
LAYERS = Areas(
    "Memory by category",
    "size",
    "time",
    (0.0, 1e9, 2e9),
    (("parameters", "computation", (1024.0,) * 3), ("activations", "memory", (0.0, 3072.0, 0.0))),
    NUMBERS,
)


@pytest.fixture
def with_block(monkeypatch: pytest.MonkeyPatch):
    """An analysis whose report has one more section, of the given block."""

    def make(block: Block) -> Analysis:
        found = ((60, Section("drawn", "Drawn", (block,))),)
        monkeypatch.setattr("trine.analyzers.reports.content.studies.placed_sections", lambda *_: found)
        return diagnose(build())

    return make


def test_a_schedule_in_text_shows_where_each_span_begins(with_block) -> None:
    lines = text.render(with_block(SCHEDULE)).splitlines()
    at = lines.index("Schedule as it ran")
    assert lines[at + 1] == "F forward  B backward"
    assert lines[at + 2] == "stage 0     F" + "f" * 21 + "·" * 44 + "B" + "b" * 21
    assert lines[at + 3] == "stage 1     " + "·" * 22 + "F" + "f" * 21 + "B" + "b" * 21 + "·" * 22
    assert lines[at + 4].split() == ["0", "100", "ns"]
    assert "30 %" in lines[at + 6]


def test_a_schedule_in_a_page_has_a_tooltip_a_span_and_its_table(with_block) -> None:
    page = html.render(with_block(SCHEDULE))
    assert "<title>stage 0: forward micro-batch &lt;0&gt;, 25 ns at 0</title>" in page
    assert "<title>stage 1: backward, 25 ns at 50 ns</title>" in page
    assert page.count('class="side-backward span"') == 2
    assert re.search(r'class="lanes".*</svg></figure><details open><summary>numbers', page)


def test_areas_add_up_in_text_and_page(with_block) -> None:
    analysis = with_block(LAYERS)
    report = text.render(analysis)
    assert "Memory by category" in report and "highest 4.00 KiB" in report
    page = html.render(analysis)
    assert "activations: at most 3.00 KiB at 1.00 s" in page
    assert page.count("<polygon") >= 2 and 'class="areas"' in page


@pytest.mark.parametrize("block", [SCHEDULE, LAYERS])
def test_markdown_prints_the_numbers(with_block, block: Block) -> None:
    assert "| 0 | 30 % |" in markdown.render(with_block(block))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_empty_and_long_figures_are_drawn(with_block, rows: int) -> None:
    lanes = replace(SCHEDULE, rows=tuple((f"stage {n}", ((n, n + 9, "forward", ""),)) for n in range(rows)))
    report = text.render(with_block(lanes), width=60)
    assert max(map(cell_len, report.splitlines())) <= 60
    assert ("24 more not shown" in report) == (rows == 40)
    html.render(with_block(lanes))
    empty = replace(LAYERS, x=(), layers=(("parameters", "computation", ()),))
    html.render(with_block(empty))
    text.render(with_block(empty))


def test_thousands_of_slivers_stay_a_small_page() -> None:
    spans = tuple((n * 10, n * 10 + 8, "forward", "") for n in range(50_000))
    drawn = figures.lanes(replace(SCHEDULE, rows=(("stage 0", spans),)))
    assert drawn.count("<rect") < 2_000
    assert len(drawn) < 500_000


def test_letters_tell_keys_apart() -> None:
    legend = {"f": "forward", "b": "backward", "w": "backward of weights", "i": "", "x": "Ω"}
    found = letters(legend)
    assert len(set(found.values())) == len(legend)
    assert (found["f"], found["b"], found["w"]) == ("F", "B", "A")


spans = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 30), st.sampled_from("fb")).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], "")
    ),
    max_size=12,
)


@given(spans, st.integers(1, 40))
def test_each_cell_shows_what_fills_most_of_it(found, cells: int) -> None:
    end = 120
    shown = row_of_cells(found, ("f", "b"), end, cells)
    edges = [end * n // cells for n in range(cells + 1)]
    for (key, _), first, last in zip(shown, edges[:-1], edges[1:], strict=True):
        filled = Counter({None: last - first})
        for name in "fb":
            filled[name] = sum(
                any(s <= t < e and k == name for s, e, k, _ in found) for t in range(first, last)
            )
            filled[None] -= filled[name]
        assert filled[key] == max(filled.values())


@given(spans, st.floats(0.0, 20.0))
def test_joined_slivers_lose_no_long_span_and_no_time(found, least: float) -> None:
    kept = list(without_slivers(found, least))
    for key in "fb":
        before = {t for s, e, k, _ in found if k == key for t in range(s, e)}
        after = {t for s, e, k, _ in kept if k == key for t in range(s, e)}
        assert before <= after
    if least == 0:
        assert kept == sorted(found)


def test_long_legends_and_labels_stay_inside(with_block) -> None:
    parts = {f"k{n}": f"a part with a long name {n}" for n in range(9)}
    rows = (("a label that is long too", dict.fromkeys(parts, 1.0)), ("x" * 80, dict.fromkeys(parts, 2.0)))
    block = Bars("Long", parts, dict.fromkeys(parts, "idle"), rows, NUMBERS)
    lines = text.render(with_block(block)).splitlines()
    assert all(any(label in line for line in lines) for label in parts.values())
    assert max(map(cell_len, lines)) <= 100
    drawn = figures.bars(block)
    width, top = 960, int(re.search(r'viewBox="0 (-?\d+) 960', drawn)[1])  # type: ignore[index]
    placed = re.findall(r'<text x="([\d.]+)" y="([-\d.]+)" text-anchor="start" class="label">([^<]+)<', drawn)
    assert len(placed) == 9
    for x, y, label in placed:
        assert float(x) + 7 * len(label) <= width + 40 and float(y) >= top
    for x, label in re.findall(
        r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end" class="label">([^<]+)<', drawn
    ):
        assert float(x) - 6.6 * len(label) >= 0, label
    assert "<title>" + "x" * 80 in drawn, "a label that is cut has a tooltip"
