"""The glyph, the colours, and that both are the same wherever they are written."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trine.dashboard
from trine.dashboard.glyph import convex_hull, describe, place, svg
from trine.dashboard.theme import PALETTES, figure_layout, ink, mix

ASSETS = Path(trine.dashboard.__file__).parent / "assets"
weights = st.tuples(*[st.floats(0, 1)] * 3)
points = st.lists(st.tuples(st.integers(0, 30).map(float), st.integers(0, 30).map(float)), max_size=30)


def test_corners_are_where_a_side_is_everything() -> None:
    assert place((1, 0, 0)) == (50, 8) and place((0, 1, 0)) == (6, 84) and place((0, 0, 1)) == (94, 84)
    assert place((0, 0, 0)) == place((1, 1, 1))


@given(weights, st.lists(weights, max_size=8), st.none() | weights)
def test_the_glyph_is_an_image_within_its_box(
    here: tuple[float, float, float],
    hull: list[tuple[float, float, float]],
    before: tuple[float, float, float] | None,
) -> None:
    root = ElementTree.fromstring(svg(here, hull, before, "dark"))
    assert root.attrib["viewBox"] == "0 0 100 92"
    x, y = place(here)
    assert 6 - 1e-9 <= x <= 94 + 1e-9 and 8 - 1e-9 <= y <= 84 + 1e-9
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) >= 1


def test_an_unknown_place_is_an_empty_triangle() -> None:
    root = ElementTree.fromstring(svg(None))
    assert len(root) == 3 and "unknown" in describe(None)


def test_an_arrow_comes_from_the_run_compared_with() -> None:
    plain, compared = svg((1, 0, 0)), svg((1, 0, 0), before=(0, 1, 0))
    assert compared.count("<polygon") == plain.count("<polygon") + 1
    assert svg((1, 0, 0), before=(1, 0, 0)).count("<polygon") == plain.count("<polygon")


@given(points)
def test_the_hull_holds_every_point_and_turns_one_way(cloud: list[tuple[float, float]]) -> None:
    hull = convex_hull(cloud)
    assert set(hull) <= set(cloud)
    if len(hull) < 3:
        return
    edges = list(zip(hull, hull[1:] + hull[:1], strict=True))
    for (ax, ay), (bx, by) in edges:
        assert all((bx - ax) * (y - ay) - (by - ay) * (x - ax) >= -1e-9 for x, y in cloud)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_style_sheet_and_figures_have_the_same_colours(theme: str) -> None:
    sheet = (ASSETS / "look.css").read_text()
    block = re.search(rf'\[data-theme="{theme}"\] {{\n(.*?)\n}}', sheet, re.DOTALL)
    assert block is not None
    written = dict(re.findall(r"--([a-z]+): (#[0-9A-F]{6});", block[1]))
    assert written == dict(PALETTES[theme])  # type: ignore[index]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable(theme: str) -> None:
    colours = PALETTES[theme]  # type: ignore[index]
    for ground in ("surface", "ground"):
        for text in ("text", "quiet"):
            assert contrast(colours[text], colours[ground]) >= 4.5  # WCAG 2.1 AA
    for side in ("computation", "communication", "memory", "idle", "fault"):
        assert contrast(ink(colours[side]), colours[side]) >= 3.0


@pytest.mark.parametrize(
    ("theme", "names"), [("light", ("fault-text", "gain")), ("dark", ("fault-text", "gain"))]
)
def test_coloured_words_are_readable(theme: str, names: tuple[str, ...]) -> None:
    sheet = (ASSETS / "look.css").read_text()
    line = re.search(rf'\[data-theme="{theme}"\] {{ (--fault-text.*?) }}', sheet)
    assert line is not None
    written = dict(re.findall(r"--([a-z-]+): (#[0-9A-F]{6});", line[1]))
    for name in names:
        assert contrast(written[name], PALETTES[theme]["surface"]) >= 4.5  # type: ignore[index]


def test_a_tint_lies_between_its_colours() -> None:
    assert mix("#000000", "#FFFFFF", 0.0) == "#FFFFFF" and mix("#000000", "#FFFFFF", 1.0) == "#000000"
    assert mix("#0072B2", "#FFFFFF", 0.5) == "#80B8D8"


def test_nested_layout_changes_keep_the_rest() -> None:
    layout = figure_layout("light", xaxis={"title": {"text": "step"}})
    assert layout["xaxis"]["title"]["text"] == "step" and layout["xaxis"]["title"]["font"]["size"] == 12


def test_nothing_in_the_assets_points_outside() -> None:
    for path in ASSETS.iterdir():
        outside = set(re.findall(r"https?://[^\s\"')]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not outside, f"{path.name}: {outside}"
