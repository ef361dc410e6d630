"""Predicted memory against what real ranks allocate, byte for byte; and what is said of configurations that do not fit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import memory_prediction_cases as cases
import optim_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import distributed, nn

import trine
from trine.cli import main
from trine.optim.memory_limits import least_bytes
from trine.optim.memory_prediction import MemoryPrediction, predict_memory, spelled_bytes
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of

#: Of a real run, until nothing in it was late.
TRIES = 3
#: Run by default; the others with the slow suite.
QUICK = ("plain replicas", "zero 3 + full checkpointing")


def predicted(changes: dict[str, Any], ranks: int, **keys: Any) -> MemoryPrediction:
    model, optimizer, batch = cases.made()
    given = {"batch": batch, "loss_fn": loss_of, "optimizer": optimizer, **keys}
    return predict_memory(model, changes, ranks=ranks, **given)


def assert_equal_to(pool: RankPool, name: str, ranks: int) -> None:
    changes = cases.CASES[name]
    said = predicted(changes, ranks)
    # The backend's threads let go of a buffer when they come to it, on a busy machine after the next one was made.
    for _ in range(TRIES):
        real = pool.run("memory_prediction_cases:allocated", changes)
        if dict(said.at_peak_bytes) == real[0]["peak"]:
            break
    # Rank 0 has the largest shards, and is the one that is predicted.
    assert dict(said.at_peak_bytes) == real[0]["peak"]
    assert dict(said.resident_bytes) == real[0]["resident"]
    assert max(sum(each["peak"].values()) for each in real) == said.peak_bytes


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_allocate_what_was_predicted(two_ranks: RankPool, name: str) -> None:
    assert_equal_to(two_ranks, name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in cases.CASES if n not in QUICK and n != "hybrid shards"])
def test_two_ranks_allocate_what_was_predicted_by_every_configuration(two_ranks: RankPool, name: str) -> None:
    assert_equal_to(two_ranks, name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain replicas", "zero 1", "zero 2", "zero 3", "hybrid shards"])
def test_four_ranks_allocate_what_was_predicted(four_ranks: RankPool, name: str) -> None:
    assert_equal_to(four_ranks, name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain replicas", "zero 3", "selective checkpointing"])
def test_the_allocator_saw_what_the_ledger_counted(two_ranks: RankPool, name: str) -> None:
    """PyTorch's profiler reports each allocation of the CPU's allocator, also those inside of kernels."""
    for events, counted, _ in two_ranks.run("memory_prediction_cases:by_the_profiler", cases.CASES[name]):
        assert counted <= events <= 1.02 * counted


@pytest.mark.slow
def test_shards_of_many_ranks_follow_the_formula() -> None:
    few, many = (predicted({"zero.stage": 3}, ranks) for ranks in (2, 32))
    assert few.resident_bytes["optimizer_state"] > 8 * many.resident_bytes["optimizer_state"]
    assert few.at_peak_bytes["activations"] == pytest.approx(many.at_peak_bytes["activations"], rel=1e-3)
    least = least_bytes(*cases.made()[:2], trine.Config().with_changes({"zero.stage": 3}), 2)
    held = few.most_bytes["parameters"] + few.most_bytes["optimizer_state"]
    assert (
        least.parameters + least.optimizer_state <= held <= 1.05 * (least.parameters + least.optimizer_state)
    )


@pytest.mark.slow
def test_a_prediction_changes_nothing_here() -> None:
    model, optimizer, batch = cases.made()
    before = [p.detach().clone() for p in model.parameters()]
    drawn, python = torch.get_rng_state(), random.getstate()
    predict_memory(model, {"zero.stage": 2}, ranks=8, batch=batch, loss_fn=loss_of, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert python == random.getstate()
    assert not optimizer.state
    assert not distributed.is_initialized()
    assert not any(p.grad is not None for p in model.parameters())


class Reading(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * 2 if y.sum() > 0 else y


def test_a_model_that_reads_values_is_named() -> None:
    model = Reading()
    with pytest.raises(UsageError, match=r"test_memory_prediction.py:\d+ reads a tensor's values"):
        predict_memory(model, ranks=2, batch=torch.zeros(2, 8), loss_fn=lambda m, x: m(x).mean())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute.compile": "blocks"}, "compute.compile"),
        ({"accumulation.micro_batch": "auto"}, "accumulation.micro_batch"),
        ({"offload.optimizer": "cpu"}, "offload.optimizer"),
        ({"parallel.pipeline": 2}, "parallel.pipeline = 2 cannot be predicted"),
        ({"accumulation.delayed": True}, "accumulation.delayed = true cannot be predicted"),
        ({"zero.stage": 3, "parallel.shard": 3}, "parallel.shard = 3 must make the 8 ranks"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predicted(changes, 8)


def test_a_prediction_that_does_not_end_is_given_up() -> None:
    def endless(model: Any, batch: Any) -> Any:
        while True:
            pass

    with pytest.raises(UsageError, match="no result within 1 s"):
        predicted({}, 1, loss_fn=endless, timeout_s=1.0)


# --- what does not fit -------------------------------------------------------------------------


def engine_within(capacity: int | None, changes: dict[str, Any] | None = None, example: bool = True) -> Any:
    model, optimizer, batch = cases.made()
    return trine.optimize(
        model,
        optimizer,
        trine.Config().with_changes(changes or {}),
        loss_fn=loss_of,
        example=batch if example else None,
        capacity_bytes=capacity,
    )


def test_the_hopeless_is_refused_without_an_example() -> None:
    with pytest.raises(
        UsageError, match=r"at least 542 KiB .* optimizer state.* and the device holds 488 KiB"
    ):
        engine_within(500_000, example=False)
    engine_within(560_000, example=False).close()


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_with_the_nearest_change() -> None:
    peak = predicted({}, 1).peak_bytes
    with pytest.raises(
        UsageError, match=r"predicted to need .*activations.*accumulation.steps = 2 is predicted"
    ) as caught:
        engine_within(peak - 1)
    assert "\n" not in str(caught.value)
    engine_within(peak).close()  # what fits is never refused
    engine_within(None).close()


def test_a_capacity_is_a_number() -> None:
    with pytest.raises(UsageError, match="capacity_bytes = '80GiB'"):
        engine_within("80GiB")  # type: ignore[arg-type]


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    ranks=st.sampled_from([2, 3, 8, 64]),
    kind=st.sampled_from(["AdamW", "SGD", "momentum", "amsgrad"]),
)
@settings(deadline=None, max_examples=40)
def test_the_lower_bound_is_the_papers_formula(stage: int, ranks: int, kind: str) -> None:
    model = nn.Linear(64, 64)
    made = {
        "AdamW": lambda p: torch.optim.AdamW(p),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    }[kind](model.parameters())
    moments = {"AdamW": 2, "SGD": 0, "momentum": 1, "amsgrad": 3}[kind]
    size = 4 * (64 * 64 + 64)
    least = least_bytes(model, made, trine.Config().with_changes({"zero.stage": stage}), ranks)
    assert least.parameters == pytest.approx(size / (ranks if stage == 3 else 1))
    assert least.gradients == pytest.approx(size / (ranks if stage >= 2 else 1))
    assert least.optimizer_state == pytest.approx(moments * size / (ranks if stage >= 1 else 1))
    assert least.buckets == (size if stage < 2 else 0)


# --- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_says_whether_a_large_model_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fit trine.samples.sizing:gpt layers=2 hidden=2048 heads=16 sequence=512 --ranks 16 --set zero.stage=3"
    assert main([*words.split(), "--capacity", "80GiB"]) == 0
    assert "fits into 80 GiB" in capsys.readouterr().out
    assert main([*words.split(), "--capacity", "1GiB"]) == 1
    assert "does not fit into 1 GiB" in capsys.readouterr().out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fit trine.samples.sizing:gpt layers=1 hidden=64 heads=2 sequence=32 vocab=64 --format json --device cpu"
    assert main(words.split()) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["peak_bytes"] == sum(said["at_peak_bytes"].values())
    assert said["fits"] is None


@pytest.mark.slow
def test_the_command_counts_activations_in_low_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention's inputs are views of one tensor, which is restored once."""
    words = (
        "fit trine.samples.sizing:gpt layers=4 hidden=64 heads=2 sequence=256 vocab=64 batch=8 --format json"
    )
    most = {}
    for changes in ("activations.dtype=bf16", "precision.tf32=false"):
        assert main([*words.split(), "--device", "cpu", "--set", changes]) == 0
        most[changes] = json.loads(capsys.readouterr().out)["most_bytes"]["activations"]
    low, plain = most.values()
    assert 0.4 < low / plain < 0.8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fit nowhere:nothing", "cannot be imported"),
        ("fit trine.samples.sizing:gpt layers", "no KEY=VALUE"),
        ("fit trine.samples.sizing:gpt layers=1 hiden=64", "hiden"),
        ("fit trine.samples.sizing:gpt --capacity much", "is no size"),
        ("fit trine.samples.sizing:gpt --capacity 1e400", "is no size"),
        ("fit trine.samples.sizing:gpt --capacity .e5", "is no size"),
        ("fit trine.samples.sizing:gpt --ranks 1000000000", "use 1048576 or fewer"),
        ("fit trine.samples.sizing:gpt --ranks 4 --ranks-per-node 3", "ranks per node = 3"),
        ("fit trine.samples.sizing:gpt --ranks 4 --ranks-per-node 0", "ranks per node = 0"),
        ("fit .sizing:gpt", "cannot be imported: TypeError"),
        ("fit that_ends:gpt", "cannot be imported: SystemExit: 3"),
        ("fit that_raises:gpt", "cannot be imported: ValueError: at import"),
    ],
)
def test_the_command_names_mistakes(
    words: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "that_ends.py").write_text("raise SystemExit(3)")
    (tmp_path / "that_raises.py").write_text("raise ValueError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("size", "said"), [(0, "0 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB")])
def test_sizes_are_spelled(size: int, said: str) -> None:
    assert spelled_bytes(size) == said


@pytest.mark.slow
def test_totals_are_those_of_pytorchs_own_tracker() -> None:
    """FSDPMemTracker watches the same two steps of the same sharded model, by other code."""
    from trine.optim.runtime.pretended_ranks import in_a_fork

    ours, theirs = in_a_fork(cases.by_pytorchs_tracker, 60.0)
    assert theirs <= ours <= theirs + 64  # it began later: numbers of the mesh and of the step before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("changes", [{}, {"checkpointing.mode": "full"}, {"precision.dtype": "bf16"}])
def test_a_device_allocates_what_was_predicted(changes: dict[str, Any]) -> None:
    """Within a tenth: kernels' workspaces, and libraries that allocate through PyTorch, are not predicted."""
    model = optim_cases.small_gpt(layers=4, hidden=512, heads=8, sequence=256, attention="sdpa").cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = tuple(each.cuda() for each in optim_cases.batches(1, 16, sequence=256)[0])
    said = predict_memory(model, changes, ranks=1, batch=batch, loss_fn=loss_of, optimizer=optimizer)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    engine.train_step(batch)
    torch.cuda.reset_peak_memory_stats()
    engine.train_step(batch)
    assert torch.cuda.max_memory_allocated() == pytest.approx(said.peak_bytes, rel=0.1)
