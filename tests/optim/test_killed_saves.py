"""Runs that are killed while they save: the newest good checkpoint always loads, and the run goes on bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_saves_cases import BENCHMARKS, killed_saves

pytest.importorskip("torch")


def _killed(folder: Path, trials: int, seed: int) -> list[killed_saves.Trial]:
    """In a process of its own, which forks: no thread of PyTorch's may have started in it."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "killed_saves.py"), str(folder), str(trials), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 30 * trials,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [killed_saves.Trial(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    trials = _killed(tmp_path, 10, seed=0)
    assert len(trials) == 10
    assert [trial for trial in trials if trial.failure] == []
    assert {trial.victims for trial in trials} >= {"all"}
    assert len({trial.phase for trial in trials}) > 1  # they fell on several moments


@pytest.mark.slow
def test_a_kill_of_each_kind(tmp_path: Path) -> None:
    trials = _killed(tmp_path, 2, seed=4)
    assert [trial for trial in trials if trial.failure] == []


@pytest.mark.slow
def test_losses_that_are_not_those_of_the_control_are_found(tmp_path: Path) -> None:
    """The trials' own control: what they compare does tell a run that went on wrongly."""
    trials = _killed(tmp_path, 1, seed=1)
    assert not trials[0].failure
    path = tmp_path / "run-0" / "losses-0.txt"
    first = path.read_text().splitlines()[0].split(" ")[0]
    with path.open("a") as log:
        log.write(f"{first} 0x1.0p+3\n")
    assert "at once, one folder" in _again(tmp_path)


def _again(folder: Path) -> str:
    code = (
        "import sys, pathlib; sys.path.append(sys.argv[1]); import forked_ranks, killed_saves as k; forked_ranks.import_all(); "
        "print(k._losses_that_differ(pathlib.Path(sys.argv[2])))"
    )
    (folder / "control" / "losses-0.txt").unlink()
    (folder / "control" / "losses-1.txt").unlink()
    done = subprocess.run(
        [sys.executable, "-c", code, str(BENCHMARKS), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout
