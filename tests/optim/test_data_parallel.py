"""DDP's options: buckets predicted and measured, no overlap, wrappers that are adopted or made anew."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import optim_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trine
from trine.optim.runtime.buckets import LEAST_CAP_BYTES, Gradient, best_cap, predict
from trine.optim.techniques import refusals

pytest.importorskip("torch")

MIB = 2**20


# --- prediction --------------------------------------------------------------------------------


def layers(count: int, size_bytes: int, apart_s: float) -> list[Gradient]:
    return [Gradient(n * apart_s, size_bytes) for n in range(count)]


def test_one_bucket_is_exposed_whole_and_small_ones_but_the_last() -> None:
    """Ten gradients of 1 MB, 10 ms apart, at 1 GB/s and no latency: 10 ms exposed in one bucket, 1 ms in ten."""
    gradients = layers(10, 10**6, 10e-3)
    one = predict(gradients, 10**8, lambda size: size / 1e9)
    assert (one.buckets, one.exposed_s) == (1, pytest.approx(10e-3))
    ten = predict(gradients, 10**6, lambda size: size / 1e9)
    assert (ten.buckets, ten.exposed_s) == (10, pytest.approx(1e-3))
    best = best_cap(gradients, lambda size: size / 1e9)
    assert best.exposed_s == pytest.approx(1e-3)


def test_a_bucket_waits_for_the_one_before() -> None:
    gradients = layers(4, 100, 1e-3)
    queued = predict(gradients, 100, lambda size: 5e-3)  # each longer than the gap between gradients
    assert queued.exposed_s == pytest.approx(4 * 5e-3 - 3e-3)


def test_latency_asks_for_few_buckets_and_bandwidth_for_many() -> None:
    gradients = layers(64, 2**19, 1e-3)
    dear = best_cap(gradients, lambda size: 1.0 + size / 1e12)
    assert dear.buckets == 1
    cheap = best_cap(gradients, lambda size: 1e-7 + size / 1e9)
    assert cheap.buckets > 16


def test_the_first_bucket_may_have_a_size_of_its_own() -> None:
    gradients = layers(8, 100, 1e-3)
    assert predict(gradients, 400, lambda size: 0.0).buckets == 2
    assert predict(gradients, 400, lambda size: 0.0, first_cap_bytes=100).buckets == 3


@given(
    sizes=st.lists(st.integers(1, 50 * MIB), min_size=1, max_size=60),
    gap=st.floats(0, 0.05),
    alpha=st.floats(1e-7, 0.1),
    beta=st.floats(1e6, 1e12),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_no_size_that_is_tried_beats_the_chosen_one(
    sizes: list[int], gap: float, alpha: float, beta: float, data: st.DataObject
) -> None:
    gradients = [Gradient(position * gap, size) for position, size in enumerate(sizes)]

    def seconds(size: float) -> float:
        return alpha + size / beta

    best = best_cap(gradients, seconds)
    assert best.exposed_s <= predict(gradients, sum(sizes), seconds).exposed_s * 1.02
    cap = max(sum(sizes), LEAST_CAP_BYTES) / 2 ** (data.draw(st.integers(0, 30)) / 2)
    if cap >= LEAST_CAP_BYTES:
        assert best.exposed_s <= predict(gradients, int(cap), seconds).exposed_s * 1.02 + 1e-12
    # Never below the last gradient's own transfer, and all bytes travel.
    assert best.exposed_s >= seconds(sizes[-1]) * (1 - 1e-9) or best.exposed_s >= alpha
    assert best.buckets <= len(sizes)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=40), st.integers(1, 10**7))
def test_buckets_are_filled_as_ddp_fills_them(sizes: list[int], cap: int) -> None:
    """A bucket closes with the gradient that brings it to its cap: counted by the calls, their sizes by the sum."""
    calls: list[float] = []

    def seconds(size: float) -> float:
        calls.append(size)
        return 0.0

    gradients = [Gradient(float(position), size) for position, size in enumerate(sizes)]
    assert predict(gradients, cap, seconds).buckets == len(calls)
    assert sum(calls) == sum(sizes)
    assert all(size >= cap for size in calls[:-1])
    for size, following in pairwise([0, *calls]):
        assert following > 0 or size == 0


# --- two ranks ---------------------------------------------------------------------------------


def gradient_bytes() -> int:
    return sum(p.numel() * 4 for p in optim_cases.small_gpt().parameters())


def test_predicted_buckets_are_those_that_ddp_makes(two_ranks: Any) -> None:
    """DDP's own bucket sizes for a cap, against the walk over its gradients in order of readiness."""
    for buckets, _, _, ordered in two_ranks.run(
        "replica_cases:buckets_after_steps", 2, {"communication.bucket_mib": 0.02}
    ):
        walked: list[float] = []

        def seconds(size: float, walked: list[float] = walked) -> float:
            walked.append(size)
            return 0.0

        gradients = [Gradient(float(position), size) for position, size in enumerate(ordered)]
        predict(gradients, int(0.02 * MIB), seconds)
        assert walked == buckets
        assert len(buckets) > 2
        assert sum(buckets) == gradient_bytes()


