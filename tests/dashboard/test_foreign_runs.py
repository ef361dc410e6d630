"""Pages of what is no timed run: hangs, snapshots, schedules. One wording, no figures of what does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from analysis_builders import MS, build, communication, rank_result
from test_page_contents import text, troubled, view

from trine.analyzers import analyze, to_json
from trine.analyzers.reports.text import render as as_text
from trine.analyzers.reports.wording import words
from trine.analyzers.results import Analysis, Finding, Recommendation
from trine.dashboard.pages import communication as communication_page
from trine.dashboard.pages import memory, overview, recommendations, timeline
from trine.record import load

HANG = words("en")["gain_of_a_hang"]


@pytest.fixture(scope="module")
def hang(data: Path) -> Analysis:
    return analyze(load(data / "traces" / "flight_recorder" / "gloo_desync"), workers=1)


@pytest.fixture(scope="module")
def snapshot(data: Path) -> Analysis:
    path = data / "traces" / "memory_snapshot" / "medium_128_training_memory_snapshot.pickle"
    return analyze(load(path), workers=1)


@pytest.fixture(scope="module")
def schedule(data: Path) -> Analysis:
    return analyze(load(data / "traces" / "pipeline_schedule" / "pp8"), workers=1)


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


def identifiers(component: Any) -> list[str]:
    """All ids of a component and of what it holds."""
    if isinstance(component, (list, tuple)):
        return [name for part in component for name in identifiers(part)]
    own = [str(component.id)] if getattr(component, "id", None) else []
    inner = getattr(component, "children", None)
    return own + (identifiers(inner) if inner is not None and not isinstance(inner, str) else [])


def test_a_timeline_of_nothing_says_what_the_files_hold(hang: Analysis, snapshot: Analysis) -> None:
    for analysis, holds in (
        (hang, "the last collectives that each rank called"),
        (snapshot, "what memory was"),
    ):
        shown = timeline.body(view(analysis))
        assert holds in text(shown) and "to-explain" in identifiers(shown)
        assert "timeline-spec" not in identifiers(shown) and "In view" not in text(shown)


def test_a_schedule_has_a_timeline_and_the_colours_that_occur(schedule: Analysis) -> None:
    shown = timeline.body(view(schedule))
    assert "timeline-spec" in identifiers(shown)
    assert "forward" in text(shown) and "backward" in text(shown)
    for absent in ("compute", "operator", "backward of the weights"):
        assert absent not in text(shown), absent
    usual = text(timeline.body(view(troubled())))
    assert "compute" in usual and "backward" not in usual


def test_the_memory_page_of_a_snapshot_has_owners_and_pools(snapshot: Analysis) -> None:
    said = text(memory.body(view(snapshot)))
    for words_of_it in (
        "Memory over time",
        "Who owns the memory",
        "Owners at the peak",
        "The allocator's pools",
    ):
        assert words_of_it in said, words_of_it
    assert "optimizer_state" not in said and "optimizer state" in said


def test_without_memory_the_reason_is_in_words(hang: Analysis) -> None:
    said = text(memory.body(view(hang)))
    assert "is null" not in said and "memory_owners" not in said and said.count("profile_memory") == 1


@pytest.mark.parametrize(
    ("wait_ns", "said"), [(5 * MS, "several came in together"), (0, "No rank made another wait")]
)
def test_waits_without_a_culprit_are_not_denied(wait_ns: int, said: str) -> None:
    part = communication(caused_wait_ns=0, wait_ns=wait_ns)
    analysis = build([rank_result(rank, part=part) for rank in (0, 1)])
    assert said in text(communication_page.body(view(analysis)))
