"""Each cause of idle time by itself, then the order in which they apply."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from analysis_tables import collective_table, rank_of
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.breakdown import break_down
from trine.analyzers.idle import is_receive
from trine.analyzers.results import IdleCauses
from trine.analyzers.selection import parse_selection
from trine.record.model import DEVICE_KINDS, Strings


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


# --- against the slow, exact way: every nanosecond by itself -----------------------------------

spans = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.integers(1, 8),
        st.sampled_from(DEVICE_KINDS),
        st.one_of(st.none(), st.tuples(st.integers(-10, 50), st.integers(1, 2))),  # launch: time, thread
        st.booleans(),  # a pipeline receive
    ),
    min_size=1,
    max_size=10,
)
doings = st.lists(
    st.tuples(
        st.integers(-10, 50),
        st.integers(1, 15),
        st.sampled_from(["loader", "sync", "python", "operator"]),
        st.integers(1, 2),
    ),
    max_size=8,
)


def slowly(work, host) -> tuple[dict[str, int], dict[str, int]]:
    """Partition and causes, nanosecond by nanosecond."""
    busy = {kind: {t for s, n, k, *_ in work if k == kind for t in range(s, s + n)} for kind in DEVICE_KINDS}
    any_work = set().union(*busy.values())
    parts, causes = Counter(), Counter()
    for t in range(min(any_work), max(any_work) + 1):
        if t in busy["compute"]:
            parts["compute"] += 1
        elif t in busy["communication"]:
            parts["communication"] += 1
        elif t in busy["copy"]:
            parts["copy"] += 1
        else:
            parts["idle"] += 1
            end = min(s for s, *_ in work if s > t)
            ending = [event for event in work if event[0] == end]
            launch = min((event[3] for event in ending if event[3] is not None), default=None)
            if any(event[4] for event in ending):
                causes["bubble"] += 1
            elif launch is None:
                causes["other"] += 1
            elif t >= launch[0]:
                causes["dependency"] += 1
            else:
                on = {kind for s, n, kind, thread in host if thread == launch[1] and s <= t < s + n}
                causes["data" if "loader" in on else "sync" if "sync" in on else "host"] += 1
    return parts, causes


@given(spans, doings)
def test_every_nanosecond_has_the_cause_that_the_definition_gives_it(work, host) -> None:
    rows = [(s, s + n, kind, "h", thread) for s, n, kind, thread in host]
    device, receives = [], []
    for index, (start, length, kind, launch, receive) in enumerate(work):
        device.append((start, start + length, kind, -1 if launch is None else len(rows)))
        if launch is not None:
            rows.append((launch[0], launch[0] + 1, "runtime", "cudaLaunchKernel", launch[1]))
        if receive:
            receives.append({"operation": "recv", "device_row": index})
    rank = rank_of(device=device, host=rows)
    rank.collectives = collective_table(Strings(), receives) if receives else None
    breakdown, _ = break_down(rank, parse_selection("all"))
    assert breakdown is not None
    parts, causes = slowly(work, host)
    assert (
        breakdown.compute_ns,
        breakdown.exposed_communication_ns,
        breakdown.exposed_copy_ns,
        breakdown.idle_ns,
    ) == (parts["compute"], parts["communication"], parts["copy"], parts["idle"])
    assert {name: value for name, value in asdict(breakdown.idle).items() if value} == dict(causes)
