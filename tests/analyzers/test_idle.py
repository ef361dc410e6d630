"""Each cause of idle time by itself, then the order in which they apply."""

from __future__ import annotations

from analysis_tables import collective_table, rank_of

from trine.analyzers.breakdown import break_down
from trine.analyzers.idle import is_receive
from trine.analyzers.results import IdleCauses
from trine.analyzers.selection import parse_selection
from trine.record.model import Strings


def idle_of(host, second_launch: int, receive: str | None = None) -> IdleCauses:
    """One gap, from 100 to 200, ended by an event launched from host row ``second_launch``."""
    rank = rank_of(device=[(0, 100, "compute", -1), (200, 300, "compute", second_launch)], host=host)
    if receive is not None:
        rank.collectives = collective_table(Strings(), [{"operation": receive, "device_row": 1}])
    breakdown, _ = break_down(rank, parse_selection("all"))
    assert breakdown is not None and breakdown.idle_ns == 100
    return breakdown.idle


LAUNCH = (170, 175, "runtime", "cudaLaunchKernel", 1)


def test_the_gap_splits_at_the_start_of_the_launching_call() -> None:
    assert idle_of([LAUNCH], 0) == IdleCauses(host=70, dependency=30)


def test_queued_before_the_gap_is_dependency_and_launched_after_it_is_host() -> None:
    assert idle_of([(20, 25, "runtime")], 0) == IdleCauses(dependency=100)
    assert idle_of([(250, 255, "runtime")], 0) == IdleCauses(host=100)


def test_time_in_the_loader_before_the_launch_is_data() -> None:
    assert idle_of([LAUNCH, (90, 150, "loader")], 0) == IdleCauses(data=50, host=20, dependency=30)


def test_time_in_a_blocking_call_before_the_launch_is_sync() -> None:
    assert idle_of([LAUNCH, (110, 140, "sync")], 0) == IdleCauses(sync=30, host=40, dependency=30)


def test_data_comes_before_sync() -> None:
    host = [LAUNCH, (110, 140, "sync"), (120, 190, "loader")]
    assert idle_of(host, 0) == IdleCauses(data=50, sync=10, host=10, dependency=30)


def test_only_the_launching_thread_counts() -> None:
    host = [LAUNCH, (90, 150, "loader", "other thread's", 2), (100, 160, "sync", "too", 3)]
    assert idle_of(host, 0) == IdleCauses(host=70, dependency=30)


def test_a_pipeline_receive_makes_the_whole_gap_bubble() -> None:
    host = [LAUNCH, (90, 150, "loader")]
    assert idle_of(host, 0, receive="recv") == IdleCauses(bubble=100)
    assert idle_of(host, 0, receive="send") == IdleCauses(data=50, host=20, dependency=30)
    assert idle_of(host, -1, receive="irecv") == IdleCauses(bubble=100)


def test_without_a_launch_record_nothing_can_be_said() -> None:
    assert idle_of([LAUNCH], -1) == IdleCauses(other=100)


def test_of_events_that_start_together_the_first_launched_ended_the_gap() -> None:
    host = [LAUNCH, (150, 155, "runtime")]
    for launches in ((0, 1), (1, 0), (-1, 1)):
        rank = rank_of(
            device=[
                (0, 100, "compute"),
                *((200, 300, "compute", launch, 0, "k", n) for n, launch in enumerate(launches)),
            ],
            host=host,
        )
        breakdown, _ = break_down(rank, parse_selection("all"))
        assert breakdown is not None and breakdown.idle == IdleCauses(host=50, dependency=50)


def test_receives_are_told_from_sends_and_exchanges() -> None:
    assert [
        name
        for name in ("recv", "irecv", "nccl:recv", "send", "send_recv", "all_to_all", None)
        if is_receive(name)
    ] == [
        "recv",
        "irecv",
        "nccl:recv",
    ]
