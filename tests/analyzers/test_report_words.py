"""Words of reports: small shares, labels that every form shares, names that people read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from analysis_builders import breakdown, build, communication, rank_result, shares, steps_table

import trine
from trine.analyzers.diagnose import diagnose
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.reports.document import FindingCard
from trine.analyzers.reports.html import _finding
from trine.analyzers.reports.studies.memory_owners import _owners
from trine.analyzers.reports.wording import words
from trine.analyzers.results import Analysis, MemorySummary
from trine.analyzers.studies.memory_owners import OwnedMemory, RankMemory
from trine.analyzers.units import percent

GIB = 1 << 30


def troubled() -> Analysis:
    table = steps_table(shares(data=0.3))
    return diagnose(build([rank_result(r, steps=table, part=communication()) for r in (0, 1)]))


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0, "0 %"), (0.0001, "<0.1 %"), (-0.0001, "-<0.1 %"), (-0.01, "-1.0 %"), (0.5, "50 %")],
)
def test_small_shares_keep_their_sign_and_say_how_small(share: float, said: str) -> None:
    assert percent(share) == said


def test_a_card_has_the_same_labels_in_the_page_as_in_the_terminal() -> None:
    analysis = troubled()
    page, terminal = html.render(analysis), text.render(analysis)
    labels = re.findall(r"<dt>([^<]*)</dt>", page)
    assert {"do", "gain", "numbers"} <= set(labels)
    assert not {"why", "side effect"} & set(labels)
    assert "  gain " in terminal and "numbers: " in terminal
    # Without a setting to change, the terminal says it after "do" as well.
    by_hand = FindingCard(
        1, "fault", "fault", "x", "10 %", "title", (), "Stop that.", "unchanged", "–", "", ()
    )
    assert "<dt>do</dt><dd>Stop that.</dd>" in _finding(by_hand, words("en"))


def test_the_page_names_no_file_that_its_reader_lacks() -> None:
    page = html.render(troubled())
    assert "docs/" not in page.partition("<footer>")[2]
    assert "one dot a rank" not in page


def test_categories_of_memory_are_in_words_in_every_form() -> None:
    memory = MemorySummary(
        4 * GIB, 5 * GIB, 8 * GIB, {"optimizer_state": 3 * GIB, "reserved_but_free": GIB}, False, 0, "device"
    )
    result = rank_result(0, steps=steps_table(shares()), window=breakdown())
    analysis = build([replace(result, summary=replace(result.summary, memory=memory))])
    for render in (text.render, markdown.render, html.render):
        shown = " ".join(render(analysis).split())
        assert "optimizer state 3.00 GiB" in shown and "optimizer_state" not in shown


def test_owners_that_a_terminal_has_no_room_for_are_said_to_be_listed_elsewhere() -> None:
    owners = tuple(
        OwnedMemory(category="activations", owner=f"line {n}", bytes=GIB, count=1) for n in range(6)
    )
    part = RankMemory(
        rank=0,
        kind="device",
        device=0,
        peak_bytes=8 * GIB,
        peak_ns=0,
        reserved_at_peak_bytes=None,
        lower_bound=False,
        categories=(),
        times_ns=(),
        levels=(),
        totals=(),
        owners=owners,
        others_bytes=2 * GIB,
        lowest={},
        fragmentation=None,
        retries=None,
        pending_peak_bytes=None,
        segments_allocated=0,
        segments_released=0,
        failures=(),
        leaks=(),
        steps=0,
    )
    short, long = _owners(part, 4).note, _owners(part, 50).note
    assert short == "4.00 GiB more in smaller parts; the HTML report and the JSON list 2 more owners"
    assert long == "2.00 GiB more in smaller parts"


def test_the_curve_of_memory_says_highest_and_claims_no_bound() -> None:
    assert words("en")["at_most"] == "highest"


@pytest.mark.parametrize("name", ["healthy_1pct.sqlite", "mfu_2gpu_before.sqlite"])
def test_a_window_without_step_marks_is_called_no_step(data: Path, name: str) -> None:
    analysis = trine.analyze(trine.load(data / "traces" / "nsys" / name))
    said = [one.statement for one in analysis.not_bound_by if " of the " in one.statement]
    assert said and not [statement for statement in said if "of the step" in statement]
    assert any("of the window" in statement for statement in said)
