"""Where ranks exchange in every forward, what one of them does alone ends in words on all: it is not trained on, nor waited for."""

from __future__ import annotations

from typing import Any

import meeting_cases
import pytest
from rank_pool import RankPool

import trine
from trine.optim.layout import layout_of

TENSOR, EXPERT, CONTEXT = ({f"parallel.{name}": 2} for name in ("tensor", "expert", "context"))
MEETING = [TENSOR, EXPERT, CONTEXT, {"zero.stage": 3}]
NAMES = ["tensor", "expert", "context", "zero 3"]
REPLICAS: dict[str, Any] = {}
AUTO = {"accumulation.micro_batch": "auto"}


@pytest.mark.parametrize(
    ("changes", "in_modules", "in_forward", "over_batches"),
    [
        ({}, False, False, False),
        ({"zero.stage": 1}, False, False, False),
        ({"zero.stage": 2}, True, True, True),
        (TENSOR, True, True, False),
        (CONTEXT, True, True, False),
        (EXPERT, True, True, True),
        ({"parallel.pipeline": 2}, False, True, False),
        ({**TENSOR, "zero.stage": 3}, True, True, True),
    ],
)
def test_where_ranks_meet(
    changes: dict[str, Any], in_modules: bool, in_forward: bool, over_batches: bool
) -> None:
    layout = layout_of(trine.Config().with_changes(changes), 0, 4)
    assert (layout.meets_in_modules, layout.meets_in_forward) == (in_modules, in_forward)
    assert layout.meets_over_batches == over_batches


def test_one_rank_meets_nobody() -> None:
    for stage in (0, 1, 2, 3):
        layout = layout_of({"zero": {"stage": stage}}, 0, 1)
        assert not (layout.meets_in_modules or layout.meets_in_forward or layout.meets_over_batches)


@pytest.mark.parametrize("changes", MEETING, ids=NAMES)
def test_a_batch_that_failed_is_not_trained_past(two_ranks: RankPool, changes: dict[str, Any]) -> None:
    for said in two_ranks.run("meeting_cases:skipping", changes, [0, 1]):
        assert said[:2] == ["trained", "ValueError: a bad sample"]
        assert all(
            each.startswith(
                "UsageError: this engine failed in forward or backward (ValueError: a bad sample)"
            )
            for each in said[2:]
        )


