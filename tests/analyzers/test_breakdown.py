from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from analysis_tables import collective_table, rank_of
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.breakdown import break_down, top_level_operators
from trine.analyzers.results import Breakdown
from trine.analyzers.selection import parse_selection
from trine.record.model import DEVICE_KINDS, MISSING, Rank, Strings

ALL, COMPLETE = parse_selection("all"), parse_selection("complete")


def broken_down(rank: Rank, selection=ALL) -> Breakdown:
    breakdown, reason = break_down(rank, selection)
    assert breakdown is not None, reason
    return breakdown


def parts(b: Breakdown) -> tuple[int, int, int, int]:
    return b.compute_ns, b.exposed_communication_ns, b.exposed_copy_ns, b.idle_ns


def causes(b: Breakdown) -> list[int]:
    return [b.idle.data, b.idle.host, b.idle.sync, b.idle.dependency, b.idle.bubble, b.idle.other]


def test_a_partition_by_hand() -> None:
    b = broken_down(
        rank_of(
            device=[
                (0, 10, "compute"),
                (5, 20, "communication"),  # 10 exposed
                (18, 30, "copy"),  # 10 exposed
                (40, 50, "compute"),
            ]
        )
    )
    assert b.window_ns == 50
    assert parts(b) == (20, 10, 10, 10)
    assert (b.busy.any, b.busy.compute, b.busy.communication, b.busy.copy) == (40, 20, 15, 12)
    assert (b.overlap_ns, b.overlap_efficiency, b.events, b.basis) == (5, 5 / 15, 4, "device")


def test_without_communication_there_is_no_overlap_efficiency() -> None:
    assert broken_down(rank_of(device=[(0, 10, "compute")])).overlap_efficiency is None


def test_events_of_no_length_are_ignored() -> None:
    b = broken_down(
        rank_of(device=[(0, 0, "compute"), (10, 20, "compute"), (99, 99, "copy"), (9, 5, "copy")])
    )
    assert (b.window_ns, b.events) == (10, 1)


def test_a_device_event_belongs_to_the_step_that_launched_it() -> None:
    steps = [(1, 0, 10), (2, 10, 20), (3, 20, 30)]
    device = [
        (100, 110, "compute", -1, 1),
        (120, 130, "compute", -1, 2),
        (140, 150, "compute", -1, 3),
        (400, 500, "compute", -1, MISSING),
    ]
    rank = rank_of(device=device, steps=steps)
    assert broken_down(rank, COMPLETE).window_ns == 30
    assert broken_down(rank, parse_selection("2:4")).window_ns == 30
    assert broken_down(rank, ALL).window_ns == 400
    assert broken_down(rank, COMPLETE).steps == (1, 2)


def test_steps_without_device_work_say_so() -> None:
    rank = rank_of(device=[(0, 5, "compute", -1, 1)], steps=[(1, 0, 10), (2, 10, 20), (3, 20, 30)])
    breakdown, reason = break_down(rank, parse_selection("2:3"))
    assert breakdown is None and reason is not None and "no device work" in reason


events = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 12),
        st.sampled_from(DEVICE_KINDS),
        st.integers(0, 3),  # stream
        st.one_of(st.none(), st.integers(-20, 60)),  # launch
        st.sampled_from(["runtime", "loader", "sync", "python"]),
    ),
    min_size=1,
    max_size=20,
)


def rank_from(rows) -> Rank:
    """Every event has a host row of its own; some have a launch record, in four threads."""
    device, host = [], []
    for start, length, kind, stream, launch, host_kind in rows:
        at = launch if launch is not None else 0
        device.append((start, start + length, kind, -1 if launch is None else len(host), 0, "k", stream))
        host.append((at, at + 3, host_kind, "h", stream))
    return rank_of(device=device, host=host)


@given(events)
def test_any_events_on_any_streams_partition_the_window(rows) -> None:
    breakdown, reason = break_down(rank_from(rows), ALL)
    kept = [(start, start + length) for start, length, *_ in rows if length]
    if not kept:
        assert breakdown is None and reason is not None
        return
    assert breakdown is not None
    assert breakdown.window_ns == max(end for _, end in kept) - min(start for start, _ in kept)
    assert sum(parts(breakdown)) == breakdown.window_ns
    assert sum(causes(breakdown)) == breakdown.idle_ns
    assert min(*parts(breakdown), *causes(breakdown), breakdown.overlap_ns) >= 0
    assert breakdown.busy.any + breakdown.idle_ns == breakdown.window_ns
    assert breakdown.overlap_ns + breakdown.exposed_communication_ns == breakdown.busy.communication


@given(events, st.randoms(use_true_random=False))
def test_permuting_rows_or_streams_changes_nothing(rows, random) -> None:
    before = break_down(rank_from(rows), ALL)[0]
    shuffled = list(rows)
    random.shuffle(shuffled)
    renamed = [(a, b, kind, stream, launch, host) for a, b, kind, stream, launch, host in shuffled]
    rank = rank_from(renamed)
    assert rank.device is not None
    rank.device.columns["stream"] = 7 - rank.device["stream"]
    assert break_down(rank, ALL)[0] == before