def test_without_overlap_all_gradients_leave_in_one_bucket(two_ranks: Any) -> None:
    for buckets, told, effects, _ in two_ranks.run(
        "replica_cases:buckets_after_steps", 2, {"communication.overlap": False}
    ):
        assert buckets == [gradient_bytes()]
        assert "communication.overlap: while backward goes on → after backward, in one bucket" in effects
        assert told["communication/exposed_ns"]


def test_ddp_says_how_much_it_hid(two_ranks: Any) -> None:
    for _, told, _, _ in two_ranks.run(
        "replica_cases:buckets_after_steps", 2, {"communication.bucket_mib": 0.02}
    ):
        assert all(0.0 <= value <= 1.0 for value in told["communication/overlap"])
        assert max(told["communication/overlap"]) > 0.0
        assert all(value >= 0 for value in told["communication/exposed_ns"])


def test_auto_takes_many_buckets_where_bandwidth_is_what_costs(two_ranks: Any) -> None:
    one, other = two_ranks.run("replica_cases:tuned", 2, 1e-9, 1e8, {})
    for found in (one, other):
        assert found["rewrapped"]
        assert len(found["after"]) > len(found["before"])
        assert sum(found["after"]) == gradient_bytes()
        assert found["hooks left"] == 0
        assert found["old wrapper works"]
        assert found["caps"][0] != found["caps"][-1]
        said = found["effects"][-1]
        assert said.startswith("communication.bucket_mib: ")
        for word in ("would leave", "exposed", "gradients ready over", "α 0 µs, β 0.10 GB/s"):
            assert word in said
    assert one["checksum"] == other["checksum"]
    assert one["effects"] == other["effects"], "ranks decided by different numbers"
    assert one["after"] == other["after"]


def test_auto_keeps_what_it_has_where_latency_is_what_costs(two_ranks: Any) -> None:
    """The √ rule says one bucket already: nothing is wrapped anew, and it is said."""
    for found in two_ranks.run("replica_cases:tuned", 2, 0.5, 1e12, {}):
        assert not found["rewrapped"]
        assert found["after"] == [gradient_bytes()]
        assert "1 bucket would leave" in found["effects"][-1]
        assert found["hooks left"] == 0


def test_a_first_bucket_of_its_own_stays_through_auto(two_ranks: Any) -> None:
    for found in two_ranks.run(
        "replica_cases:tuned", 2, 1e-9, 1e8, {"communication.first_bucket_mib": 0.004}
    ):
        assert min(found["after"]) < 0.02 * MIB
        assert sum(found["after"]) == gradient_bytes()


@pytest.mark.parametrize(
    ("micro_batches", "extra"),
    [
        (1, {}),
        (3, {}),
        (3, {"communication.gradient_as_view": True}),
        (1, {"communication.algorithm": "ring"}),
    ],
)
def test_a_loop_of_ones_own_trains_on_through_the_decision(
    two_ranks: Any, micro_batches: int, extra: dict[str, Any]
) -> None:
    """Also one that keeps the first wrapper, and one whose steps end between micro-batches."""
    by_rank = two_ranks.run("replica_cases:own_loop_through_the_decision", 2, micro_batches, extra)
    for (losses, total, rewrapped), (plain, plain_total, untouched) in by_rank:
        assert rewrapped
        assert not untouched
        assert losses == pytest.approx(plain, rel=1e-12)
        assert total == pytest.approx(plain_total, rel=1e-10)
    assert by_rank[0][0][1] == by_rank[1][0][1], "the replicas differ"


