"""`trine scaling` on records of 1, 2 and 4 gloo ranks, and as a shell sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gate_runs import run_facts, saved
from nsight_exports import Training, build
from rank_pool import RankPool
from scaling_training import BATCH

from trine.cli import main


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.slow
@pytest.mark.torchrun
def test_records_of_real_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="recording a run needs torch; install trine[train]")
    runs = [str(tmp_path / f"on-{ranks}") for ranks in (1, 2, 4)]
    pool = RankPool(tmp_path, 4)
    try:
        for ranks, run in zip((1, 2, 4), runs, strict=True):
            assert pool.run("scaling_training:record", run, ranks) == [BATCH] * ranks + [None] * (4 - ranks)
    finally:
        pool.close()
    assert main(["scaling", *reversed(runs), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mode"], result["work_unit"], result["partition"]) == ("weak", "samples", "phases")
    assert [point["devices"] for point in result["points"]] == [1, 2, 4]
    assert [point["work_per_device"] for point in result["points"]] == pytest.approx([BATCH] * 3)
    assert [point["runs"] for point in result["points"]] == [[run] for run in runs]
    base = result["points"][0]
    for point in result["points"]:
        assert sum(part["ns"] for part in point["parts"]) == pytest.approx(point["mean_ns"])
        expected = point["throughput_per_s"] / (point["devices"] * base["throughput_per_s"])
        assert point["efficiency"]["value"] == pytest.approx(expected)
        parts = {part["name"]: part for part in point["parts"]}
        # One rank has no one to exchange with; on several, exchanging takes time that cannot all be hidden.
        assert (parts["exposed_communication"]["loss_ns"] > 0) == (point["devices"] > 1)
    report = tmp_path / "scaling.html"
    assert main(["scaling", *runs, "-o", str(report)]) == 0
    assert "Throughput over devices" in report.read_text() and "Wrote" in capsys.readouterr().err
    assert main(["scaling", *runs]) == 0
    assert "weak scaling" in capsys.readouterr().out.splitlines()[0]


def test_traces_and_exports_are_runs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        str(build(tmp_path / f"on-{count}.sqlite", Training(processes=count, steps=8))) for count in (1, 2)
    ]
    assert main(["scaling", *runs, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["efficiency"]["value"] for point in result["points"]] == [1, 1]
    assert (result["mode"], result["partition"]) == ("weak", "breakdown")


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        saved(tmp_path, f"on-{n}", [replace(run_facts(f"on-{n}", 100), environment={"world_size": n})])
        for n in (1, 2)
    )
    other = saved(
        tmp_path,
        "other",
        [run_facts("other", 100, environment={"world_size": 4}, configuration={"model": {"parameters": 5}})],
    )
    assert main(["scaling", one, two]) == 0
    capsys.readouterr()
    assert main(["scaling", one]) == 3
    assert "the one run is on 1 device" in complaint(capsys)
    assert main(["scaling", one, other]) == 3
    assert "different models" in complaint(capsys)
    assert main(["scaling", one, one]) == 2
    assert "given twice" in complaint(capsys)
    assert main(["scaling", one, str(tmp_path / "absent")]) == 2
    assert "absent" in complaint(capsys)
    for arguments in ([], [one, "--mode", "both"], [one, "--format", "pdf"]):
        assert main(["scaling", *arguments]) == 2
        assert "--help" in complaint(capsys)
    assert main(["scaling", one, two, "-o", str(tmp_path / "no" / "file")]) == 2
    assert "cannot write" in complaint(capsys)
