"""Compressed gradients on real ranks: bits of replicas, bytes sent, what is fed back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from compression_cases import CODES
from rank_pool import RankPool

from trine.optim.config import Config
from trine.optim.runtime.exchange.break_even import Estimate, predicted_gain_s
from trine.optim.runtime.exchange.powersgd import matrix_shape
from trine.optim.runtime.links import Link
from trine.record.errors import UsageError


@pytest.fixture(params=["two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> tuple[RankPool, int]:
    return request.getfixturevalue(request.param), {"two_ranks": 2, "four_ranks": 4}[request.param]


# --- replicas --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replicas_end_in_the_same_bits_with_one_bucket_and_with_many(pool: tuple[RankPool, int]) -> None:
    ranks, count = pool
    answers = ranks.run("compression_cases:trained_by_each", count, 4)
    for case, (losses, _) in answers[0].items():
        assert len({answer[case][1] for answer in answers}) == 1, case
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0], case


def test_warm_up_is_uncompressed_and_ends(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("compression_cases:warm_up", 2):
        plain, warm = answer["plain"], answer["warm"]
        assert warm[:4] == plain[:4]  # the loss of step 4 is still that of three plain updates
        assert warm[4:] != plain[4:]
        assert answer["at once"][1] != plain[1]


def test_linear_codes_go_by_the_chosen_algorithm(two_ranks: RankPool) -> None:
    answers = two_ranks.run("compression_cases:algorithms", 2)
    for (losses, _, sent), (ring_losses, _, ring_sent) in (
        (answer["backend"], answer["ring"]) for answer in answers
    ):
        assert ring_losses == losses  # two terms have one order of summation
        assert ring_sent == pytest.approx(sent, rel=0.01)
    assert answers[0]["ring"][1] == answers[1]["ring"][1]


# --- bytes -----------------------------------------------------------------------------------------


def theory(name: str, shapes: list[tuple[int, ...]], ranks: int) -> float:
    """How many times fewer bytes than an fp32 all-reduce, by each code's own arithmetic."""
    total = sum(math.prod(shape) for shape in shapes)
    if name == "powersgd":
        rank, sent = 4, 0
        for shape in shapes:
            matrix = matrix_shape(shape, rank)
            sent += math.prod(shape) if matrix is None else rank * sum(matrix)
        return total / sent
    if name == "terngrad":  # two bits to whoever sums, log₂(2n+1) of them, as four, to everyone
        return 32 / ((2 + 4) / 2)
    bits = {"bf16": 16, "fp16": 16, "int8": 8, "qsgd": 8, "onebit": 1, "qsgd 1": 2, "qsgd 7": 4}[name]
    return 32 / bits


@pytest.mark.slow
def test_ratios_are_within_five_per_cent_of_theory(pool: tuple[RankPool, int]) -> None:
    ranks, count = pool
    for answer in ranks.run("compression_cases:ratios", count):
        assert {*CODES} < answer.keys()
        for name, (heard, size, shapes) in answer.items():
            expected = theory(name, shapes, count)
            assert heard["communication/compression_ratio"] == pytest.approx(expected, rel=0.05), name
            plain = 2 * (count - 1) / count * size
            assert heard["communication/sent_bytes"] == pytest.approx(plain / expected, rel=0.05), name


