"""Activations under pipelines and tensor parallelism: let go as the schedule allows, recomputed once, the same bits."""

from __future__ import annotations

from tempfile import gettempdir
from typing import Any

import pytest
from rank_pool import RankPool

FULL = {"checkpointing.mode": "full"}
DISK = {"offload.activations": "nvme", "offload.path": gettempdir()}


def run(pool: RankPool, changes: dict[str, Any], **options: Any) -> list[Any]:
    return pool.run("pipeline_activation_cases:run", changes, options)


def pipeline(schedule: str) -> dict[str, Any]:
    return {"parallel.pipeline": 2, "parallel.microbatches": 4, "parallel.schedule": schedule}


@pytest.mark.parametrize(("schedule", "live"), [("1f1b", [2, 1]), ("gpipe", [4, 4])])
def test_as_many_microbatches_live_as_the_schedule_has_in_flight(
    schedule: str, live: list[int], two_ranks: RankPool
) -> None:
    found = run(two_ranks, pipeline(schedule), layers=4)
    for rank, answer in enumerate(found):
        # A rank's peak in micro-batches; the last stage's own loss makes its share of one larger, never its number.
        assert answer["live"] == live[rank]
        assert answer["held"] == 0  # nothing is left between steps


@pytest.mark.parametrize(
    "changes",
    [FULL, {"checkpointing.mode": "selective"}, {"offload.activations": "cpu"}],
    ids=str,
)
def test_the_same_bits_as_without(changes: dict[str, Any], two_ranks: RankPool) -> None:
    plain = run(two_ranks, pipeline("1f1b"), dropout=0.1)
    kept = run(two_ranks, pipeline("1f1b") | changes, dropout=0.1)
    for a, b in zip(plain, kept, strict=True):
        assert (a["losses"], a["sums"]) == (b["losses"], b["sums"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize("changes", [FULL, {"checkpointing.mode": "selective"}, FULL | DISK], ids=str)
def test_the_same_bits_under_every_schedule(
    schedule: str, changes: dict[str, Any], two_ranks: RankPool
) -> None:
    plain = run(two_ranks, pipeline(schedule), dropout=0.1)
    kept = run(two_ranks, pipeline(schedule) | changes, dropout=0.1)
    for a, b in zip(plain, kept, strict=True):
        assert (a["losses"], a["sums"]) == (b["losses"], b["sums"])


def test_split_backwards_recompute_once(two_ranks: RankPool) -> None:
    """PyTorch by itself runs a block again for each group of its parameters."""
    plain, full, naive = (
        run(two_ranks, pipeline("zbv") | changes, **options)
        for changes, options in (({}, {}), (FULL, {}), (FULL, {"naive": True}))
    )
    for rank in range(2):
        forwards = plain[rank]["calls"]
        assert full[rank]["calls"] == 2 * forwards
        assert naive[rank]["calls"] > 4 * forwards


@pytest.mark.parametrize("sequence", [False, True])
def test_parts_of_tensors_are_stored(sequence: bool, two_ranks: RankPool) -> None:
    tensor: dict[str, Any] = {"parallel.tensor": 2, "parallel.sequence": sequence}
    plain = run(two_ranks, tensor)
    moved = run(two_ranks, tensor | {"offload.activations": "cpu"})
    full = run(two_ranks, tensor | FULL)
    for a, b, c in zip(plain, moved, full, strict=True):
        assert (a["losses"], a["sums"]) == (b["losses"], b["sums"]) == (c["losses"], c["sums"])
        assert (
            b["metrics"]["memory/saved_activation_bytes"]
            < 0.1 * b["metrics"]["memory/unstored_activation_bytes"]
        )
        assert (
            c["metrics"]["memory/saved_activation_bytes"]
            < 0.5 * a["metrics"]["memory/saved_activation_bytes"]
        )


def test_budgets_are_refused_by_both_names(two_ranks: RankPool) -> None:
    for line in two_ranks.run("optim_cases:refused", 2, pipeline("1f1b") | {"checkpointing.mode": "auto"}):
        assert "checkpointing.mode" in line and "parallel.pipeline" in line and "\n" not in line
