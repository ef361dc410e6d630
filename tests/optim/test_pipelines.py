"""Pipelines on real ranks: any model whose blocks follow each other trains as it does whole, or is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optim_cases
import pipeline_cases
import pytest
from rank_pool import RankPool

pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]


def _apart(name: str, losses: list[float], outside: bool = False) -> float:
    plain = pipeline_cases.plain(name, outside)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))


@pytest.mark.parametrize("name", ["vision", "sequential"])
def test_models_train_as_they_do_whole(name: str, two_ranks: RankPool) -> None:
    for losses, said in two_ranks.run("pipeline_cases:piped", name, {}):
        assert _apart(name, losses) < 1e-10
        assert "parallel.pipeline: the whole model on each rank → 2 stages on 2 ranks" in said[0]
        assert any("equal estimated cost" in effect for effect in said)
        assert any("chosen: ideal bubble 20.0%" in effect for effect in said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "qwen", "mixtral"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_causal_models_of_transformers_train_as_they_do_whole(
    name: str, schedule: str, two_ranks: RankPool
) -> None:
    pytest.importorskip("transformers")
    for losses, _ in two_ranks.run("pipeline_cases:piped", name, {"parallel.schedule": schedule}):
        assert _apart(name, losses) < 1e-5  # these compute their loss in fp32


@pytest.mark.slow
def test_a_loss_outside_the_model_is_as_good(two_ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    for losses, _ in two_ranks.run("pipeline_cases:piped", "llama", {}, True):
        assert _apart("llama", losses, True) < 1e-10


@pytest.mark.parametrize("name", ["skipping", "by name", "late", "biased", "frozen"])
def test_an_example_shows_what_stages_need(name: str, two_ranks: RankPool) -> None:
    """A skip past the cut, a module registered late, a table for every block, a weight used again behind them."""
    for losses, said in two_ranks.run("pipeline_cases:piped", name, {}, False, True):
        assert _apart(name, losses) < 1e-10
        assert any("equal measured cost" in effect for effect in said)


def test_what_takes_no_more_than_a_shape_past_the_cut_is_not_refused(two_ranks: RankPool) -> None:
    for losses, _ in two_ranks.run("pipeline_cases:piped", "shape", {}):
        assert _apart("shape", losses) < 1e-10


def test_a_skip_between_blocks_past_the_cut_is_refused_with_an_example(two_ranks: RankPool) -> None:
    for said in two_ranks.run("pipeline_cases:refused", "crossing", True):
        assert "stage 1 of 2 needs what blocks.0 computes beside the hidden state" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("skipping", 1, "stage 1 of 2 needs inner beside the hidden state"),
        ("crossing", 1, "stage 1 of 2 needs blocks.0 beside the hidden state"),
        ("biased", 1, "stage 1 of 2 needs inner, table beside the hidden state"),
        ("late", 0, "inner is registered behind the blocks and runs before them"),
        ("mask", 1, "stage 1 of 2 uses values of inner beside the hidden state"),
        ("choice", 1, "stage 1 of 2 uses values of blocks.0 beside the hidden state"),
        ("penalty", 1, "the loss takes blocks.2.bias otherwise than through the model's output"),
        ("reading", 1, "blocks.0.weight is read on a rank that has no blocks.0"),
    ],
)
def test_without_an_example_the_first_step_says_so_on_all_ranks(name: str, rank: int, said: str) -> None:
    found = optim_cases.on_ranks(2, pipeline_cases.failing, name)
    assert said in found[rank]
    assert f"rank {rank} failed by itself: parallel.pipeline: " in found[1 - rank] and said in found[1 - rank]


@pytest.mark.slow
def test_a_loss_that_depends_on_no_stage_before_is_refused() -> None:
    """One process leaves those gradients out; zeros would let weight decay move what it never moves."""
    found = optim_cases.on_ranks(2, pipeline_cases.failing, "detached")
    said = "the loss depends on nothing that stage 1 was handed"
    assert said in found[1]
    assert "rank 1 failed by itself" in found[0] and said in found[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_nothing_is_refused_where_the_stages_before_are_frozen(schedule: str, two_ranks: RankPool) -> None:
    plain = pipeline_cases.plain("detached, frozen")
    for losses, _ in two_ranks.run(
        "pipeline_cases:piped", "detached, frozen", {"parallel.schedule": schedule}
    ):
        assert losses == pytest.approx(plain, rel=1e-12)


def test_evaluation_and_modes(two_ranks: RankPool) -> None:
    """engine.evaluate is the whole model's mean loss; both the given model and engine.model switch dropout off."""
    for schedule in ("1f1b", "zbv"):
        found = two_ranks.run("pipeline_cases:evaluated", schedule)
        for mine, whole, modes in found:
            assert mine == pytest.approx(whole, rel=1e-12)
            assert modes == [True, False, True, False]


def test_a_rank_keeps_what_its_stages_own(two_ranks: RankPool) -> None:
    first, last = two_ranks.run("pipeline_cases:kept")
    assert first["names"] & last["names"] == {"tokens.weight"}  # tied: the embedding, and the head
    assert first["names"] | last["names"] == first["all"]
    assert first["duplicates"] == set() and last["duplicates"] == {"tokens.weight"}
    assert all(place["held"] == place["names"] for place in (first, last))
    for place in (first, last):  # what others own takes no memory any more
        assert place["bytes"] < 0.75 * place["whole_bytes"]
    assert first["groups"] == last["groups"] == 2
    assert "engine.train_step" in first["called"]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_replicas_evaluate_with_the_same_statistics(chunks: int, four_ranks: RankPool) -> None:
    means = four_ranks.run("pipeline_cases:statistics", chunks)
    assert means[0] == means[1]
    assert means[2] == means[3]
    assert any(means[0])
    assert any(means[2])