@given(events, st.integers(-(10**18), 10**18))
def test_moving_all_times_changes_nothing(rows, shift: int) -> None:
    rank = rank_from(rows)
    before = break_down(rank, ALL)[0]
    for table in (rank.device, rank.host):
        assert table is not None
        for column in ("start_ns", "end_ns"):
            table.columns[column] = table[column] + shift
    assert break_down(rank, ALL)[0] == before


# --- without a device --------------------------------------------------------------------------


def host_rank(**changes) -> Rank:
    strings = Strings()
    rank = rank_of(
        host=[
            (0, 40, "operator", "aten::linear", 1),
            (5, 30, "operator", "aten::addmm", 1, 0),  # inside linear
            (30, 60, "operator", "aten::mul", 2),  # another thread
            (60, 90, "operator", "c10d::allreduce_", 1),
            (62, 80, "operator", "aten::copy_", 1),  # inside the collective: not work of its own
            (95, 99, "loader", "enumerate(DataLoader)", 1),
        ],
        steps=[(1, 0, 100)],
    )
    rank.collectives = collective_table(strings, [{"operation": "all_reduce", "start_ns": 50, "end_ns": 85}])
    return replace(rank, **changes)


def test_without_a_device_operators_are_compute_and_collectives_communication() -> None:
    b = broken_down(host_rank())
    assert (b.basis, b.window_ns) == ("host", 100)
    assert parts(b) == (60, 25, 0, 15)
    assert b.busy.communication == 35 and b.overlap_ns == 10
    assert causes(b) == [4, 11, 0, 0, 0, 0]


def test_the_window_without_a_device_is_the_span_of_the_selected_steps() -> None:
    steps = [(1, 0, 50), (2, 50, 80), (3, 80, 100)]
    rank = rank_of(host=[(0, 200, "operator")], steps=steps)
    assert broken_down(rank, COMPLETE).window_ns == 80
    assert broken_down(rank, parse_selection("2:3")).window_ns == 30
    assert broken_down(rank, ALL).window_ns == 200  # every event


def test_top_level_operators_are_found_thread_by_thread() -> None:
    host = host_rank().host
    found = top_level_operators(host)
    assert list(zip(found.start.tolist(), found.end.tolist(), strict=True)) == [(0, 40), (30, 60)]


def test_a_trace_without_any_work_has_no_breakdown_and_says_why() -> None:
    for rank in (rank_of(), rank_of(host=[(0, 5, "python")]), rank_of(device=[], host=[])):
        breakdown, reason = break_down(rank, ALL)
        assert breakdown is None and reason


# --- native records ----------------------------------------------------------------------------


def native(*windows: Rank) -> Rank:
    steps = [(index, index * 100, index * 100 + 100) for index in range(20)]
    return rank_of(steps=steps, format="trine", windows=windows)


def window(first: int, last: int) -> Rank:
    """A deep window over record steps [first, last); its profiler numbers them from 0."""
    steps = [(index - first, index * 100 + 5, index * 100 + 95) for index in range(first, last)]
    device = [
        (index * 100 + 20, index * 100 + 70, "compute", -1, index - first) for index in range(first, last)
    ]
    return rank_of(device=device, steps=steps)


def test_a_native_record_sums_its_deep_windows() -> None:
    b = broken_down(native(window(2, 4), window(10, 12)), COMPLETE)
    assert (b.window_ns, b.compute_ns, b.idle_ns) == (300, 200, 100)
    assert sum(causes(b)) == 100


def test_a_range_picks_the_windows_steps_by_time() -> None:
    b = broken_down(native(window(2, 4), window(10, 12)), parse_selection("3:11"))
    assert (b.window_ns, b.compute_ns) == (100, 100)


def test_a_native_record_without_windows_says_why() -> None:
    breakdown, reason = break_down(native(), COMPLETE)
    assert breakdown is None and reason is not None and "deep window" in reason
    breakdown, reason = break_down(native(window(2, 4)), parse_selection("15:18"))
    assert breakdown is None and reason is not None and "deep window" in reason


def test_breakdowns_of_no_rows_do_not_warn() -> None:
    rank = rank_of(device=[(0, 10, "compute")], host=[], collectives=[])
    assert broken_down(rank).idle.other == 0
    assert np.array_equal(rank.device["launch"], [-1]) if rank.device is not None else False


@pytest.mark.parametrize("text", ["all", "complete"])
def test_a_native_records_selection_without_windows_steps(text: str) -> None:
    inner = rank_of(device=[(0, 10, "compute")])
    b = broken_down(native(inner), parse_selection(text))
    assert b.window_ns == 10
