"""A rank is killed, or late beyond the group's timeout: the others end at once, with one line that names it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]


def _run(folder: Path, how: str, ranks: int, changes: dict[str, Any]) -> list[tuple[int, str, str, float]]:
    """(exit code, standard output, standard error, seconds) by rank."""
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path[1:]])
    )
    told = json.dumps(changes)
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "lost_ranks.py", str(rank), str(ranks), folder / "store", how, told],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            ended.append((process.returncode, out, err, time.monotonic() - began))
    finally:
        for process in processes:
            process.kill()
    return ended


def _last_line(text: str) -> str:
    return [line for line in text.strip().splitlines() if "TrainingError" in line][-1]


@pytest.mark.slow
def test_a_healthy_pair_ends_well(tmp_path: Path) -> None:
    for code, out, err, _ in _run(tmp_path, "sound", 2, {}):
        assert code == 0 and "trained 8 steps" in out, err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"communication.compression": "int8"}, marks=pytest.mark.slow),
        pytest.param({"zero.stage": 1}, marks=pytest.mark.slow),
        pytest.param({"zero.stage": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    (code, _, err, seconds), (killed, _, _, _) = _run(tmp_path, "killed", 2, changes)
    assert killed == -9, err
    assert code == 1 and seconds < 60, err  # the group's timeout, which is not waited for
    line = _last_line(err)
    assert "optimizer step 3: rank 0 lost its group; rank 1 gave no sign" in line
    assert "gloo backend said" in line and "checkpoint" in line


@pytest.mark.slow
def test_of_four_ranks_all_name_the_killed_one(tmp_path: Path) -> None:
    ended = _run(tmp_path, "killed", 4, {})
    for rank in (0, 2, 3):
        code, _, err, _ = ended[rank]
        assert code == 1
        # On a machine that is busy a sound rank may not have come so far either; it is then named as well.
        assert re.search(rf"rank {rank} lost its group; ranks? 1\b.* gave no sign", _last_line(err)), err


@pytest.mark.slow
def test_a_late_rank_is_named_within_the_timeout_of_the_group(tmp_path: Path) -> None:
    (code, _, err, seconds), (late_code, _, late_err, _) = _run(tmp_path, "late", 2, {})
    assert code == 1 and seconds < 60
    assert "rank 1 gave no sign" in _last_line(err) and "Timed out" in _last_line(err)
    # The late one learns that its group is gone; rank 0 left its sign before it ended.
    assert late_code == 1
    assert "rank 1 lost its group" in _last_line(late_err)
