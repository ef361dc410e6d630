"""Pages from analyses made by hand: they show every number with its unit, and say why where there is none."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from analysis_builders import GIB, MS, all_reduce, breakdown, build, communication, rank_result, steps_table
from hypothesis import given
from hypothesis import strategies as st
from plotly.utils import PlotlyJSONEncoder

from trine.analyzers import diagnose as diagnosing
from trine.analyzers.results import (
    Analysis,
    CheckItem,
    Finding,
    Gain,
    HeatCell,
    LateActivity,
    MemorySummary,
    Mfu,
    NotBound,
    Prediction,
    Recommendation,
    Verdict,
)
from trine.dashboard import figures, memory_figures
from trine.dashboard.background import Outcome
from trine.dashboard.catalogue import Run
from trine.dashboard.pages import communication as communication_page
from trine.dashboard.pages import explain, memory, overview, recommendations, runs, timeline
from trine.dashboard.pages.recommendations import _gain_words
from trine.dashboard.urls import State
from trine.dashboard.view import View
from trine.record.model import Quality

PAGES = (overview, explain, timeline, communication_page, memory, recommendations)
RUN = Run("runs/a", Path("runs/a"), "record", 3, 1000, 1_700_000_000.0, "f")
EVIL = '<img src=x onerror="alert(1)">'


def view(analysis: Analysis, **state: Any) -> View:
    return View(RUN, State(page="overview", run="runs/a", **state), analysis, Outcome("ready", analysis))


def text(component: Any) -> str:
    """All words of a component, in order."""
    if component is None or isinstance(component, bool):
        return ""
    if isinstance(component, (list, tuple)):
        return " ".join(text(part) for part in component)
    if isinstance(component, (str, int, float)):
        return str(component)
    rows = json.dumps(getattr(component, "rowData", None) or "")
    return text(getattr(component, "children", None)) + rows


def whole(analysis: Analysis, **state: Any) -> dict[str, str]:
    shown = view(analysis, **state)
    found = {}
    for page in PAGES:
        parts = page.body(shown)
        json.dumps(parts, cls=PlotlyJSONEncoder)  # what Dash will do
        found[page.__name__.rpartition(".")[2]] = text(parts)
    return found


def troubled() -> Analysis:
    """A job with a straggler, memory, waits, MFU, notes and names that are markup."""
    gain = Gain(10 * MS, 17 * MS, 20 * MS)
    prediction = Prediction(
        gain, Gain(80 * MS, 83 * MS, 90 * MS), -2 * GIB, "lateness × 0.85", {"lateness_ns": 20 * MS}
    )
    finding = Finding(
        "straggler",
        "fault",
        f"Rank 1 arrives late {EVIL}",
        {
            "ranks": [{"rank": 1, "cost_ns": 20 * MS, "example": EVIL, "share_of_all_waiting": 0.5}],
            "cost_ns": 20 * MS,
        },
        Recommendation({"data.workers": 4, "precision.dtype": "bf16"}, "because", "unchanged", prediction),
        0.2,
    )
    series = tuple((at * MS, at * GIB, at * GIB + 1) for at in range(5))
    own = MemorySummary(
        4 * GIB, 5 * GIB, 8 * GIB, {"parameters": GIB, EVIL: 2 * GIB}, True, 3, "device", series
    )
    late = (LateActivity("loader", 20 * MS, EVIL),)
    ranks = [
        rank_result(
            rank,
            steps=steps_table(),
            window=breakdown(),
            part=communication(caused_wait_ns=rank * 20 * MS, doing=late),
            memory=own,
        )
        for rank in (0, 1)
    ]
    return build(
        ranks,
        collectives=(all_reduce(label=EVIL, caused_by={1: 20 * MS}),),
        findings=(finding,),
        heatmap=tuple(HeatCell(rank, EVIL, 10 * MS, 60 * MS, 60) for rank in (0, 1)),
        mfu=Mfu(
            None,
            None,
            1e15,
            312e12,
            "bf16",
            {"palm": 0.41, "megatron": 0.38},
            0.45,
            {"peak": "312 TFLOP/s, looked up"},
        ),
        checklist=(CheckItem("mfu", "Half the peak", "fail", "41 %", "use `trine`"),),
        not_bound_by=(NotBound("input-bound", "Input: 1 % of the step"),),
        data_quality=(
            Quality("late", "warning", f"odd {EVIL}", 1),
            Quality("late", "warning", f"odd {EVIL}", 0),
        ),
        verdict=Verdict(
            "Rank 1 holds this run back.",
            "straggler",
            "high",
            (0.2, 0.7, 0.1),
            ((0.2, 0.7, 0.1), (0.3, 0.5, 0.2)),
        ),
    )


def test_the_overview_says_the_verdict_the_gain_and_the_numbers() -> None:
    said = whole(troubled())["overview"]
    for words in (
        "Rank 1 holds this run back.",
        "would gain 17.0 ms a step",
        "38 % to 41 %",
        "No convention was chosen",
        "312 TFLOP/s, looked up",
        "Exposed comm.",
        "Input: 1 % of the step",
        "0, 1",
    ):
        assert words in said, words


def test_recommendations_say_evidence_change_gain_and_numerics() -> None:
    said = whole(troubled())["recommendations"]
    for words in (
        'dtype = "bf16"',
        "workers = 4",
        "10.0 ms",
        "17.0 ms",
        "20.0 ms",
        "-2.00 GiB",
        "unchanged",
        "50 %",
    ):
        assert words in said, words


def test_the_low_gain_stands_over_the_step_time_that_it_leaves() -> None:
    """Columns are scenarios: of a 100 ms step a gain of 10 ms leaves 90, one of 20 ms leaves 80."""
    gain = Gain(10 * MS, 17 * MS, 20 * MS)
    prediction = Prediction(gain, Gain(80 * MS, 83 * MS, 90 * MS), None, "a formula", {})
    said = text(_gain_words(gain, Recommendation({}, "because", "unchanged", prediction), 100 * MS))
    assert "gain a step, an estimate" in said
    replayed = replace(prediction, inputs={"replay_error": 0.01})
    assert "gain a step, by replay" in text(_gain_words(gain, Recommendation({}, "", "", replayed), 100 * MS))
    gains, after = said.partition("step time after")[0], said.partition("step time after")[2]
    assert gains.index("10.0 ms") < gains.index("17.0 ms") < gains.index("20.0 ms")
    assert after.index("90.0 ms") < after.index("83.0 ms") < after.index("80.0 ms")


def test_communication_says_who_waited_for_whom() -> None:
    said = whole(troubled())["communication"]
    for words in ("30 of 60", "loader 20.0 ms", "16.8 GB/s", "rank 1: 20.0 ms"):
        assert words in said, words
    colours = figures.caused_wait(troubled().ranks, [1], "light")["data"][0]["marker"]["color"]
    assert colours == ["#E69F00", "#D55E00"]  # only the one at fault


def test_memory_says_peak_capacity_and_that_it_is_a_lower_bound() -> None:
    said = whole(troubled())["memory"]
    for words in ("at least 4.00 GiB", "8.00 GiB", "62 %", "lower bounds", "parameters"):
        assert words in said, words
    figure = memory_figures.memory_over_time(troubled().ranks, "light")
    assert figure is not None and figure["layout"]["shapes"][0]["y0"] == 8.0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_in_hover_texts_are_no_markup(theme: Any) -> None:
    analysis = troubled()
    drawn = [
        figures.wait_heatmap(analysis, analysis.ranks, theme),
        memory_figures.memory_at_peak(analysis.ranks, theme),
        figures.breakdown(analysis.ranks, theme),
        figures.phases(analysis.ranks, theme),
        figures.step_times(analysis, analysis.ranks, theme),
    ]
    for figure in drawn:
        assert figure is not None and "<img" not in json.dumps(figure)


def test_a_bar_of_the_breakdown_sums_to_its_window() -> None:
    ranks = troubled().ranks
    figure = figures.breakdown(ranks, "light")
    for at, rank in enumerate(ranks):
        part = rank.summary.breakdown
        assert part is not None
        assert sum(trace["x"][at] for trace in figure["data"]) * 1e6 == pytest.approx(part.window_ns, abs=1)


def test_without_anything_every_page_says_why() -> None:
    bare = build(
        [rank_result(0, metadata={}, breakdown_missing="no trace of the device")],
        steps=0,
        step_statistics=None,
        collectives=(),
        heatmap=(),
    )
    said = whole(bare)
    assert "no trace of the device" in said["overview"] and "marks no steps" in said["overview"]
    assert "recorded no collectives" in said["communication"]
    assert "profile_memory=True" in said["memory"]
    assert "No fault was found" in said["recommendations"]


def test_a_healthy_analysis_gets_no_fault() -> None:
    analysis = diagnosing.diagnose(build())
    assert not [finding for finding in analysis.findings if finding.kind == "fault"]
    said = whole(analysis)
    assert "No fault was found" in said["overview"] and "No fault was found" in said["recommendations"]


def test_many_ranks_are_cut_to_those_that_matter() -> None:
    many = [rank_result(rank, part=communication(caused_wait_ns=rank)) for rank in range(200)]
    shown = figures.shown_ranks(build(many))
    assert len(shown) == figures.MOST_BARS and shown[-1].rank == 199
    assert [rank.rank for rank in figures.shown_ranks(build(many), [7, 3])] == [3, 7]


def test_the_timeline_shows_eight_ranks_or_those_chosen() -> None:
    many = build([rank_result(rank) for rank in range(20)])
    assert timeline.shown_ranks(view(many)) == tuple(range(8))
    assert timeline.shown_ranks(view(many, ranks=(3, 15, 99))) == (3, 15)


def test_the_list_says_what_is_known_of_each_run() -> None:
    others = [Run(f"runs/{name}", Path(name), "trace", 1, 10, 1.7e9, "f") for name in ("b", "c", "d")]
    known = {
        "runs/a": Outcome("ready", troubled(), version=1),
        "runs/b": Outcome("failed", error="b is cut off; copy it again", version=1),
        "runs/c": Outcome("pending", running=True),
    }
    said = text(runs.rows([RUN, *others], known, State(), ""))
    for words in (
        "Rank 1 holds this run back.",
        "100 ms",
        "b is cut off; copy it again",
        "analysing…",
        "open it",
    ):
        assert words in said, words
    assert "runs/b" not in said and "Nothing matches" in text(
        runs.rows([RUN, *others], known, State(), "zebra")
    )
    assert "No runs here yet" in text(runs.rows([], {}, State(), ""))


keys = st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,2}", fullmatch=True)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20),
)


@given(
    st.dictionaries(
        keys, st.one_of(values, st.lists(st.sampled_from(["mlp", "norm"]), max_size=2)), max_size=4
    )
)
def test_the_change_is_toml_that_reads_back(change: dict[str, Any]) -> None:
    names = sorted(change)
    # A key cannot be a value and a table at once; the runtime's schema never asks for that.
    if any(b.startswith(f"{a}.") for a in names for b in names):
        return
    read = tomllib.loads(recommendations.toml_of(change))
    for key, value in change.items():
        found: Any = read
        for part in key.split("."):
            found = found[part]
        assert found == value and type(found) is type(value)
