"""Two ranks under torchrun: collectives, exposure, accumulation with no_sync, and the same losses as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from profiled_loops import phase, read

import trine
from trine.record.model import MISSING

pytestmark = pytest.mark.torchrun
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of all cases and the losses, from one launch."""
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(TESTS / "ddp_training.py"), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_losses_are_bitwise_the_same(trained: Path, rank: int) -> None:
    losses = json.loads((trained / f"losses-{rank}.json").read_text())
    assert set(losses) == {"slow", "accumulate", "fsdp"}
    for name, (plain, profiled) in losses.items():
        assert plain == profiled, name
        assert len(set(plain)) == 12


def test_a_straggler_makes_the_other_rank_wait(trained: Path) -> None:
    job = trine.load(trained / "slow")
    assert (job.world_size, job.rank_ids) == (2, (0, 1))
    ranks = [read(trained / "slow", rank) for rank in (0, 1)]
    for rank in ranks:
        assert rank.steps is not None and rank.collectives is not None
        assert len(rank.steps) == 12
        assert rank.groups[0].ranks == (0, 1)
        assert rank.metadata["backend"] == "gloo"
        assert rank.metadata["data_parallel"]["kind"] == "ddp"
        assert len(rank.metadata["data_parallel"]["bucket_bytes"]) > 1
        assert rank.metadata["state"] == "finished"
        # Every step's gradients were reduced, and no collective began before its step.
        step = rank.collectives["step"]
        assert set(range(12)) <= set(step.tolist())
        inside = np.isin(step, rank.steps["index"]) & (rank.collectives["start_ns"] != MISSING)
        rows = np.searchsorted(rank.steps["index"], step[inside])
        assert (rank.collectives["start_ns"][inside] >= rank.steps["start_ns"][rows]).all()
    exposed = [np.median(phase(rank.steps, "exposed_communication")[2:]) for rank in ranks]  # type: ignore[arg-type]
    assert exposed[1] > 20e6  # it waits for rank 0, which sleeps 30 ms a step
    assert exposed[0] < exposed[1] / 2


def test_no_sync_accumulates(trained: Path) -> None:
    for rank in (0, 1):
        steps = read(trained / "accumulate", rank).steps
        assert steps is not None
        assert steps["index"].tolist() == list(range(6))
        assert not np.isnan(steps["loss"]).any()


def test_fsdp2(trained: Path) -> None:
    """Its record was closed after the process group was destroyed."""
    rank = read(trained / "fsdp", 1)
    assert rank.steps is not None and rank.collectives is not None
    assert len(rank.steps) == 12
    assert rank.metadata["state"] == "finished"
    facts = rank.metadata["data_parallel"]
    assert (facts["kind"], facts["ranks"], facts["reshard_after_forward"]) == ("fsdp2", 2, False)
    model = rank.metadata["model"]
    assert model["parameter_bytes"] < 4 * model["parameters"]  # a shard of it
    assert model["optimizer_bytes"] > model["parameter_bytes"]
