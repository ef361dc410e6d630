"""Scores of published runs: what a group is, files that hold little, and what is asked for wrongly."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import planner
import planner_rows
import pytest
from test_planner_rows import ROW

#: The same model and batch on as many devices, in another layout.
OTHER = {**ROW, "row_id": "made-2", "tp": "4", "pp": "4", "step_time_s": "4.3"}


def table_of(*rows: dict[str, str]) -> Any:
    runs, skipped = planner_rows.read_rows(rows)
    assert not skipped
    return planner.score(runs, skipped)["tables"]["made"]


def written(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*ROW, "notes"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_copies_of_a_row_are_no_group() -> None:
    assert table_of(*[ROW] * 5)["groups"] == 0
    assert table_of(ROW, {**ROW, "step_time_s": "4.1"})["groups"] == 0
    assert table_of(ROW, {**OTHER, "step_time_s": ROW["step_time_s"]})["groups"] == 0
    assert table_of(ROW, OTHER)["groups"] == 1


def test_a_layout_that_is_measured_again_counts_once() -> None:
    third = {**ROW, "mbs": "1", "step_time_s": "4.0"}
    once = table_of(ROW, OTHER, third)
    # The mean of the two is what was measured once.
    again = table_of({**ROW, "step_time_s": "3.8"}, {**ROW, "step_time_s": "4.0"}, OTHER, third)
    assert once["groups"] == again["groups"] == 1
    assert (once["tau"], once["regret"]) == pytest.approx((again["tau"], again["regret"]))


def test_a_long_cell_skips_its_row_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.csv", {**ROW, "notes": "x" * 200_000}, OTHER)
    limit = csv.field_size_limit()
    runs, skipped = planner_rows.read_runs(path)
    assert [run.row for run in runs] == ["made-2"]
    assert [skip.reason for skip in skipped] == [
        "notes has more than 65,536 characters: is a quote left open?"
    ]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("table,hidden\n", "has a header and no runs: add a row a run"),
        ("table,layers\nmade,3\n", "has no column 'hidden'"),
        ("", "has no column 'hidden'"),
    ],
)
def test_a_file_without_runs_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    assert planner.main(["--runs", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_table_without_truth_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "runs.csv", {**ROW, "step_time_s": ""})
    assert planner.main(["--runs", str(path)]) == 0
    shown = capsys.readouterr()
    assert "nan" not in shown.out and "step_error_median               –" in shown.out
    assert shown.err == "no row is predicted and has a time: what is skipped says why\n"
    assert planner.main(["--runs", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["step_error_median"] is None
    assert planner.main(["--runs", str(written(path, ROW, OTHER))]) == 0
    shown = capsys.readouterr()
    assert "step_error_median               0." in shown.out and not shown.err


@pytest.mark.parametrize("count", ["-3", "x", "1.5"])
def test_rows_furthest_off_are_a_count(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        planner.main([f"--worst={count}"])
    assert raised.value.code == 2
    assert f"{count!r} is no number of rows: say 0 or more" in capsys.readouterr().err
