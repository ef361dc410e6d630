"""Whatever calls ranks lost at either end, and however their clocks run, the same calls meet and the same rank is late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from analysis_tables import calls_at, summary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.analyzers._drift import Trend, trend_of
from trine.analyzers.clocks import Clock, clock_offsets
from trine.analyzers.conclusion import conclude
from trine.analyzers.matching import match_collectives
from trine.analyzers.results import Analysis, RankSummary
from trine.analyzers.selection import parse_selection
from trine.record.model import Job

MS = 1_000_000
HOUR = 3600 * 10**9
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def program(count: int, seed: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Ends at irregular distances, operations and sizes of a random program."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(MS // 2, 3 * MS, count)) + 1_700_000_000 * 10**9
    operations = [OPERATIONS[code] for code in random.integers(0, len(OPERATIONS), count)]
    return ends, operations, random.integers(1, 5, count) << 20


def rank_of_program(
    rank: int,
    whole: tuple[np.ndarray, list[str], np.ndarray],
    kept: slice,
    clock: Trend,
    late_ns: int = 0,
    noise: np.random.Generator | None = None,
) -> RankSummary:
    ends, operations, sizes = whole
    # Ranks leave together, up to a few microseconds.
    jitter = noise.integers(-3000, 3000, len(ends)) if noise is not None else 0
    end = ends + jitter
    start = ends - 400_000 + late_ns
    shift = -clock.at(end)
    calls = [
        {**call, "operation": operations[row]}
        for row, call in enumerate(calls_at(start + shift, end + shift, bytes=sizes.tolist()))
    ]
    return summary_of(rank, calls[kept])


@given(
    st.integers(12, 60),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=5),
    st.integers(-48, 48),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_calls_lost_at_either_end_of_any_rank_leave_the_others_matched(
    count: int, losses: list[tuple[int, int]], hours: int, seed: int
) -> None:
    whole = program(count, seed)
    noise = np.random.default_rng(seed)
    summaries, held = [], []
    for rank, (first, last) in enumerate(losses):
        kept = slice(first, count - last)
        held.append(range(count)[kept])
        clock = Trend(hours * HOUR * (rank % 3) + rank * 12_345)
        summaries.append(rank_of_program(rank, whole, kept, clock, noise=noise))
    common = range(max(each.start for each in held), min(each.stop for each in held))
    matched, _, notes = match_collectives(summaries)
    rows = sorted(row for call in matched for row in call.rows.tolist())
    assert rows == [[index - each.start for each in held] for index in common]
    assert "collectives-unmatched" not in {note.id for note in notes}


def late_and_offsets(analysis: Analysis) -> tuple[dict[int, int], dict[int, int | None]]:
    late = {r.rank: r.communication.lateness_ns for r in analysis.ranks if r.communication is not None}
    return late, {r.rank: r.clock_offset_ns for r in analysis.ranks}


@pytest.mark.parametrize("drift", [0.0, 5e-6, -4e-5, 1e-4])
@pytest.mark.parametrize("hours", [0, 7, -31])
def test_hours_apart_and_drifting_the_late_rank_is_found_to_one_percent(hours: int, drift: float) -> None:
    """A minute of calls of 0.4 ms; rank 2 enters each 0.2 ms late."""
    count = 400
    random = np.random.default_rng(3)
    ends = np.cumsum(random.integers(50 * MS, 250 * MS, count)) + 1_700_000_000 * 10**9
    whole = (ends, ["all_reduce"] * count, np.full(count, 1 << 20))
    middle = int(ends[count // 2])
    clocks = [Trend(0), Trend(hours * HOUR, drift, middle), Trend(-hours * HOUR + 5 * MS, -drift / 2, middle)]
    summaries = [
        rank_of_program(
            rank,
            whole,
            slice(None),
            clock,
            late_ns=200_000 if rank == 2 else 0,
            noise=np.random.default_rng(rank),
        )
        for rank, clock in enumerate(clocks)
    ]
    analysis = conclude(Job(Path("by hand"), "kineto", (), None), summaries, parse_selection("all"))
    late, offsets = late_and_offsets(analysis)
    assert late[2] == pytest.approx(count * 200_000, rel=0.01)
    assert late[0] + late[1] < 0.01 * late[2]
    assert offsets[1] == pytest.approx(hours * HOUR, abs=60_000 if drift else 10_000)
    notes = {note.id: note.message for note in analysis.data_quality}
    if abs(drift) >= 4e-5:
        assert "drift by up to" in notes["clock-disagreement"]
    if not drift:
        assert "drift" not in notes.get("clock-disagreement", "")


def test_a_drift_is_known_through_a_chain_of_groups() -> None:
    """Ranks 0 and 1 share one group, 1 and 2 another: rank 2's clock is known through rank 1's."""
    count = 200
    ends = np.cumsum(np.random.default_rng(1).integers(100 * MS, 300 * MS, count)) + 10**18
    clocks = [Trend(0), Trend(HOUR, 3e-5, int(ends[0])), Trend(-3 * HOUR, -2e-5, int(ends[-1]))]

    def calls(rank: int, group: str, at: np.ndarray) -> list[dict[str, object]]:
        shift = -clocks[rank].at(at)
        return calls_at(at - 400_000 + shift, at + shift, group=group)

    other = ends + 40 * MS
    summaries = [
        summary_of(0, calls(0, "a", ends)),
        summary_of(1, [*calls(1, "a", ends), *calls(1, "b", other)]),
        summary_of(2, calls(2, "b", other)),
    ]
    matched, _, _ = match_collectives(summaries)
    found = clock_offsets([0, 1, 2], matched)
    for rank in (1, 2):
        shown = ends - clocks[rank].at(ends)
        assert np.abs(found[rank].corrected(shown) - ends).max() < 20_000


@pytest.mark.parametrize(
    ("host", "shift", "offset"),
    [("a node", 0, 0), ("a node", HOUR, -HOUR), (None, 0, None)],
    ids=["one clock", "a clock that calls contradict", "hosts unknown"],
)
def test_ranks_of_one_host_have_one_clock_unless_a_call_contradicts(
    host: str | None, shift: int, offset: int | None
) -> None:
    """A busy host wakes one rank late every time."""
    ends = np.cumsum(np.full(60, 100 * MS)) + 10**18
    late = 5 * MS
    summaries = [
        summary_of(0, calls_at(ends - 50 * MS, ends), host_name=host),
        summary_of(1, calls_at(ends - 50 * MS + shift, ends + late + shift), host_name=host),
    ]
    calls, _, _ = match_collectives(summaries)
    clock = clock_offsets([0, 1], calls, {0: host, 1: host})[1]
    if offset is None:
        assert not clock.agrees
    elif offset == 0:
        assert clock == Clock(0, 0)
    else:
        at = ends + late + shift
        assert np.abs(clock.corrected(at) - ends).max() < 20 * MS


def test_two_clocks_behind_each_other() -> None:
    base = Clock(1000, 10, 1e-5, 10**18)
    link = Clock(-500, 5, -2e-5, 10**18 + 10**9)
    times = 10**18 + np.arange(0, 10**10, 10**9)
    through = base.corrected(link.corrected(times))
    assert np.abs(link.behind(base).corrected(times) - through).max() <= 2
    assert Clock(7, 1).behind(Clock(5, 2)) == Clock(12, 3)


@given(st.integers(8, 200), st.floats(-2e-4, 2e-4), st.integers(-(10**15), 10**15), st.integers(0, 1000))
@settings(max_examples=60)
def test_a_trend_is_found_again(count: int, drift: float, offset: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.integers(MS, 1000 * MS, count)) + 10**18
    true = Trend(offset, drift, int(times[0]))
    apart = true.at(times) + random.integers(-2000, 2000, count)
    trend, scatter = trend_of(times, apart)
    # What is left is the noise, or a drift too small to matter.
    assert np.median(np.abs(trend.at(times) - true.at(times))) <= 20_000
    assert scatter <= 20_000


@given(st.integers(8, 60), st.integers(0, 1000))
def test_noise_is_no_drift(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.integers(MS, 10 * MS, count))
    trend, _ = trend_of(times, random.integers(-20_000, 20_000, count))
    assert trend.drift == 0.0


def test_a_sender_that_left_before_its_receiver_came_waited_for_nobody() -> None:
    def lateness(receive: tuple[int, int]) -> int:
        summaries = [
            summary_of(0, calls_at([0], [5 * MS], "send", peer=1)),
            summary_of(1, calls_at([receive[0]], [receive[1]], "recv", peer=0)),
        ]
        analysis = conclude(Job(Path("by hand"), "kineto", (), None), summaries, parse_selection("all"))
        share = analysis.ranks[1].communication
        assert share is not None
        return share.lateness_ns

    assert lateness((4 * MS, 6 * MS)) == 4 * MS
    assert lateness((8 * MS, 9 * MS)) == 0
