"""The thread that exchanges gradients: its order, its failures, and that it changes no bit by itself."""

from __future__ import annotations

from datetime import timedelta

import exchange_thread_cases
import pytest
from optim_cases import on_ranks
from rank_pool import RankPool


def test_work_runs_in_the_order_submitted_and_off_the_training_thread(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("exchange_thread_cases:order_and_close"):
        assert answer["seen"] == [(position, False) for position in range(20)]
        assert answer["sums"] == [2.0 * position for position in range(20)]
        assert "closed" in answer["refused"]
        assert not answer["alive"]


def test_a_hook_around_the_plain_all_reduce_changes_no_bit(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("exchange_thread_cases:hook_against_plain", 2):
        for name, (expected, found) in answer.items():
            assert found == expected, name


def test_a_failed_reduction_is_one_line_at_the_step_and_final(two_ranks: RankPool) -> None:
    for rank, answer in enumerate(two_ranks.run("exchange_thread_cases:failing_on_all", 2)):
        assert len(answer["losses"]) == 2  # healthy before
        assert answer["said"].startswith(f"ExchangeFailed: averaging gradients failed on rank {rank}: ")
        assert "the codec broke" in answer["said"]
        assert "\n" not in answer["said"]
        assert answer["again"] == "ExchangeFailed"
        assert answer["closing_s"] < 3


@pytest.mark.slow
def test_a_rank_that_fails_alone_does_not_leave_the_others_hanging() -> None:
    answers = on_ranks(2, exchange_thread_cases.failing_on_one, timeout=90)
    for rank, answer in enumerate(answers):
        assert len(answer["healthy"]) == 2
        assert answer["said"].startswith(f"ExchangeFailed: averaging gradients failed on rank {rank}: ")
        assert answer["waited_s"] < 40
        assert answer["stated"] == timedelta(seconds=60)  # what the program gave its own group
        assert answer["finite"]  # nothing of the broken step reached the parameters
    assert "the codec broke" in answers[0]["said"]
    assert "another rank failed or left" in answers[1]["said"]
