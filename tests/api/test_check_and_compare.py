"""`trine compare` and `trine check` as a shell sees them: exit codes, one line of complaint, files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_runs import ENVIRONMENT, run_facts, saved, side

from trine.cli import main


@pytest.fixture(autouse=True)
def no_github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture
def old(tmp_path: Path) -> str:
    return saved(tmp_path, "old", side("old", 100))


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return saved(tmp_path, "slow", side("slow", 115))


@pytest.fixture
def same(tmp_path: Path) -> str:
    return saved(tmp_path, "same", side("same", 100))


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to standard error: exactly one line that starts with the program's name."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("trine: "), lines
    return lines[0]


def test_compare_prints_and_never_fails(old: str, slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", slow, "--against", old]) == 0
    out = capsys.readouterr().out
    assert "REGRESSION" in out and "backward" in out
    assert main(["compare", slow, "--against", old, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "regression"


def test_compare_writes_where_it_is_told(
    old: str, slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.md"
    assert main(["compare", slow, "--against", old, "--format", "md", "-o", str(target)]) == 0
    assert target.read_text().startswith("**REGRESSION**")
    assert main(["compare", slow, "--against", old, "-o", str(tmp_path / "absent" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_run_against_itself_is_refused(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", old, "--against", old]) == 2
    assert "given twice" in complaint(capsys)


def test_other_environments_and_short_runs_exit_3(
    old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = saved(tmp_path, "other", side("other", 100, environment={**ENVIRONMENT, "world_size": 4}))
    assert main(["compare", other, "--against", old]) == 3
    assert "world_size is 4 against 8" in complaint(capsys)
    assert main(["compare", other, "--against", old, "--any-environment"]) == 0
    assert "world_size" in capsys.readouterr().out
    both, alike = str(tmp_path / "both"), str(tmp_path / "alike")
    assert main(["check", old, other, "--write-baseline", both]) == 0
    assert "different environments (world_size is 8 and 4)" in capsys.readouterr().out
    assert main(["check", old, "--write-baseline", alike]) == 0
    assert "different" not in capsys.readouterr().out
    short = saved(tmp_path, "short", [run_facts("short", 100, steps=3)])
    assert main(["check", short, "--baseline", old]) == 3
    assert "too few to compare" in complaint(capsys)
    assert main(["check", short, "--baseline", old, "--warn-only"]) == 0
    assert "only a warning" in complaint(capsys)


def test_check_exits_by_the_table(
    old: str, slow: str, same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", same, "--baseline", old]) == 0
    assert main(["check", slow, "--baseline", old]) == 1
    assert main(["check", slow, "--baseline", old, "--warn-only"]) == 0
    assert main(["check", slow, "--baseline", old, "--effect", "0.5"]) == 0
    one, other = (saved(tmp_path, name, [run_facts(name, ms)]) for name, ms in (("one", 150), ("other", 100)))
    capsys.readouterr()
    assert main(["check", one, "--baseline", other]) == 0
    assert "INCONCLUSIVE" in capsys.readouterr().out
    assert main(["check", one, "--baseline", other, "--strict"]) == 1


def test_an_absent_baseline_exits_2_with_the_command_that_writes_one(
    same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    assert main(["check", same, "--baseline", str(baseline)]) == 2
    line = complaint(capsys)
    command = line.split("trine check ")[-1]
    assert main(["check", *command.split()]) == 0  # the command that it names does what it says
    assert "3 runs, 180 steady steps" in capsys.readouterr().out
    assert main(["check", same, "--baseline", str(baseline)]) == 0


def test_budgets_and_wrong_usage(same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text("step_time_ns = 50_000_000\n")
    assert main(["check", same, "--budget", str(budget)]) == 1
    budget.write_text("step_time = 50\n")
    capsys.readouterr()
    assert main(["check", same, "--budget", str(budget)]) == 2
    assert "did you mean 'step_time_ns'" in complaint(capsys)
    assert main(["check", same]) == 2
    assert "nothing to check against" in complaint(capsys)
    assert main(["check", same, "--write-baseline", str(tmp_path / "b"), "--budget", str(budget)]) == 2
    assert "stands alone" in complaint(capsys)
    assert main(["check", str(tmp_path / "absent"), "--baseline", same]) == 2
    assert "absent" in complaint(capsys)


@pytest.mark.parametrize("value", ["0", "5", "nan", "x"])
def test_an_impossible_effect_is_refused(same: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", same, "--baseline", same, "--effect", value]) == 2
    assert "--effect" in complaint(capsys)


@pytest.mark.parametrize("arguments", [[], ["chek"], ["compare", "a"], ["check", "a", "--min-steps", "0"]])
def test_wrong_arguments_are_one_line_that_says_where_to_look(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "--help" in complaint(capsys)


def test_github_and_junit(
    old: str, slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["check", slow, "--baseline", old, "--junit", str(junit)]) == 1
    assert capsys.readouterr().out.count("::error ") == 1
    assert summary.read_text().startswith("before\n### trine check: failed")
    assert ElementTree.parse(junit).getroot()[0].get("failures") == "1"

    short = saved(tmp_path, "short", [run_facts("short", 100, steps=3)])
    assert main(["check", short, "--baseline", old, "--junit", str(junit)]) == 3
    assert "::error title=trine check%3A cannot compare::" in capsys.readouterr().out
    assert "cannot compare" in summary.read_text()
    assert ElementTree.parse(junit).getroot()[0].get("errors") == "1"


def test_json_on_standard_output_stays_json_on_github(
    old: str, slow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", slow, "--baseline", old, "--format", "json", "--github"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 1
    assert "::error " in captured.err and "### trine check" in captured.err


def test_a_summary_that_cannot_be_written_decides_nothing(
    old: str, same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "absent" / "summary.md"))
    assert main(["check", same, "--baseline", old]) == 0
    assert "cannot write the step summary" in capsys.readouterr().err


def test_a_folder_is_no_place_for_a_baseline(
    same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("/", str(tmp_path)):
        assert main(["check", same, "--write-baseline", folder]) == 2
        assert "is a folder" in complaint(capsys)
