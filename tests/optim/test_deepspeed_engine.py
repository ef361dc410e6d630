"""``engine = "deepspeed"`` on two ranks: the same losses, the same loop, the same care."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_combinations
from rank_pool import RankPool

from trine.optim.dialects.deepspeed_pairs import BESIDE, SAID

pytest.importorskip("deepspeed", reason='engine = "deepspeed" needs DeepSpeed; install trine[deepspeed]')

#: The first of each list is for everyone, the others for the slow suite.
STAGES = [
    {"zero.stage": 2},
    *(pytest.param({"zero.stage": stage}, marks=pytest.mark.slow) for stage in (0, 3)),
]


def named(changes: Any) -> str | None:
    if not isinstance(changes, dict):
        return None
    return " ".join(f"{key}={value}" for key, value in changes.items())


@pytest.mark.parametrize("clip_norm", [0.1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", STAGES, ids=named)
@pytest.mark.slow
def test_clipping_and_schedulers_are_as_by_the_own_engine(
    two_ranks: RankPool, changes: dict[str, Any], clip_norm: float | None
) -> None:
    for answer in two_ranks.run("deepspeed_cases:clipped", changes, 2, clip_norm):
        assert answer["found"] == pytest.approx(answer["expected"], rel=1e-5)
        assert answer["effects"][0].startswith("engine: torch → deepspeed 0.")


@pytest.mark.parametrize("changes", STAGES, ids=named)
def test_loops_with_a_body_of_their_own(two_ranks: RankPool, changes: dict[str, Any]) -> None:
    for answer in two_ranks.run("deepspeed_cases:own_loop", changes, 2):
        assert answer["sums"] == pytest.approx(answer["expected"], rel=1e-6)
        assert answer["heard"].count("step_begin") - answer["heard"].count("step_cancel") == 4
        assert set(answer["phases"]) == {"data", "forward", "backward", "optimizer"}


@pytest.mark.parametrize("changes", STAGES, ids=named)
def test_what_is_not_finite_is_raised_on_all_ranks_and_changes_nothing(
    two_ranks: RankPool, changes: dict[str, Any]
) -> None:
    for answer in two_ranks.run("deepspeed_cases:poisoned", changes, 2, "raise"):
        assert answer["said"].startswith("TrainingError: optimizer step 1: ")
        assert "rank 1 was not finite" in answer["said"]
        assert answer["kept"] and answer["moved"] and answer["after"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("changes", STAGES, ids=named)
def test_what_is_not_finite_is_skipped_where_that_was_asked_for(
    two_ranks: RankPool, changes: dict[str, Any]
) -> None:
    for answer in two_ranks.run("deepspeed_cases:poisoned", changes, 2, "skip"):
        assert answer["said"] == "" and answer["skipped"] == 1
        assert answer["kept"] and answer["moved"] and answer["after"] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"zero.stage": stage} for stage in (0, 1, 2, 3)]
    + [{"zero.stage": 2, "offload.optimizer": "cpu"}]
    + [
        {"zero.stage": 3, "precision.dtype": kind, "precision.master_weights": True}
        for kind in ("bf16", "fp16")
    ],
    ids=named,
)
def test_a_run_resumes_bit_for_bit(two_ranks: RankPool, changes: dict[str, Any], tmp_path: Path) -> None:
    for answer in two_ranks.run("deepspeed_cases:resumed", changes, str(tmp_path), 2):
        assert answer["step"] == 4
        assert answer["resumed"] == answer["through"] == answer["again"]
        assert {"trine.json", "common.pt", "deepspeed", "rank-00001.pt"} <= set(answer["files"])


def test_damaged_and_foreign_checkpoints_are_named(two_ranks: RankPool, tmp_path: Path) -> None:
    by_rank = two_ranks.run("deepspeed_cases:damaged", {"zero.stage": 2}, str(tmp_path), 2)
    assert by_rank[0]["healthy"] == by_rank[1]["healthy"] == "3"
    for said in by_rank:
        assert "zero.stage = 2 and this run of 1" in said["another stage"]
        assert 'written by engine = "deepspeed"' in said["torch"]
        assert by_rank[0]["victim"] in said["flipped"] and "checksum" in said["flipped"]
        assert said["the one before"] == "2"


@pytest.mark.parametrize("engine", ["deepspeed", "torch"])  # ours is the healthy control
def test_every_file_of_a_checkpoint_is_flushed_before_its_description(
    two_ranks: RankPool, engine: str, tmp_path: Path
) -> None:
    by_rank = two_ranks.run("deepspeed_cases:flushed", engine, str(tmp_path), 2)
    files = dict(by_rank[0]["files"])
    description = files.pop("trine.json")
    before = by_rank[0]["numbers"]
    before = before[: before.index(description)] + by_rank[1]["numbers"]
    assert len(files) > 4 and not [name for name, number in files.items() if number not in before]


@pytest.mark.parametrize(
    ("changes", "how", "words"),
    [
        (
            {"communication.algorithm": "ring"},
            "",
            'communication.algorithm has no counterpart in DeepSpeed: take it out, or train with engine = "torch"',
        ),
        ({"accumulation.micro_batch": "auto"}, "", 'accumulation.micro_batch = "auto" is measured'),
        ({"precision.dtype": "bf16", "precision.master_weights": True}, "", "set zero.stage = 1"),
        ({"precision.dtype": "fp16"}, "", "precision.master_weights = true"),
        ({"zero.stage": 3, "zero.quantized_weights": True}, "", "needs CUDA"),
        ({}, "double", "is of torch.float64"),
        ({}, "wrapped", "the module inside DistributedDataParallel"),
        ({"zero.stage": 1}, "trained", "has state of steps already taken"),
        ({"offload.parameters": "cpu", "zero.stage": 2}, "", "offload.parameters needs zero.stage = 3"),
    ],
    ids=lambda value: "" if isinstance(value, str) else named(value),
)
def test_refusals_come_before_anything_changes(
    two_ranks: RankPool, changes: dict[str, Any], how: str, words: str
) -> None:
    for said in two_ranks.run("deepspeed_cases:refused", changes, 2, how):
        assert words in said and "\n" not in said
        assert 'engine = "deepspeed"' in said and 'engine = "torch"' in said


def test_closing_takes_back_what_deepspeed_changed(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("deepspeed_cases:left_behind", {"zero.stage": 3}, 2):
        assert answer["after"] == answer["before"]
        assert answer["during"]["linear"].startswith("deepspeed")
        assert answer["before"]["linear"].startswith("torch")


ALONE = """
import os
import sys

