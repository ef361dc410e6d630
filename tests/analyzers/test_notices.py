"""What stands right under the verdict, in every report: whose it is, what is broken, who was waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_builders import build
from trace_builders import small, written

from trine import analyze, load
from trine.analyzers.notices import notices
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.results import Analysis
from trine.record.model import Quality


def _heads(analysis: Analysis) -> list[str]:
    """The first screen of each report, its lines joined."""
    screens = [
        text.render(analysis).splitlines()[:16],
        markdown.render(analysis).splitlines()[:16],
        html.render(analysis).split("<nav>")[0].splitlines(),
    ]
    return [" ".join(" ".join(lines).split()) for lines in screens]


def test_a_sound_run_has_none() -> None:
    assert notices(build()) == ()


def test_errors_are_said_under_the_verdict_and_their_rest_counted() -> None:
    broken = [Quality(f"broken-{n}", "error", f"file {n} is damaged") for n in range(3)]
    mild = Quality("mild", "warning", "nothing grave")
    (line,) = notices(build(data_quality=(*broken, mild)))
    assert (
        line
        == "The data is not whole: file 0 is damaged; file 1 is damaged; 1 more errors are under data quality."
    )


def test_a_folder_of_many_runs_keeps_its_first_screen() -> None:
    notes = tuple(Quality("mixed-runs", "warning", f"several runs lie here ({n})") for n in range(5))
    (line,) = notices(build(data_quality=notes))
    assert line == "Several runs lie here (0). 4 more notes under data quality say what else is left out."
    assert len(notices(build(data_quality=notes[:2]))) == 2


def test_several_runs_in_a_folder_are_named_on_the_first_screen(tmp_path: Path) -> None:
    for rank in range(4):
        written(tmp_path / f"four_{rank}.json", small(rank, 4))
    written(tmp_path / "lonely.json", small(0, 1))
    analysis = analyze(load(tmp_path))
    for head in _heads(analysis):
        assert "Several runs lie here" in head
        assert "left out is 1: lonely.json" in head.replace("\\", "").replace("&#95;", "_")


def test_the_late_ranks_of_a_job_bound_by_its_hosts_are_on_the_first_screen(data: Path) -> None:
    analysis = analyze(load(data / "traces" / "kineto" / "megatron_tp8_a100"))
    assert analysis.verdict.bound_by == "host-bound"
    for head in _heads(analysis):
        assert "Ranks 0 and 6 arrive late" in head
    tensor = next(kind for kind in analysis.studies["groups"].kinds if kind.kind == "tensor")
    assert tensor.calls == sum(row.calls for row in analysis.collectives) == 84


def test_a_rank_alone_has_its_groups_stated_size(data: Path) -> None:
    analysis = analyze(load(data / "traces" / "kineto" / "odd" / "cpu_only.json.gz"))
    (row,) = analysis.collectives
    assert (row.ranks, row.group_size) == ((34,), 300)
    assert row.busbw_bytes_per_s == pytest.approx(2 * 299 / 300 * (row.algbw_bytes_per_s or 0))


def test_a_rank_alone_of_a_group_of_unknown_size_has_no_bus_rate(tmp_path: Path) -> None:
    event = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "gloo:all_reduce",
        "pid": 1,
        "tid": 2,
        "ts": 10,
        "dur": 500,
    }
    event["args"] = {"Input type": ["float"], "Input Dims": [[1000]]}
    analysis = analyze(load(written(tmp_path / "t.json", {"traceEvents": [event]})))
    (row,) = analysis.collectives
    assert row.algbw_bytes_per_s and row.busbw_bytes_per_s is None and row.group_size is None