def test_of_a_programs_own_wrapper_nothing_is_lost(two_ranks: Any) -> None:
    for rank, found in enumerate(
        two_ranks.run("replica_cases:adopted", 2, {"communication.gradient_as_view": True})
    ):
        assert found == {
            "anew": True,
            "cap": 7 * MIB,
            "group": True,
            "buffers": False,
            "mine": float(rank),
            "hook calls": 1,
            "view": True,
        }


def test_wrappers_that_would_lose_something_are_refused(two_ranks: Any) -> None:
    for said in two_ranks.run("replica_cases:refused_wrappers", 2):
        for key, line in zip(
            ("communication.gradient_as_view", "communication.bucket_mib", "communication.algorithm"),
            said,
            strict=False,
        ):
            assert key in line
            assert "FP16_COMPRESS" in line
        assert said[-1] == "adopted"


@pytest.mark.parametrize("key", ["communication.bucket_mib", "communication.first_bucket_mib"])
def test_no_overlap_and_buckets_contradict_each_other(two_ranks: Any, key: str) -> None:
    for said in two_ranks.run("optim_cases:refused", 2, {"communication.overlap": False, key: 1.0}):
        assert "communication.overlap = false" in said
        assert key in said


@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_buckets_too_small_for_what_is_compiled_are_refused(two_ranks: Any, compiled: str) -> None:
    changes = {"communication.bucket_mib": 0.5, "compute.compile": compiled}
    for said in two_ranks.run("optim_cases:refused", 2, changes):
        assert "communication.bucket_mib = 0.5 is too small for compute.compile" in said


def test_alone_there_is_nothing_to_overlap() -> None:
    assert "communication.overlap is about several ranks" in optim_cases.refused(
        0, 1, {"communication.overlap": True}
    )


# --- hints for NCCL ----------------------------------------------------------------------------


def test_hints_hold_for_the_communicator_alone(two_ranks: Any) -> None:
    hints = {"algo": ["Ring", "Tree"], "proto": "LL128", "min_channels": 4, "max_channels": 16}
    for seen, after in two_ranks.run("replica_cases:hinted", 2, hints):
        assert seen["backend"] == "nccl"
        assert seen["channels"] == (4, 16)
        assert seen["environment"] == {"NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "LL128"}
        assert after == {"NCCL_ALGO": None, "NCCL_PROTO": "Simple"}  # as the launcher had it


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"algorithm": "Ring"}, 'there is no hint algorithm (did you mean "algo"?)'),
        ({"buffer_bytes": 4}, "NCCL reads its other settings once"),
        ({"algo": "Rings"}, "algo = 'Rings' is none of Ring, Tree"),
        ({"proto": ["LL", "LL256"]}, "proto = 'LL256'"),
        ({"algo": []}, "algo names nothing"),
        ({"min_channels": 0}, "min_channels = 0 is no whole number from 1 to 64"),
        ({"max_channels": True}, "max_channels = True"),
        ({"min_channels": 8, "max_channels": 4}, "min_channels = 8 is above max_channels = 4"),
    ],
)
def test_hints_that_nccl_has_not_are_refused(hints: dict[str, Any], words: str) -> None:
    config = trine.Config().with_changes({"communication.nccl": hints})
    reason = refusals(config)["communication.nccl"]
    assert words in reason
    assert "\n" not in reason


def test_hints_that_nccl_has_are_not_refused_and_travel_through_toml(tmp_path: Any) -> None:
    hints = {"algo": "Tree", "proto": ["LL", "LL128"], "min_channels": 2, "cga_cluster_size": 4}
    config = trine.Config().with_changes({"communication.nccl": hints})
    assert "communication.nccl" not in refusals(config)
    path = tmp_path / "hints.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert trine.Config.from_toml(path).communication.nccl == hints