import torch
import trine

torch.set_num_threads(1)
for stage in (0, 3, 2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    engine = trine.optimize(
        model, torch.optim.AdamW(model.parameters()), {"engine": "deepspeed", "zero": {"stage": stage}},
        loss_fn=lambda model, batch: model(batch).pow(2).mean(),
    )
    losses = [float(engine.train_step(torch.ones(4, 8))) for _ in range(3)]
    engine.close()
    assert not torch.distributed.is_initialized()
    print(*losses)
"""


@pytest.mark.slow
def test_a_program_without_a_process_group_and_without_a_word_of_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    found = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "alone.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1  # the same losses at every stage, and nothing else
    assert "DeepSpeed" not in found.stderr and "Warning" not in found.stderr


def test_deepspeed_that_is_not_there_or_of_another_age_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    import trine
    from trine.optim.techniques import deepspeed as technique

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    real = importlib.util.find_spec
    monkeypatch.setattr(technique, "find_spec", lambda name: None if name == "deepspeed" else real(name))
    with pytest.raises(trine.TrineError) as raised:
        trine.optimize(model, optimizer, {"engine": "deepspeed"})
    assert "pip install 'trine[deepspeed]'" in str(raised.value)
    monkeypatch.setattr(technique, "find_spec", real)
    monkeypatch.setattr(technique, "version", lambda name: "0.99.1")
    technique._require_installed()
    assert "tested with DeepSpeed 0.19, and this is 0.99.1" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_configurations_drawn_at_random_are_refused_well_or_train_the_same(
    seed: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    drawn = random_combinations.draw(random.Random(seed))
    drawn["changes"] = {key: value for key, value in drawn["changes"].items() if key in BESIDE | SAID}
    drawn["changes"]["engine"] = "deepspeed"
    answers = two_ranks.run("random_combinations:attempt", dict(drawn), 2, str(tmp_path))
    plain = two_ranks.run("random_combinations:plain", dict(drawn), 2)
    fault = random_combinations.faults_of(drawn, answers, plain)
    assert not fault, f"{drawn}: {fault}"