def test_micro_batches_are_exchanged_once(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("compression_cases:synchronised_once", 2):
        assert answer["4"] == answer["1"] > 0


# --- exact properties --------------------------------------------------------------------------------


def test_sent_and_kept_are_the_gradients_though_buckets_change(pool: tuple[RankPool, int]) -> None:
    ranks, count = pool
    for answer in ranks.run("compression_cases:telescoping", count):
        for name, relative in answer.items():
            assert relative < 1e-12, name


@pytest.mark.slow
def test_both_phases_are_right_on_average(pool: tuple[RankPool, int]) -> None:
    ranks, count = pool
    answers = ranks.run("compression_cases:averages", count, 300)
    for name in ("qsgd", "terngrad"):
        assert len({answer[name][1] for answer in answers}) == 1  # the same bits on every rank
        assert answers[0][name][0] < 6.5, name


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_no_residual(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("compression_cases:poisoned", 2):
        for code, found in answer.items():
            assert not found["finite"], code
            assert found["residuals_same"], code
            assert (found["residuals"] > 0) == (code in ("int8", "powersgd", "onebit"))
            assert found["unchanged"], code  # the step was left out
            assert all(math.isfinite(loss) for loss in found["healthy"])
            assert found["moved"], code


def test_residuals_follow_the_loss_scale_and_skipped_steps_leave_them(two_ranks: RankPool) -> None:
    answers = two_ranks.run("compression_cases:overflowing", 2)
    for answer in answers:
        assert answer["skipped"] == 1
        assert answer["factor"] == 0.5
        assert answer["followed"]
        assert all(math.isfinite(loss) for loss in answer["losses"])
    assert answers[0]["prints"] == answers[1]["prints"]


def test_state_comes_back_from_a_checkpoint(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("compression_cases:resumed", 2):
        assert all(answer.values()), answer


# --- sharded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"zero.stage": 3},
        {"zero.stage": 2},
        {"zero.stage": 3, "accumulation.steps": 2},
        {"zero.stage": 3, "parallel.shard": 2},
    ],
    ids=str,
)
@pytest.mark.slow
def test_our_exchange_of_shards_scales_as_fsdp2_does(changes: dict[str, Any], four_ranks: RankPool) -> None:
    for own, ours in four_ranks.run("compression_cases:sharded_exactly", 4, changes):
        assert ours == pytest.approx(own, rel=1e-12)


# --- PowerSGD: PyTorch's and ours ----------------------------------------------------------------------


@pytest.mark.slow
def test_power_sgd_survives_many_buckets_where_torch_fails(two_ranks: RankPool) -> None:
    assert all(
        answer.startswith("AssertionError")
        for answer in two_ranks.run("compression_cases:batched_power_sgd_of_torch", 2)
    )
    answers = two_ranks.run("compression_cases:many_buckets_of_power_sgd", 2)
    assert answers[0]["prints"] == answers[1]["prints"]
    assert len(set(answers[0]["prints"])) == 1  # three runs, the same bits
    assert answers[0]["buckets"] >= 10


# --- what is refused -----------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_changes(two_ranks: RankPool) -> None:
    for said in two_ranks.run("compression_cases:refusals", 2):
        for case, words in {
            "powersgd sharded": ("communication.compression", "zero.stage"),
            "levels": ("communication.compression_levels", "127"),
            "warm-up alone": ("communication.compression_warmup_steps", "communication.compression"),
            "weights": ("zero.quantized_weights", "zero.stage"),
            "algorithm": ("communication.compression", "communication.algorithm"),
            "own hook": ("communication.compression", "hook of its own"),
            "sparse": ("communication.compression", "sparse"),
        }.items():
            assert all(word in said[case] for word in words), said[case]
            assert "\n" not in said[case]


@pytest.mark.parametrize(
    ("key", "value"), [("communication.compression_levels", 7), ("communication.compression_rank", 2)]
)
def test_strengths_belong_to_their_code(key: str, value: int) -> None:
    with pytest.raises(UsageError, match=key):
        Config().with_changes({"communication.compression": "int8", key: value})


def test_one_process_has_nothing_to_compress() -> None:
    from compression_cases import engine_of

    with pytest.raises(UsageError, match="compression is about several ranks"):
        engine_of({"communication.compression": "int8"})


# --- whether it pays -------------------------------------------------------------------------------------


def test_it_pays_on_a_slow_link_and_not_on_a_fast_one() -> None:
    slow = Link(50e-6, 1e9, "gloo", 8, "made up")
    fast = Link(10e-6, 300e9, "nccl", 8, "made up")
    # 400 MB at 1 GB/s is 400 ms; a quarter of the bytes saves 300 ms, less 16 latencies of 50 µs, less 9 ms to encode.
    assert predicted_gain_s(400e6, 4, slow, 9e-3, 16) == pytest.approx(0.3 - 16 * 50e-6 - 9e-3)
    assert predicted_gain_s(400e6, 4, fast, 9e-3, 16) < 0


def test_the_note_says_whether_it_pays() -> None:
    assert "31 ms of transfer and costs 9 ms to encode at 1.2 GB/s, where" in str(
        Estimate("int8", 3.94, 31e-3, 9e-3, 1.2e9)
    )
    assert "does NOT pay" in str(Estimate("int8", 3.94, 3e-3, 9e-3, 1.2e9))
    assert "further latencies" in str(Estimate("int8", 3.94, -1e-3, 9e-3, 1.2e9))


def test_the_effect_carries_the_measured_note(two_ranks: RankPool) -> None:
    for effects in two_ranks.run("compression_cases:effect_notes", 2):
        (said,) = [effect for effect in effects if effect.startswith("communication.compression")]
        assert "none → int8" in said
        assert "to encode" in said
