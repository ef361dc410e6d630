"""Ranks with more threads than cores are told, and no others."""

from __future__ import annotations

from typing import Any

from analysis_builders import rank_result, steps_table

from trine.analyzers.results import RankSummary
from trine.analyzers.shared_cores import about_shared_cores


def rank(
    number: int, cores: str | None = "0-1", *, threads: int | None = 1, host: str = "a", type: str = "cpu"
) -> RankSummary:
    device: dict[str, Any] = {"type": type, "cores": cores, "threads": threads}
    return rank_result(number, steps=steps_table(), metadata={"device": device}, host_name=host).summary


def said(*ranks: RankSummary) -> list[str]:
    notes = about_shared_cores(ranks)
    assert all((note.id, note.severity) == ("shared-cores", "warning") for note in notes)
    return [note.message for note in notes]


END = "so they take turns and their times hold waiting for a core"


def test_more_ranks_than_cores_take_turns() -> None:
    assert said(*map(rank, range(4))) == [f"4 ranks with 1 thread each share 2 cores of a, {END}"]


def test_threads_count_not_ranks() -> None:
    assert said(rank(0, threads=2), rank(1, threads=2)) == [
        f"2 ranks with 2 threads each share 2 cores of a, {END}"
    ]
    assert said(rank(0, threads=1), rank(1, threads=2)) == [
        f"2 ranks with 3 threads share 2 cores of a, {END}"
    ]


def test_a_core_for_each_thread_is_enough() -> None:
    assert said(rank(0), rank(1)) == []
    assert said(rank(0, threads=8)) == []  # one rank's own threads are nobody else's turn


def test_ranks_bound_to_cores_of_their_own_share_none() -> None:
    assert said(rank(0, "0"), rank(1, "1"), rank(2, "2"), rank(3, "3")) == []
    assert said(rank(0, "0"), rank(1, "0"), rank(2, "2"), rank(3, "3")) == [
        f"2 ranks with 1 thread each share 1 core of a, {END}"
    ]


def test_each_host_counts_its_own() -> None:
    spread = [rank(number, host="a" if number < 2 else "b") for number in range(4)]
    assert said(*spread) == []
    assert len(said(*spread, rank(4, host="b"))) == 1


def test_what_is_not_known_is_not_said() -> None:
    assert said(*(rank(number, None) for number in range(4))) == []
    assert said(*(rank(number, threads=None) for number in range(4))) == []
    assert said(*(rank(number, type="cuda") for number in range(4))) == []
    assert said(*(rank(number, "damaged") for number in range(4))) == []
