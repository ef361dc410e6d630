"""`trine compare` and `trine check` as a shell sees them: exit codes, one line of complaint, files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_runs import ENVIRONMENT, run_facts, saved, side
from record_rows import step_rows

from trine.analyzers.flaws import Flaw
from trine.cli import main
from trine.record.store import RankWriter


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
    old: str, same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    assert main(["check", same, "--baseline", str(baseline)]) == 2
    line = complaint(capsys)
    command = line.split("trine check ")[-1]
    # A baseline of the run under test would pass it whatever it does.
    assert same not in line and "known to be good, not from those under test" in line
    assert main(["check", *command.replace("GOOD_RUN …", old).split()]) == 0
    assert "3 runs, 180 steady steps" in capsys.readouterr().out
    assert main(["check", same, "--baseline", str(baseline)]) == 0


def test_runs_held_against_a_baseline_of_themselves_are_said_to_be(
    old: str, same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(tmp_path / "own.json")
    assert main(["check", same, "--write-baseline", own]) == 0
    capsys.readouterr()
    assert main(["check", same, "--baseline", own]) == 0
    out = capsys.readouterr().out
    assert out.startswith("passed (2 inconclusive)") and "the baseline is of these very runs" in out
    assert "same-0 and 2 more stand on both sides" in out
    assert main(["check", same, "--baseline", own, "--strict"]) == 1
    capsys.readouterr()
    assert main(["check", same, "--baseline", old]) == 0
    assert "both sides" not in capsys.readouterr().out


def test_one_run_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saved(tmp_path, "one", [run_facts("one", 100)])
    assert main(["check", one, "--write-baseline", str(tmp_path / "baseline.json")]) == 0
    assert "baseline.json: 1 run, 60 steady steps" in capsys.readouterr().out


def test_a_baseline_says_what_is_wrong_with_its_runs_and_remembers_it(
    same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Flaw("killed", "warning", "the process ended without closing its record")
    cut = saved(tmp_path, "cut", side("cut", 100, flaws=(killed,)))
    assert main(["check", cut, "--write-baseline", str(tmp_path / "baseline.json")]) == 0
    assert "warning killed: cut-0 and 2 more: the process ended" in capsys.readouterr().out
    assert main(["check", same, "--baseline", str(tmp_path / "baseline.json")]) == 0
    assert "killed: cut-0 and 2 more: the process ended" in capsys.readouterr().out


def test_records_that_are_cut_off_or_ended_with_an_error_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut, failed = (str(tmp_path / name) for name in ("whole", "cut", "failed"))
    for path, how in ((whole, "finished"), (cut, "finished"), (failed, "failed")):
        writer = RankWriter(Path(path), 0, 1)
        for first in (0, 20):
            writer.append({"parts": step_rows(first, 20)})
        writer.close({"state": how, "error": "RuntimeError: boom"})
    (rows,) = Path(cut).glob("rank-00000/rows-*.trine")
    os.truncate(rows, rows.stat().st_size - 30)
    assert main(["compare", cut, failed, "--against", whole]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"warning torn-tail: {cut}: the last" in out and "steps at its end may be missing" in out
    assert f"warning failed: {failed}: the run ended early with RuntimeError: boom" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"step_time_ns": 5}', "is other JSON, neither a baseline nor a trace"),
        ("[1, 2]", "is other JSON, neither a baseline nor a trace"),
        ('{"schema": "trine.analysis/1"}', "is a document of the schema 'trine.analysis/1', neither"),
    ],
)
@pytest.mark.parametrize("verb", [["check", "--baseline"], ["compare", "--against"]])
def test_json_that_is_no_baseline_is_said_to_be_none(
    same: str, verb: list[str], content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    assert main([verb[0], same, verb[1], str(other)]) == 2
    line = complaint(capsys)
    assert said in line and "trine check GOOD_RUN … --write-baseline FILE" in line


def test_a_file_that_is_no_json_keeps_its_readers_words(
    same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [')
    assert main(["check", same, "--baseline", str(broken)]) == 2
    assert "neither a baseline" not in complaint(capsys)


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
