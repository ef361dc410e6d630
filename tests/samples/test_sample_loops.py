"""A stranger's loop made fast with five lines, and a vision transformer whose input pipeline can be slow."""

from __future__ import annotations

import difflib
import json
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trine

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--hidden", "32", "--layers", "1", "--batch", "4", "--steps", "10"]


def _changed_lines() -> tuple[list[str], list[str]]:
    plain, tuned = (
        (ROOT / "samples" / name).read_text().splitlines()
        for name in ("plain_loop.py", "plain_loop_tuned.py")
    )
    lines = [
        line
        for line in difflib.unified_diff(plain, tuned, n=0, lineterm="")
        if line[:3] not in ("---", "+++")
    ]
    removed = [line[1:] for line in lines if line.startswith("-")]
    added = [line[1:] for line in lines if line.startswith("+") and line[1:].strip()]
    return removed, added


def test_exactly_five_lines_differ() -> None:
    removed, added = _changed_lines()
    assert len(removed) == len(added) == 5, (removed, added)
    assert added[0] == "import trine"


def test_the_documentation_shows_the_real_difference() -> None:
    text = (ROOT / "docs" / "samples.md").read_text()
    shown = text.split("```diff\n")[1].split("```")[0].splitlines()
    removed, added = _changed_lines()
    assert [line[1:].strip() for line in shown if line.startswith("-")] == [line.strip() for line in removed]
    assert [line[1:].strip() for line in shown if line.startswith("+")] == [line.strip() for line in added]


@pytest.mark.parametrize("name", ["plain_loop", "plain_loop_tuned"])
def test_the_loop_trains(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *TINY])
    runpy.run_module(f"trine.samples.{name}", run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("step 10: loss 2.") and "ms a step" in said


def test_configurations_come_with_the_samples() -> None:
    from trine.samples import configuration, configurations

    assert {"plain_loop", "vision"} <= set(configurations())
    for name in configurations():
        assert trine.Config.from_toml(configuration(name)).changes()
    with pytest.raises(KeyError, match="vision"):
        configuration("absent")


# --- vision ------------------------------------------------------------------------------------


def _losses(tmp_path: Path, *arguments: str) -> list[float]:
    from trine.samples import train_vision

    file = tmp_path / "losses.json"
    small = ["--hidden", "32", "--layers", "2", "--heads", "2", "--images", "512", "--losses", str(file)]
    assert train_vision.main([*small, *arguments]) == 0
    found: list[float] = json.loads(file.read_text())
    return found


def test_digits_are_the_same_everywhere_and_differ_from_each_other() -> None:
    from trine.samples.vision import drawn

    images = [drawn(label, 7) for label in range(10)]
    for image in images:
        assert image.shape == (32, 32)
        assert 0 <= image.min() < 0.1
        assert 0.9 < image.max() <= 1
    assert (drawn(3, 7) == images[3]).all() and not (drawn(3, 8) == images[3]).all()
    for one in range(10):
        for other in range(one):
            assert abs(images[one] - images[other]).mean() > 0.05, (one, other)


@pytest.mark.slow
def test_it_learns_to_read(tmp_path: Path) -> None:
    size = ["--hidden", "64", "--heads", "4", "--images", "2048", "--batch", "32"]
    losses = _losses(tmp_path, *size, "--steps", "60", "--rate", "2e-3")
    assert statistics.mean(losses[-5:]) < 0.87 * losses[0]


def test_an_empty_configuration_trains_the_same(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert _losses(tmp_path, "--steps", "4", "--config", str(empty)) == _losses(tmp_path, "--steps", "4")


def test_the_packaged_configuration_trains_within_its_tolerance(tmp_path: Path) -> None:
    plain = _losses(tmp_path, "--steps", "6")
    tuned = _losses(tmp_path, "--steps", "6", "--config", "vision")
    assert max(abs(a - b) / a for a, b in zip(plain, tuned, strict=True)) < 5e-3


@pytest.mark.slow
@pytest.mark.timing
def test_workers_hide_slow_reading(tmp_path: Path) -> None:
    """Steps in the record: 16 images of 4 ms are 64 ms of data time a step, which two workers take beside the training."""
    data_share = {}
    workers = tmp_path / "workers.toml"
    workers.write_text("[data]\nworkers = 2\nprefetch = 4\n")
    for name, extra in {"plain": [], "workers": ["--config", str(workers)]}.items():
        folder = tmp_path / name
        _losses(
            tmp_path, "--steps", "24", "--read-ms", "4", "--hidden", "128", "--record", str(folder), *extra
        )
        steps = trine.load(folder).rank(0).steps.columns
        phases = steps["phase_data_ns"][6:]
        data_share[name] = float(sum(phases)) / float(sum(steps["end_ns"][6:] - steps["start_ns"][6:]))
    assert data_share["plain"] > 0.3 and data_share["workers"] < 0.5 * data_share["plain"]


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["train_vision", "plain_loop_tuned"])
def test_on_two_ranks_under_torchrun(name: str, tmp_path: Path) -> None:
    arguments = (
        TINY if name == "plain_loop_tuned" else ["--steps", "6", "--hidden", "32", "--config", "vision"]
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", f"trine.samples.{name}", *arguments),
        ],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert ("6 steps on 2 x" if name == "train_vision" else "step 10: loss") in done.stdout


def test_the_record_of_a_run_holds_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _losses(tmp_path, "--steps", "4", "--config", "vision", "--record", str(folder))
    stated: dict[str, Any] = json.loads(next(folder.rglob("run.json")).read_text())
    assert stated["configuration"]["precision"]["dtype"] == "bf16"
