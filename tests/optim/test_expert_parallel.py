"""Experts spread over ranks: adopted in mid-training, clipped, told when they are unequally busy, refused where they cannot be.

That they train the same is held by the cases of benchmarks/parity_cases/expert.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from trine.optim.runtime.experts.load import Load

TWO = {"parallel.expert": 2}


def near(found: list[float], expected: list[float], relative: float = 1e-10) -> None:
    assert found == pytest.approx(expected, rel=relative)


def test_live_state_goes_along_under_its_names(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("expert_cases:adopted", TWO):
        near(answer["losses"], answer["expected"])
        assert answer["same_names"]
        assert answer["local_experts"] == 2
        assert answer["apart"] < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_live_state_is_sharded_beside_it(four_ranks: RankPool, stage: int) -> None:
    for answer in four_ranks.run("expert_cases:adopted", {**TWO, "zero.stage": stage}):
        near(answer["losses"], answer["expected"])
        assert answer["same_names"]
        assert answer["apart"] < 1e-10


@pytest.mark.parametrize("changes", [TWO, {**TWO, "zero.stage": 3}], ids=["replicated", "sharded"])
def test_the_norm_counts_each_expert_once(two_ranks: RankPool, changes: dict[str, object]) -> None:
    for losses, expected in two_ranks.run("expert_cases:clipped", changes):
        near(losses, expected)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"parallel.tensor": 2}, {"parallel.context": 2}, {"zero.stage": 3}])
def test_the_norm_counts_each_expert_once_on_four(four_ranks: RankPool, other: dict[str, object]) -> None:
    for losses, expected in four_ranks.run("expert_cases:clipped", {**TWO, **other}):
        near(losses, expected)


def test_a_router_that_sends_all_to_one_expert_is_told(two_ranks: RankPool) -> None:
    healthy = two_ranks.run("expert_cases:skewed", None, TWO)
    ill = two_ranks.run("expert_cases:skewed", 1, TWO)
    for answer in [*healthy, *ill]:
        near(answer["losses"], answer["expected"])  # also where one rank gets no token at all
        assert answer["told"]["experts/dropped_tokens"] == 0.0
    assert all(answer["told"]["experts/balance"] == 1.0 for answer in healthy)
    assert all(answer["told"]["experts/rank_balance"] == 1.0 for answer in healthy)
    assert all(answer["told"]["experts/balance"] == pytest.approx(0.25) for answer in ill)
    assert all(answer["told"]["experts/rank_balance"] == pytest.approx(0.5) for answer in ill)
    assert any(
        "expert 1 of blocks.0.mixture.experts gets 100% of its tokens" in each for each in ill[0]["effects"]
    )
    assert not any("100%" in each for each in healthy[0]["effects"])


def test_bytes_are_those_that_leave_the_rank(two_ranks: RankPool) -> None:
    """All go to rank 0: rank 1 sends its 4 × 32 rows of 32 numbers and gets them back, in two layers, forward and backward."""
    row = 32 * 8
    for answer in two_ranks.run("expert_cases:skewed", 1, TWO):
        assert answer["told"]["experts/sent_bytes"] == 4 * 32 * row * 2 * 2


def test_what_cannot_be_spread_is_refused_by_name(two_ranks: RankPool) -> None:
    cases = [
        ({"parallel.expert": 2}, "dense", "GPT has no mixture of experts"),
        ({"parallel.expert": 2}, "listed", "experts of Module is a ModuleList"),
        (
            {"parallel.expert": 2, "compute.compile": "blocks"},
            "mixture",
            "compute.compile and parallel.expert",
        ),
        (
            {"parallel.expert": 2, "adafactor": True},
            "mixture",
            "Adafactor is not known to update element by element",
        ),
        (
            {"parallel.expert": 2, "zero.stage": 1},
            "mixture",
            "zero.stage = 1 and parallel.expert cannot be combined",
        ),
    ]
    for changes, of, said in cases:
        for answer in two_ranks.run("expert_cases:refused", changes, of):
            assert said in answer
            assert "\n" not in answer


@pytest.mark.slow
def test_what_four_ranks_refuse(four_ranks: RankPool) -> None:
    pipeline = {"parallel.expert": 2, "parallel.pipeline": 2}
    assert (
        "the balance loss of blocks.0.mixture.router"
        in four_ranks.run("expert_cases:refused", pipeline, "balanced")[0]
    )
    three = four_ranks.run("expert_cases:refused", {"parallel.expert": 3}, "mixture")[0]
    assert "parallel.expert = 3 must divide the 4 ranks" in three


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["mixtral", "qwen_moe"])
def test_mixtures_of_transformers(two_ranks: RankPool, kind: str) -> None:
    pytest.importorskip("transformers")
    for losses, expected in two_ranks.run("expert_cases:hugging_face", kind, TWO):
        near(losses, expected, relative=1e-6)


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=2, max_size=2))
@settings(max_examples=50, deadline=None)
def test_balance_is_mean_over_largest(counts: list[list[int]]) -> None:
    load = Load()
    load.add("layer", torch.tensor(counts), ranks=2)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    by_rank = [totals[0] + totals[1], totals[2] + totals[3]]
    if not sum(totals):
        assert load.balance() is None and load.rank_balance() is None and load.busiest() is None
        return
    assert load.balance() == pytest.approx(sum(totals) / 4 / max(totals))
    assert load.rank_balance() == pytest.approx(sum(by_rank) / 2 / max(by_rank))
    assert load.busiest() is not None
    load.add("layer", torch.tensor(counts), ranks=2)  # micro-batches add up
    assert load.balance() == pytest.approx(sum(totals) / 4 / max(totals))
    load.forget()
    assert load.balance() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TWO, TWO),
        (TWO, {"zero.stage": 3}),
        ({**TWO, "zero.stage": 3}, {}),
        ({}, TWO),
    ],
    ids=["the same", "to shards", "from both to replicas", "from replicas"],
)
def test_checkpoints_go_from_layout_to_layout(
    two_ranks: RankPool, tmp_path: Path, first: dict[str, object], second: dict[str, object]
) -> None:
    for losses, expected in two_ranks.run("expert_cases:resumed", str(tmp_path / "saved"), first, second):
        near(losses, expected)
