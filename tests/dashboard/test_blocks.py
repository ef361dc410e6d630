"""The report's blocks as parts of a page: figures keep the block's numbers, strange words stay words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from analysis_builders import MS, build
from plotly.utils import PlotlyJSONEncoder

import trine
from trine.analyzers.reports.document import (
    Areas,
    Bars,
    Block,
    Column,
    Heat,
    Items,
    Lanes,
    Paragraph,
    Section,
    Series,
    Table,
)
from trine.dashboard import block_figures, blocks
from trine.dashboard.background import Outcome
from trine.dashboard.catalogue import Run
from trine.dashboard.pages import explain
from trine.dashboard.theme import PALETTES
from trine.dashboard.urls import State
from trine.dashboard.view import View
from trine.record.model import Quality

EVIL = '<img src=x onerror="alert(1)">'
RUN = Run("runs/a", Path("runs/a"), "record", 3, 1000, 1_700_000_000.0, "f")
NUMBERS = Table(
    (Column("stage"), Column("bubble", "right")), (("0", "30 %"), (EVIL, "x" * 200)), note="a note"
)
BLOCKS: tuple[Block, ...] = (
    Paragraph("Words."),
    Items((("✓", "good", "further"), ("✗", EVIL, ""))),
    NUMBERS,
    Bars("Parts", {"a": "first", "b": "second"}, {"a": "idle", "b": "idle"}, (("row", {"a": 1.0 * MS, "b": 3.0 * MS}),), NUMBERS),
    Series("Lines", "memory", "size", "s", (("one", ((0.0, 1024.0), (1.0, 2048.0))),), NUMBERS),
    Heat("Cells", ("rank 0",), (EVIL, "other"), ((1.0 * MS, None),), "communication", NUMBERS),
    Lanes(
        "Schedule",
        {"forward": "forward", "backward": "backward"},
        {"forward": "computation", "backward": "backward"},
        (("stage 0", ((0, 10 * MS, "forward", EVIL), (30 * MS, 40 * MS, "backward", ""))), ("stage 1", ())),
        NUMBERS,
    ),
    Areas("Layers", "size", "time", (5.0 * MS, 15.0 * MS), (("parameters", "computation", (1024.0, 3072.0)),), NUMBERS),
)  # fmt: skip


def plain(component: Any) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_block_is_drawn_with_its_numbers(theme: Any) -> None:
    page = plain(blocks.render(Section("drawn", "Drawn", BLOCKS), theme))
    assert page.count('"type": "Graph"') == 5
    for words in ("Words.", "good", "further", "a note", "30 %", "first", "Schedule"):
        assert words in page
    assert f"{'x' * 119}…" in page, "long cells are cut"


def test_hover_texts_do_not_act() -> None:
    for figure in (block_figures.lanes(BLOCKS[6], "light"), block_figures.heat(BLOCKS[5], "light")):  # type: ignore[arg-type]
        drawn = plain(figure)
        assert "<img" not in drawn and "&lt;img" in drawn


def test_lanes_keep_start_length_and_row() -> None:
    figure = block_figures.lanes(BLOCKS[6], "dark")  # type: ignore[arg-type]
    forward, backward = figure["data"]
    assert (forward["y"], forward["base"], forward["x"]) == (["stage 0"], [0.0], [10.0])
    assert (backward["y"], backward["base"], backward["x"]) == (["stage 0"], [30.0], [10.0])
    assert backward["marker"]["color"] == PALETTES["dark"]["backward"]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["stage 0", "stage 1"], "an idle stage has its row"
    assert figure["layout"]["xaxis"]["title"]["text"] == "time, ms"


def test_areas_add_up_from_the_first_moment() -> None:
    figure = block_figures.areas(BLOCKS[7], "light")  # type: ignore[arg-type]
    (layer,) = figure["data"]
    assert layer["stackgroup"] and layer["y"] == [1.0, 3.0]
    assert layer["x"] == [0.0, 10.0] and figure["layout"]["xaxis"]["title"]["text"] == "time, ms"


def test_parts_of_one_role_differ_and_empty_ones_are_left_out() -> None:
    block = BLOCKS[3]
    assert isinstance(block, Bars)
    colours = [part["marker"]["color"] for part in block_figures.bars(block, "light")["data"]]
    assert len(set(colours)) == 2
    empty = replace(block, rows=(("row", {"a": 0.0, "b": 1.0}),))
    assert [part["name"] for part in block_figures.bars(empty, "light")["data"]] == ["second"]


def view(analysis: trine.Analysis) -> View:
    return View(RUN, State(page="explain", run="runs/a"), analysis, Outcome("ready", analysis))


def test_the_page_has_an_index_of_its_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (Section("drawn", "Drawn", BLOCKS), Section("other", "Other", ()))
    monkeypatch.setattr(explain, "sections", lambda analysis, rows: drawn)
    page = plain(explain.body(view(build())))
    assert '"href": "#drawn"' in page and '"id": "drawn"' in page


def test_without_any_answer_the_page_says_what_is_missing() -> None:
    note = Quality("no-critical-path", "info", "critical_path is null: no kernels; record a deep window")
    page = plain(explain.body(view(build(data_quality=(note,)))))
    assert (
        "No study has an answer" in page
        and "no kernels; record a deep window" in page
        and "critical path" in page
    )
