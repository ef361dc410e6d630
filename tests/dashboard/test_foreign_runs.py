"""Pages of what is no timed run: hangs, snapshots, schedules. One wording, no figures of what does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from analysis_builders import MS, build
from test_page_contents import text, troubled, view

from trine.analyzers import analyze, to_json
from trine.analyzers.reports.text import render as as_text
from trine.analyzers.reports.wording import words
from trine.analyzers.results import Analysis, Finding, Recommendation
from trine.dashboard.pages import overview, recommendations
from trine.record import load

HANG = words("en")["gain_of_a_hang"]


@pytest.fixture(scope="module")
def hang(data: Path) -> Analysis:
    return analyze(load(data / "traces" / "flight_recorder" / "gloo_desync"), workers=1)


def classes(component: Any) -> list[str]:
    """All class names of a component and of what it holds."""
    if isinstance(component, (list, tuple)):
        return [name for part in component for name in classes(part)]
    own = str(getattr(component, "className", None) or "").split()
    inner = getattr(component, "children", None)
    return own + (classes(inner) if inner is not None and not isinstance(inner, str) else [])


def test_a_hang_reads_the_same_everywhere(hang: Analysis) -> None:
    above, cards = overview.body(view(hang)), recommendations.body(view(hang))
    assert HANG in text(above) and HANG.capitalize() in text(cards) and HANG in as_text(hang)
    for said in (text(above), text(cards), as_text(hang)):
        for absent in ("no predicted gain", "cannot be predicted", "of the step", "steps taken", "selection"):
            assert absent not in said, absent
    assert words("en")["stake_of_a_hang"] in text(cards)
    assert "stops" in classes(above), "what never ends has not the colour of a gain"
    assert to_json(hang)["findings"][0]["severity"] == 1.0


def test_a_fault_with_steps_keeps_its_share_and_gain() -> None:
    analysis = troubled()
    assert "of the step at stake" in text(recommendations.body(view(analysis)))
    above = overview.body(view(analysis))
    assert "would gain 17.0 ms a step" in text(above) and "stops" not in classes(above)


def test_a_gain_that_is_not_predicted_has_not_the_colour_of_one() -> None:
    finding = Finding(
        "restarts", "fault", "It restarts", {}, Recommendation({}, "why", "unchanged", None), 0.1
    )
    above = overview.body(view(build(findings=(finding,))))
    assert "gain not predicted" in text(above) and "unknown" in classes(above)


def facts_of(count: int, keys: int) -> str:
    items = [
        {"rank": rank, **{f"part{key}_ns": (rank + key) * MS for key in range(keys)}} for rank in range(count)
    ]
    advice = Recommendation({}, "why", "unchanged", None)
    finding = Finding("straggler", "fault", "Late", {"ranks": items}, advice, 0.1)
    said = text(recommendations.body(view(build(findings=(finding,)))))
    return " ".join(said.replace('""', "").split())


def test_few_items_of_many_facts_stand_beside_each_other() -> None:
    assert "rank 0 1 part0 0 1.00 ms part1 1.00 ms 2.00 ms" in facts_of(2, 6)
    assert "Rank Part0 Part1 0 0 1.00 ms" in facts_of(2, 2), "few facts: a line an item"
    assert "Rank Part0 Part1" in facts_of(9, 6), "many items: a line an item"
