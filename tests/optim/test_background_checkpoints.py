"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from pathlib import Path

import optim_cases
import pytest
from rank_pool import RankPool

pytest.importorskip("torch")


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_written_is_the_state_at_the_call(two_ranks: RankPool, stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for found in two_ranks.run("checkpoint_cases:background", {"zero.stage": stage}, str(folder)):
        assert found == {
            "early": (False, False),  # training had gone on before
            "path": str(folder),
            "step": 3,
            "losses": True,
            "bits": True,
            "reused": True,  # of the buffers, at the second save
            "done": True,
        }


@pytest.mark.slow
def test_a_failure_is_told_once_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    by_rank = two_ranks.run("checkpoint_cases:background_failure", str(tmp_path / "run"))
    for rank, found in enumerate(by_rank):
        assert "No space left on device" in found["told"] and "\n" not in found["told"]
        assert ("No space left on device" in found["asked"]) == (rank == 0)
        assert "No space left on device" in found["closing"]
        assert found["stays"] == 0 and found["saved"] == 1
    assert not list(tmp_path.glob("*.previous"))


def test_a_rank_without_memory_is_told_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run("checkpoint_cases:copy_failure", str(tmp_path / "run"), 1):
        assert "cannot write the checkpoint" in found["said"] and "out of memory" in found["said"]
        assert found["path"] == str(tmp_path / "run")
        assert "cannot read the checkpoint" in found["unread"] and "out of memory" in found["unread"]


def test_closing_waits_for_it(two_ranks: RankPool, tmp_path: Path) -> None:
    assert all(two_ranks.run("checkpoint_cases:closed_while_saving", str(tmp_path / "run")))


@pytest.mark.slow
def test_a_group_that_ends_under_it_is_one_line(tmp_path: Path) -> None:
    import checkpoint_cases

    found = optim_cases.on_ranks(2, checkpoint_cases.group_ended_while_saving, str(tmp_path / "run"))
    (asked, closing, _), (_, other, _) = found
    assert closing == "closed"  # it has been told
    for said in (asked, other):
        assert said.startswith(f"cannot write the checkpoint {tmp_path / 'run'}: ")
        assert "the process group ended before engine.close()" in said and "\n" not in said
    assert not any(whole for _, _, whole in found)


def test_the_record_knows_how_long_training_stood_still(tmp_path: Path) -> None:
    """One region a save, whatever it calls; what the background does is none."""
    import checkpoint_cases

    import trine

    engine = checkpoint_cases.plain_engine()
    batches = checkpoint_cases.zero_cases.optim_cases.batches(3, 2)
    with trine.profile(tmp_path / "record", model=engine.model, windows=None) as prof:
        for batch in prof.steps(batches):
            engine.train_step(batch)
            engine.save(tmp_path / "now")
            engine.save(tmp_path / "later", asynchronous=True).result(60)
    table = trine.load(tmp_path / "record").rank(0).regions
    pairs = zip(table.text("kind"), table.text("name"), strict=True)
    assert [name for kind, name in pairs if kind == "checkpoint"] == ["engine.save"] * 6
