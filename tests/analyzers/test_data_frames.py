"""Results as data frames, studies as attributes, and what analyses look like in a notebook."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pandas
import pytest
from analysis_builders import breakdown, build, rank_result, steps_table

import trine
from trine.analyzers._tabular import Frames, Tabular, frame_of, frames_of
from trine.analyzers.results import Analysis, CollectiveResult, Verdict, to_pandas
from trine.analyzers.studies import studies
from trine.record.errors import UsageError
from trine.record.model import MISSING, Quality, Rank, Strings, Table


@dataclass(frozen=True, slots=True)
class Inner(Tabular):
    COLUMNS: ClassVar[Mapping[str, str | tuple[str, ...] | None]] = {
        "pair": ("low_ns", "high_ns"),
        "hidden": None,
    }

    rank: int
    gain_ns: int | None
    pair: tuple[int, int]
    hidden: int
    parts_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Middle(Tabular):
    UNIT: ClassVar[str] = "ns"

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Outer(Tabular):
    name: str
    gain_ns: Middle | None
    rows: tuple[Inner, ...]
    points: tuple[tuple[int, float], ...]
    by_name_ns: Mapping[str, int]
    left: int


def outer(rows: tuple[Inner, ...], gain: Middle | None = None) -> Outer:
    return Outer("a", gain, rows, ((1, 0.5),), {"x y": 3}, 7)


def test_nested_results_become_tables_with_units_in_their_columns() -> None:
    rows = (Inner(0, None, (1, 2), 9, {"kernel": 4}), Inner(1, 2**62, (3, 4), 9, {}))
    frames = outer(rows, Middle(5, 6)).to_pandas()
    assert isinstance(frames, Frames)
    assert list(frames) == ["summary", "rows", "points", "by_name_ns"]
    assert frames["summary"].to_dict("records") == [
        {"name": "a", "gain_low_ns": 5, "gain_high_ns": 6, "left": 7}
    ]
    inner = frames["rows"]
    assert list(inner.columns) == ["rank", "gain_ns", "low_ns", "high_ns", "parts_kernel_ns"]
    assert inner["gain_ns"].dtype == "Int64" and inner["gain_ns"][1] == 2**62  # no float: that would round it
    assert inner["gain_ns"].isna().tolist() == [True, False]
    assert frames["by_name_ns"].to_dict("records") == [{"name": "x y", "by_name_ns": 3}]
    assert frames["points"].shape == (1, 2)


def test_columns_stand_without_rows_and_without_a_nested_part() -> None:
    frames = frames_of(outer(()))
    assert frames["summary"]["gain_low_ns"].tolist() == [None]
    assert list(frames["rows"].columns) == ["rank", "gain_ns", "low_ns", "high_ns"]
    assert len(frames["rows"]) == 0


def test_a_result_without_tables_is_one_row() -> None:
    frame = Middle(1, 2).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("records") == [{"low_ns": 1, "high_ns": 2}]


def test_a_table_in_a_table_says_which_row_it_belongs_to() -> None:
    @dataclass(frozen=True, slots=True)
    class Leaf:
        rank: int
        ns: int

    @dataclass(frozen=True, slots=True)
    class Branch:
        rank: int
        leaves: tuple[Leaf, ...]

    @dataclass(frozen=True, slots=True)
    class Tree:
        branches: tuple[Branch, ...]

    # Local classes: their hints cannot be looked up by name.
    Branch.__annotations__["leaves"], Tree.__annotations__["branches"] = tuple[Leaf, ...], tuple[Branch, ...]
    frames = frames_of(Tree((Branch(4, (Leaf(1, 10), Leaf(2, 20))), Branch(4, (Leaf(1, 30),)))))
    assert frames["branches.leaves"].to_dict("records") == [
        {"branches_row": 0, "branches_rank": 4, "rank": 1, "ns": 10},
        {"branches_row": 0, "branches_rank": 4, "rank": 2, "ns": 20},
        {"branches_row": 1, "branches_rank": 4, "rank": 1, "ns": 30},
    ]


@pytest.mark.parametrize("study", studies(), ids=lambda study: study.KEY)
def test_every_study_s_result_can_be_data_frames(study: Any) -> None:
    kind = get_type_hints(study.to_json)
    (result,) = (hint for name, hint in kind.items() if name != "return")
    assert is_dataclass(result) and issubclass(result, Tabular)


KINDS = (
    "kineto/gloo_ddp4_cpu",
    "flight_recorder/gloo_desync",
    "pipeline_schedule/pp8",
    "nsys/healthy_1pct.sqlite",
)


@pytest.mark.parametrize("kind", KINDS)
def test_real_results_are_whole_as_frames(kind: str, data: Path) -> None:
    path = data / "traces" / kind
    if not path.exists():
        pytest.skip(f"{path} is not there")
    found = trine.analyze(path)
    assert found.studies
    for key, result in found.studies.items():
        assert getattr(found, key) is result is found.study(key)
        frames = result.to_pandas()
        for name, frame in frames.items():
            assert frame.columns.is_unique, (key, name)
        for field, rows in ((name, getattr(result, name)) for name in type(result).__dataclass_fields__):
            if isinstance(rows, tuple) and rows and is_dataclass(rows[0]):
                assert len(frames[field]) == len(rows)
    tables = found.to_pandas()
    assert tables["ranks"]["rank"].tolist() == [one.rank for one in found.ranks]
    assert len(tables["collectives"]) == len(found.collectives)
    for one in found.ranks:
        one.to_pandas()


def test_the_path_s_entries_lie_in_one_frame_with_their_rank(data: Path) -> None:
    found = trine.analyze(data / "traces" / "kineto" / "gloo_ddp4_cpu")
    path = found.study("critical_path")
    entries = path.to_pandas()["ranks.entries"]
    expected = [(rank.rank, entry.name, entry.on_path_ns) for rank in path.ranks for entry in rank.entries]
    assert list(zip(entries["rank"], entries["name"], entries["on_path_ns"], strict=True)) == expected
    curve = found.study("memory_owners").to_pandas()["ranks.curve"]
    parts = [name for name in curve.columns if name.endswith("_bytes") and name != "total_bytes"]
    assert len(parts) > 2 and (curve[parts].sum(axis=1) == curve["total_bytes"]).all()


def test_an_analysis_as_frames() -> None:
    found = build(ranks=[rank_result(0, window=breakdown()), rank_result(1, steps=steps_table())])
    frames = found.to_pandas()
    ranks = frames["ranks"]
    assert ranks["rank"].tolist() == [one.rank for one in found.ranks]
    window = found.ranks[0].summary.breakdown
    assert window is not None
    assert ranks["window_ns"][0] == window.window_ns and ranks["idle_host_ns"][0] == window.idle.host
    assert ranks["window_ns"].isna().tolist() == [False, True]  # not 0: nobody looked
    assert len(frames["steps"]) == sum(len(one.summary.steps or ()) for one in found.ranks)
    # A builder's steps have no padding counted: not the model's marker for what is missing.
    assert MISSING not in frames["steps"]["padding_tokens"].dropna().tolist()
    assert "ranks " in repr(frames) and "rows: " in repr(frames) and len(repr(frames)) < 3_000


def test_rows_keep_their_columns() -> None:
    row = CollectiveResult("all_reduce", "dp", (0, 1), None, 3, 10, 20, None, None, caused_by={1: 20})
    frame = to_pandas((row,))
    assert frame["ranks"][0] == (0, 1) and frame["caused_by_ns"][0] == {1: 20} and frame["bytes"][0] is None
    assert list(frame_of((), CollectiveResult).columns)[:2] == ["op", "group"]


# --- studies by name ---------------------------------------------------------------------------


def test_a_study_without_a_result_is_none_and_says_why() -> None:
    note = Quality("no-padding", "info", "padding is null: no batch said how long its sequences are")
    found = build(data_quality=(note,))
    assert found.padding is None and found.study("padding") is None  # type: ignore[attr-defined]
    assert found.why_without("padding") == "no batch said how long its sequences are"
    assert found.why_without("goodput") is None
    with pytest.raises(UsageError, match=r"no study is called 'pading'; there are critical_path, "):
        found.study("pading")


def test_a_name_that_is_none_is_an_attribute_error_that_helps() -> None:
    found = build()
    with pytest.raises(AttributeError, match=r"no attribute 'critical_paths'; studies are critical_path, "):
        found.critical_paths  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(found, "_repr_mimebundle_")  # what notebooks ask of everything
    assert {"critical_path", "verdict", "to_pandas"} <= set(dir(found))


def test_an_analysis_can_be_copied_and_sent() -> None:
    # __getattr__ is asked before the fields are there.
    found = build()
    assert copy.deepcopy(found).verdict == found.verdict
    assert pickle.loads(pickle.dumps(found)).verdict == found.verdict


# --- in a notebook -----------------------------------------------------------------------------


def test_an_analysis_is_shown_in_a_few_lines() -> None:
    found = build(verdict=Verdict("Nothing holds it back.", None, "low", None))
    text = repr(found)
    assert found.verdict.sentence in text and "2 ranks" in text and len(text) < 1_000
    assert text.splitlines()[-1] == "studies with a result: none"
    assert len(repr(found.ranks[0].summary)) < 400


class Frame(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_notebook_shows_the_report_in_a_frame_of_its_own() -> None:
    from trine.analyzers.reports.html import render

    found = build()
    parser = Frame()
    parser.feed(found._repr_html_())
    ((tag, attributes),) = parser.tags  # nothing of the page leaks into the notebook
    assert tag == "iframe" and attributes["sandbox"] in (None, "")
    page = str(attributes["srcdoc"])  # the parser has unescaped it once: this is what the frame shows
    assert page.replace('<base href="about:srcdoc">', "") == render(found) != page


def test_jobs_ranks_and_tables_are_shown_in_a_line() -> None:
    strings = Strings()
    table = Table("samples", {"time_ns": [1, 2]}, strings)
    rank = Rank(3, "a.json", "kineto", strings, samples=table)
    assert repr(table) == "Table 'samples': 2 rows of time_ns, metric, value"
    assert repr(rank) == "Rank 3 of a.json (kineto): samples (2 rows)"


# --- what analyze takes ------------------------------------------------------------------------


def test_analyze_takes_a_path_or_several(data: Path) -> None:
    folder = data / "traces" / "kineto" / "gloo_ddp4_cpu"
    files = sorted(folder.glob("*.gz"))[:2]
    one = trine.analyze(str(files[0]))
    assert isinstance(one, Analysis) and one.source.ranks == (0,)
    assert trine.analyze(files).source.ranks == (0, 1)
    assert "2 ranks of 4" in repr(trine.load(files))


@pytest.mark.parametrize("nonsense", [5, None, {"a": 1}, [5], Rank(0, "", "kineto", Strings())])
def test_analyze_refuses_what_is_no_job(nonsense: Any) -> None:
    with pytest.raises(UsageError, match=r"takes what trine\.load returned, a path or a list of paths, not "):
        trine.analyze(nonsense)


def test_pandas_is_imported_only_when_asked_for() -> None:
    program = (
        "import sys, trine, trine.analyzers, trine.analyzers.studies as s; s.studies(); "
        "assert 'pandas' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