@pytest.mark.slow
def test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_stages_follow(four_ranks: RankPool) -> None:
    kept = four_ranks.run("pipeline_cases:held", "1f1b", 8)
    assert kept == [4, 3, 2, 1]
    assert four_ranks.run("pipeline_cases:held", "gpipe", 8) == [8, 8, 8, 8]


def test_batches_of_changing_shapes(two_ranks: RankPool) -> None:
    for losses, whole in two_ranks.run("pipeline_cases:shapes"):
        assert losses == pytest.approx(whole, rel=1e-12)


def test_the_record_holds_bubbles(two_ranks: RankPool, tmp_path: Path) -> None:
    import trine

    metrics = two_ranks.run("pipeline_cases:recorded", str(tmp_path / "run"))
    found = trine.analyze(trine.load(tmp_path / "run")).pipeline
    assert found is not None
    assert found.source == "microbatches" and found.schedule == "1F1B" and found.microbatches == 4
    assert [stage.stages for stage in found.stages] == [(0,), (1,)]
    assert 0 < found.bubble_ratio < 1 and found.ideal_ratio == pytest.approx(0.2)
    for bubble, ideal in metrics:
        assert 0 < bubble < 1 and ideal == pytest.approx(0.2)


def test_no_rank_takes_a_step_for_ended_before_all_have(four_ranks: RankPool) -> None:
    """Its bubble lasts until the last rank's work ends, which is that of the first stage."""
    for by_rank in zip(*four_ranks.run("pipeline_cases:ended", 0.02), strict=True):
        last = max(own for _, own, *_ in by_rank)
        assert last == by_rank[0][1]
        for began, own, busy, ended, bubble in by_rank:
            assert own <= last <= ended
            assert 0 < 1 - busy / (last - began) <= bubble < 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accumulation.delayed": True}, "accumulation.delayed and parallel.pipeline cannot be combined"),
        ({"accumulation.micro_batch": "auto"}, 'accumulation.micro_batch = "auto" and parallel.pipeline'),
        (
            {"accumulation.steps": 2, "parallel.microbatches": 4},
            "accumulation.steps and parallel.microbatches both say how a batch is cut",
        ),
        ({"compute.compile": "model"}, 'compute.compile = "model" and parallel.pipeline cannot be combined'),
        (
            {"compute.compile": "blocks", "parallel.schedule": "zbv"},
            'compute.compile and parallel.schedule = "zbv" cannot be combined',
        ),
        ({"zero.stage": 1}, "zero.stage = 1"),
        ({"parallel.microbatches": 10**23}, "before the first step: use 65536 or fewer"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    changes: dict[str, Any], said: str, two_ranks: RankPool
) -> None:
    for refusal in two_ranks.run("pipeline_cases:refused", "vision", False, changes):
        assert said in refusal and "\n" not in refusal


def test_a_model_that_was_cut_is_not_cut_again(two_ranks: RankPool) -> None:
    for refusal in two_ranks.run("pipeline_cases:again", "vision"):
        assert "has one value for all its elements, as a pipeline leaves" in refusal and "\n" not in refusal


# --- a rank lost ------------------------------------------------------------------------------------------


def _run(folder: Path, how: str) -> list[tuple[int, str, str, float]]:
    """(exit code, standard output, standard error, seconds) by rank, of four."""
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path[1:]])
    )
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "lost_stage.py", str(rank), "4", folder / "store", how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(4)
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            ended.append((process.returncode, out, err, time.monotonic() - began))
    finally:
        for process in processes:
            process.kill()
    return ended


@pytest.mark.slow
def test_a_sound_pipeline_ends_well(tmp_path: Path) -> None:
    for code, out, err, _ in _run(tmp_path, "sound"):
        assert code == 0 and "trained 5 steps" in out, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", r"lost its group"),
        ("raises", r"rank 2 failed by itself: the data of this stage are gone"),
    ],
)
def test_the_others_stop_when_a_stage_is_lost(how: str, said: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, how)
    assert ended[2][0] in (-9, 1)
    for rank in (0, 1, 3):
        code, _, err, seconds = ended[rank]
        assert code == 1, err
        assert seconds < 150, err  # the groups' timeout is half an hour
        line = [line for line in err.splitlines() if "TrainingError" in line][-1]
        assert f"optimizer step 2: rank {rank} lost its group" in line
        assert said in line
        if how == "killed":
            assert "rank 2 gave no sign" in line or "ranks" in line


# --- what schedules gain ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bubbles_are_those_of_the_schedules() -> None:
    """A small version of benchmarks/bubbles.py: five points, where the benchmark on a quiet machine has one."""
    sys.path.append(str(TESTS.parent / "benchmarks"))
    import bubbles

    for row in bubbles.sleep_rows(4, 8, ("1f1b", "interleaved", "zbv"), 0.12):
        assert abs(row.bubble - row.ideal) < 0.05, row