def test_replicas_skip_a_batch_that_failed_and_train_on(two_ranks: RankPool) -> None:
    for said in two_ranks.run("meeting_cases:skipping", REPLICAS, [0, 1]):
        assert said == ["trained", "ValueError: a bad sample", "trained", "trained"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", MEETING, ids=NAMES)
def test_the_others_are_told_of_a_rank_that_failed_alone(changes: dict[str, Any]) -> None:
    failed, waiting = meeting_cases.on_two_ranks("skipping", changes, [0], False, 3)
    assert failed[1] == "ValueError: a bad sample"
    assert failed[2].startswith("UsageError: this engine failed in forward or backward")
    assert waiting[:1] == ["trained"]
    assert waiting[1].startswith("TrainingError: optimizer step 1: rank 0 failed")


# --- micro-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[[4, 4, 4], [4, 4, 2]], [[4, 4], [2, 4]]], ids=["later", "at first"])
def test_experts_see_equally_many_micro_batches_of_unequal_batches(
    two_ranks: RankPool, sizes: list[list[int]]
) -> None:
    changes = {**EXPERT, "accumulation.micro_batch": 2}
    alike = two_ranks.run("meeting_cases:sizes", changes, [sizes[0], sizes[0]])
    unlike = two_ranks.run("meeting_cases:sizes", changes, sizes)
    assert [len(losses) for losses in [*alike, *unlike]] == [len(sizes[0])] * 4


@pytest.mark.slow
def test_tensor_ranks_cut_a_smaller_batch_into_fewer(four_ranks: RankPool) -> None:
    """Replicas of a model that is split meet after backward alone: one sample may be one micro-batch."""
    changes = {**TENSOR, "accumulation.micro_batch": 2}
    for losses in four_ranks.run("meeting_cases:sizes", changes, [[4, 4], [4, 4], [4, 1], [4, 1]]):
        assert len(losses) == 2


@pytest.mark.parametrize(
    ("changes", "shared"),
    [(TENSOR, "parallel.tensor"), (EXPERT, "parallel.expert"), ({"zero.stage": 3}, "sharded parameters")],
    ids=["tensor", "expert", "zero 3"],
)
def test_out_of_memory_is_not_run_again_where_others_wait(
    two_ranks: RankPool, changes: dict[str, Any], shared: str
) -> None:
    for said in two_ranks.run("meeting_cases:skipping", {**changes, **AUTO}, [0, 1], True):
        assert said[0] == "trained"
        assert said[1].startswith("UsageError: out of memory with micro-batches of 4 (a bad sample)")
        assert f"with {shared} the other ranks cannot be told" in said[1]
        assert "start again with accumulation.micro_batch = 2" in said[1]
        assert all("this engine failed in forward or backward" in each for each in said[2:])


def test_replicas_run_again_what_ran_out_of_memory(two_ranks: RankPool) -> None:
    for said in two_ranks.run("meeting_cases:skipping", AUTO, [0, 1], True):
        assert said == ["trained"] * 4


# --- what is recomputed ------------------------------------------------------------------------

#: Tokens a sample in each step: rank 0's grow.
GROWING, STEADY = [16, 16, 32, 32, 32], [16] * 5
ROOM = {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 10**9}


def choices(ranks: RankPool, changes: dict[str, Any], lengths: list[list[int]]) -> list[dict[str, Any]]:
    """By rank; the losses are those of the same ranks without recomputation."""
    plain = {
        key: value
        for key, value in changes.items()
        if key.partition(".")[0] not in ("checkpointing", "offload")
    }
    expected = ranks.run("meeting_cases:lengths", plain, lengths)
    found = ranks.run("meeting_cases:lengths", changes, lengths)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    return found


def test_a_larger_batch_of_one_rank_is_decided_on_by_all(two_ranks: RankPool) -> None:
    steady = choices(two_ranks, {**EXPERT, **ROOM}, [STEADY, STEADY])
    grown = choices(two_ranks, {**EXPERT, **ROOM}, [GROWING, STEADY])
    for each in steady:
        assert each["recomputed"] == [0] * 5
        assert not any("a larger batch came" in effect for effect in each["effects"])
    for each in grown:  # all in the step that measures what came in the one before
        assert each["recomputed"] == [0, 0, 2, 0, 0]
        assert any(
            "a larger batch came to a rank: all ranks run 2 modules" in said for said in each["effects"]
        )


def test_all_recompute_until_a_batch_as_large_was_measured(two_ranks: RankPool) -> None:
    for each in choices(two_ranks, {**EXPERT, **ROOM}, [[16, 32, 16, 16, 32], STEADY]):
        assert each["recomputed"] == [0, 2, 2, 2, 0]


@pytest.mark.parametrize(
    "more", [{"offload.activations": "cpu"}, {"checkpointing.budget_bytes": 500_000}], ids=["moved", "tight"]
)
def test_ranks_choose_alike_whatever_is_chosen(two_ranks: RankPool, more: dict[str, Any]) -> None:
    lengths = [[16, 16, 16, 16, 32, 32, 32], [16] * 7]
    first, second = choices(two_ranks, {**EXPERT, **ROOM, **more}, lengths)
    assert first["recomputed"] == second["recomputed"]
    decided = [[effect for effect in each["effects"] if "allowed" in effect] for each in (first, second)]
    assert [len(effects) for effects in decided] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [TENSOR, CONTEXT], ids=["tensor", "context"])
def test_ranks_of_one_batch_change_together(two_ranks: RankPool, changes: dict[str, Any]) -> None:
    for each in choices(two_ranks, {**changes, **ROOM}, [GROWING, GROWING]):
        assert each["recomputed"] == [0, 0, 2, 0, 0]


def test_modules_that_hold_shards_of_their_own_change_together(two_ranks: RankPool) -> None:
    changes = {"zero.stage": 3, "checkpointing.modules": ["inner"], **ROOM}
    for each in choices(two_ranks, changes, [GROWING, STEADY]):
        assert each["recomputed"] == [0, 0, 1, 0, 0]


def test_a_rank_whose_blocks_exchange_nothing_decides_alone(two_ranks: RankPool) -> None:
    for changes in (REPLICAS, {"zero.stage": 3}):
        for each in choices(two_ranks, {**changes, **ROOM}, [GROWING, STEADY]):
            assert each["recomputed"] == [0] * 5
            assert not any("a larger batch came" in effect for effect in each["effects"])


@pytest.mark.parametrize("mode", ["budget", "auto"])
def test_two_measurements_are_refused_where_blocks_exchange(two_ranks: RankPool, mode: str) -> None:
    wanted = {**ROOM, **AUTO, "checkpointing.mode": mode}
    if mode == "auto":
        del wanted["checkpointing.budget_bytes"]
    for said in two_ranks.run("meeting_cases:refused", {**EXPERT, **wanted}):
        assert (
            f'accumulation.micro_batch = "auto" and checkpointing.mode = "{mode}" cannot be combined' in said
        )
        assert "under parallel.expert" in said
        assert "\n" not in said
    assert two_ranks.run("meeting_cases:refused", wanted) == ["not refused"] * 2
