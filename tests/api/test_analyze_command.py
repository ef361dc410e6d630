"""``trine analyze`` as users start it: forms, files, exit codes, one line of error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gate_runs import run_facts, saved
from trace_builders import small, written

from trine.cli import main


@pytest.fixture(scope="module")
def traces(data: Path) -> Path:
    return data / "traces" / "kineto"


def analyze(*arguments: object) -> int:
    return main(["analyze", *map(str, arguments)])


def test_text_answers_first_and_exits_with_zero_on_a_bad_run(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(traces / "torchrec_straggler_v100") == 0
    shown = capsys.readouterr()
    head = "\n".join(shown.out.splitlines()[:10])
    assert "straggler" in head and "rank 2" in head
    assert "\x1b" not in shown.out, "not a terminal"


def test_json_is_the_contract(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(traces / "megatron_tp8_a100", "--format", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "trine.analysis/1"
    straggler = next(finding for finding in answer["findings"] if finding["id"] == "straggler")
    assert [row["rank"] for row in straggler["evidence"]["ranks"]] == [0, 6]
    assert straggler["recommendation"]["predicted"]["gain_ns"]["mid"] > 0


def test_several_paths_are_the_ranks_of_one_job(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((traces / "torchrec_straggler_v100").iterdir())
    assert analyze(*files, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["source"]["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "starts"), [("r.html", "<!doctype html>"), ("r.md", "## "), ("r.json", "{"), ("r.txt", "▲")]
)
def test_a_files_ending_chooses_its_form(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, starts: str
) -> None:
    target = tmp_path / name
    assert analyze(traces / "torchrec_straggler_v100", "-o", target) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == f"Wrote {target}"
    assert target.read_text(encoding="utf-8").startswith(starts)


@pytest.mark.parametrize("name", ["report.pdf", "report.htlm", "report.v2"])
def test_an_ending_that_names_no_form_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Even of a path that does not exist: what the user would wait for comes after."""
    target = tmp_path / name
    assert analyze(tmp_path / "absent.json", "-o", target) == 2
    said = capsys.readouterr().err
    assert f"ends in {target.suffix}" in said and ".html" in said and "--format" in said
    assert not target.exists()


def test_no_ending_is_text_and_a_given_form_needs_no_ending(traces: Path, tmp_path: Path) -> None:
    source = traces / "torchrec_straggler_v100"
    assert analyze(source, "-o", tmp_path / "report") == 0
    assert (tmp_path / "report").read_text(encoding="utf-8").startswith("▲")
    assert analyze(source, "-o", tmp_path / "page.v2", "--format", "html") == 0
    assert (tmp_path / "page.v2").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_old_profilers_example_pair_is_told_apart(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same training with no worker and with four: the stall is a fault in one, ruled out in the other."""
    found = {}
    for workers in (0, 4):
        path = traces / "single" / f"torch1.9_resnet50_workers{workers}.json.gz"
        assert analyze(path, "--format", "json") == 0
        found[workers] = json.loads(capsys.readouterr().out)
    assert "input-bound" in {finding["id"] for finding in found[0]["findings"]}
    assert "input-bound" not in {finding["id"] for finding in found[4]["findings"]}
    assert "input-bound" in {item["id"] for item in found[4]["not_bound_by"]}
    stall = next(finding for finding in found[0]["findings"] if finding["id"] == "input-bound")
    predicted = stall["recommendation"]["predicted"]["step_time_ns"]
    assert predicted["low"] <= found[4]["step_time_ns"]["median"] <= predicted["high"], "the prediction held"


def test_cpu_ranks_that_share_cores_get_no_fault(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(traces / "gloo_ddp4_cpu", "--format", "json") == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["id"] for finding in findings if finding["kind"] == "fault"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/trace"], "/no/such/trace"),
        (["{traces}/megatron_tp8_a100", "--steps", "90:95"], "90:95"),
        (["{traces}/megatron_tp8_a100", "--steps", "soon"], "soon"),
        (["{traces}/megatron_tp8_a100", "--lang", "tlh"], "--lang takes en"),
        (["{traces}/megatron_tp8_a100", "-o", "/no/folder/r.html"], "/no/folder"),
        (["{traces}/megatron_tp8_a100", "--workers", "0"], "--workers"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(
    traces: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert analyze(*(argument.format(traces=traces) for argument in arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1 and said in shown.err


def test_a_baseline_is_said_to_be_one_and_what_to_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = saved(tmp_path, "baseline", [run_facts("run", 100)])
    assert analyze(baseline) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{baseline} is a baseline" in line and f"trine compare RUN … --against {baseline}" in line


def test_a_pipe_that_closes_and_a_terminal_without_bars(traces: Path) -> None:
    command = f"{sys.executable} -m trine analyze {traces / 'torchrec_straggler_v100'} | head -1"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert answer.stdout.startswith("? 4 ranks")
    assert "Traceback" not in answer.stderr and answer.stderr == ""


def test_a_report_does_not_replace_what_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [written(tmp_path / f"run/rank{rank}.json", small(rank, 2)) for rank in range(2)]
    (tmp_path / "link.json").symlink_to(paths[0])
    before = [path.read_bytes() for path in paths]
    for command in (
        ["analyze", *paths, "-o", paths[1]],
        ["analyze", tmp_path / "run", "-o", paths[0]],
        ["analyze", paths[0], "-o", tmp_path / "link.json"],
        ["compare", paths[0], "--against", paths[1], "-o", paths[1]],
        ["scaling", *paths, "-o", paths[0]],
        ["check", paths[0], "--baseline", paths[1], "--junit", paths[0]],
        ["check", paths[0], "--write-baseline", paths[0]],
    ):
        assert main([*map(str, command)]) == 2
        assert "a report would replace it" in capsys.readouterr().err
    assert [path.read_bytes() for path in paths] == before
    assert analyze(tmp_path / "run", "-o", tmp_path / "run/report.json") == 0
    assert analyze(tmp_path / "run", "-o", tmp_path / "run/report.json") == 0
