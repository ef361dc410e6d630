"""Groups that no source names are found from which ranks leave their calls together, and only then."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_tables import calls_at, summary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.analyzers.conclusion import conclude
from trine.analyzers.findings._facts import gather
from trine.analyzers.findings._waits import late_ranks
from trine.analyzers.matching import Calls, match_collectives
from trine.analyzers.results import Analysis, Breakdown, BusyTime, IdleCauses, RankSummary
from trine.analyzers.selection import parse_selection
from trine.analyzers.verdict import verdict
from trine.record.model import Group, Job

MS = 1_000_000
Partition = list[list[int]]
#: A call of a step: partition of the ranks, bytes.
Site = tuple[Partition, int]


def program(
    sites: list[Site],
    steps: int,
    ranks: int,
    *,
    asleep: dict[int, int] | None = None,
    seed: int = 0,
    noise_ns: int = 3_000,
    offsets: list[int] | None = None,
    marked: bool = True,
    operation: str = "all_reduce",
    groups: dict[int, tuple[Group, ...]] | None = None,
    **others: Any,
) -> list[RankSummary]:
    """A run in which every rank works some time before each call, ``asleep`` some longer; nobody leaves before the
    last of the group has entered. No call names its group."""
    random = np.random.default_rng(seed)
    now = np.full(ranks, 10**18, dtype=np.int64)
    rows: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for step in range(steps):
        for partition, size in sites:
            for members in partition:
                start = now[members] + random.integers(MS, 9 * MS, len(members))
                start += np.array([(asleep or {}).get(rank, 0) for rank in members])
                end = start.max() + 300_000 + random.integers(0, noise_ns, len(members))
                for place, rank in enumerate(members):
                    shift = offsets[rank] if offsets else 0
                    rows[rank] += calls_at(
                        [start[place] + shift],
                        [end[place] + shift],
                        operation,
                        None,
                        bytes=size,
                        **({"step": step} if marked else {}),
                    )
                now[members] = end
    return [
        summary_of(rank, rows[rank], groups=(groups or {}).get(rank, ()), **others) for rank in range(ranks)
    ]


def found(matched: list[Calls]) -> set[tuple[tuple[int, ...], int]]:
    """Groups and how many calls each made."""
    counts: dict[tuple[int, ...], int] = {}
    for call in matched:
        counts[call.ranks] = counts.get(call.ranks, 0) + len(call.rows)
    return set(counts.items())


def expected(sites: list[Site], steps: int) -> set[tuple[tuple[int, ...], int]]:
    counts: dict[tuple[int, ...], int] = {}
    for partition, _ in sites:
        for members in partition:
            counts[tuple(members)] = counts.get(tuple(members), 0) + steps
    return set(counts.items())


def same_rows(matched: list[Calls]) -> bool:
    """Whether a call holds one row of each rank, each row once: ends agree to the noise."""
    rows = [
        (rank, row)
        for call in matched
        for line in call.rows
        for rank, row in zip(call.ranks, line, strict=True)
    ]
    return len(rows) == len(set(rows))


def analysed(summaries: list[RankSummary]) -> Analysis:
    return conclude(Job(Path("by hand"), "kineto", (), None), summaries, parse_selection("all"))


TENSOR_4, DATA_4 = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
TENSOR_8, DATA_8 = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
WORLD_4, WORLD_8 = [[0, 1, 2, 3]], [list(range(8))]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("sites", "ranks"),
    [
        ([(TENSOR_4, 4000), (TENSOR_4, 4000), (DATA_4, 200_000)], 4),
        ([(TENSOR_8, 4000), (DATA_8, 200_000)], 8),
        ([(TENSOR_4, 4000), (WORLD_4, 8), (DATA_4, 200_000)], 4),
        ([(DATA_8, 4000), (TENSOR_8, 9000), (WORLD_8, 8)], 8),
    ],
)
def test_groups_without_names_are_found(sites: list[Site], ranks: int, marked: bool) -> None:
    matched, _, notes = match_collectives(program(sites, 6, ranks, marked=marked))
    assert found(matched) == expected(sites, 6)
    assert same_rows(matched)
    assert [note.id for note in notes] == ["groups-inferred"]
    assert {call.group for call in matched if call.ranks == (0, 1)} <= {"ranks 0-1"}


def test_calls_of_one_size_in_two_kinds_of_groups_are_told_apart_by_their_place_in_the_step() -> None:
    sites = [(TENSOR_4, 4000), (DATA_4, 4000), (TENSOR_4, 4000), (WORLD_4, 4000)]
    matched, _, _ = match_collectives(program(sites, 8, 4))
    assert found(matched) == expected(sites, 8)


@pytest.mark.parametrize("seed", range(4))
def test_clocks_hours_apart_are_set_by_a_call_of_all_ranks(seed: int) -> None:
    sites = [(TENSOR_8, 4000), (WORLD_8, 64), (DATA_8, 200_000)]
    offsets = np.random.default_rng(seed).integers(-(10**13), 10**13, 8).tolist()
    summaries = program(sites, 8, 8, seed=seed, offsets=offsets, asleep={5: 20 * MS})
    matched, _, _ = match_collectives(summaries)
    assert found(matched) == expected(sites, 8)
    analysis = analysed(summaries)
    caused = {r.rank: r.communication.caused_wait_ns for r in analysis.ranks if r.communication is not None}
    assert max(caused, key=lambda rank: caused[rank]) == 5


def test_clocks_apart_by_host_make_no_groups_of_hosts() -> None:
    """Two hosts 5 ms apart: ends of a call of all ranks agree on each host, and it is one call."""
    sites = [(TENSOR_4, 4000), (WORLD_4, 64)]
    matched, _, _ = match_collectives(program(sites, 8, 4, offsets=[0, 0, 5 * MS, 5 * MS]))
    assert found(matched) == expected(sites, 8)


def test_the_rank_that_sleeps_is_named_and_nobody_is_without_it() -> None:
    sites = [(TENSOR_4, 4000), (TENSOR_4, 4000), (DATA_4, 200_000)]
    shares = {}
    for asleep in ({3: 20 * MS}, {}):
        analysis = analysed(program(sites, 8, 4, asleep=asleep))
        caused = [r.communication.caused_wait_ns for r in analysis.ranks if r.communication is not None]
        assert len(caused) == 4
        shares[bool(asleep)] = caused[3] / sum(caused)
    assert shares[True] > 0.6
    assert shares[False] < 0.45


def test_a_rank_that_waited_for_the_sleeper_only_passes_its_lateness_on() -> None:
    """Rank 2 enters the data-parallel call as late as rank 3, because it waited for rank 3 before."""
    sites = [(TENSOR_4, 4000), (TENSOR_4, 4000), (DATA_4, 200_000)]
    window = few_events(0.9)
    asleep = analysed(program(sites, 8, 4, asleep={3: 20 * MS}, breakdown=window, breakdown_missing=None))
    waiting = {}
    for result in asleep.ranks:
        share = result.communication
        assert share is not None
        passed = sum(late.total_ns for late in share.late_doing if late.activity == "waiting")
        waiting[result.rank] = passed / max(share.lateness_ns, 1)
    assert waiting[2] > 0.9
    assert waiting[3] == 0
    assert [late.rank for late in late_ranks(gather(asleep))] == [3]
    healthy = analysed(program(sites, 8, 4, breakdown=window, breakdown_missing=None))
    assert late_ranks(gather(healthy)) == []


def test_what_a_rank_did_before_another_groups_call_makes_it_late_for_its_own() -> None:
    """Rank 3 sleeps before its tensor-parallel calls; when it enters the data-parallel one it is late by both sleeps."""
    sites = [(TENSOR_4, 4000), (TENSOR_4, 4000), (DATA_4, 200_000)]
    summaries = []
    for summary in program(sites, 8, 4, asleep={3: 20 * MS}):
        calls = len(summary.collectives or ())
        slept = np.where(np.arange(calls) % 3 < 2, 20 * MS, 0) if summary.rank == 3 else np.zeros(calls)
        computed = np.full(calls, 2 * MS + 1000 * summary.rank)
        times = {"compute": computed.astype(np.int64), "python": slept.astype(np.int64)}
        summaries.append(replace(summary, activity=("compute",) * calls, activity_ns=times))
    share = analysed(summaries).ranks[3].communication
    assert share is not None
    assert share.late_doing[0].activity == "python"
    assert share.late_doing[0].total_ns > 0.9 * share.lateness_ns


def test_groups_that_the_source_lists_lend_their_names() -> None:
    groups = {
        rank: (
            Group("0", None, "default_pg", (0, 1, 2, 3)),
            Group(str(1 + rank // 2), None, "tp", (0, 1) if rank < 2 else (2, 3)),
            Group(str(3 + rank % 2), None, "dp", (rank % 2, rank % 2 + 2)),
        )
        for rank in range(4)
    }
    sites = [(TENSOR_4, 4000), (DATA_4, 200_000)]
    matched, _, _ = match_collectives(program(sites, 6, 4, groups=groups))
    assert {(call.group, call.ranks) for call in matched} == {
        ("1", (0, 1)),
        ("2", (2, 3)),
        ("3", (0, 2)),
        ("4", (1, 3)),
    }


def test_one_group_of_all_ranks_is_matched_as_before() -> None:
    matched, _, notes = match_collectives(program([(WORLD_4, 4000), (WORLD_4, 9000)], 6, 4))
    assert (found(matched), notes) == ({((0, 1, 2, 3), 12)}, [])
    assert {call.group for call in matched} == {""}


def test_two_calls_are_no_evidence() -> None:
    matched, _, notes = match_collectives(
        program([(TENSOR_4, 4000), (DATA_4, 200_000)], 2, 4, asleep={3: 20 * MS})
    )
    assert "groups-inferred" not in {note.id for note in notes}
    assert matched == []


def test_ends_that_agree_on_no_ranks_make_no_group() -> None:
    random = np.random.default_rng(0)
    summaries = []
    for rank in range(4):
        ends = np.cumsum(random.integers(MS, 20 * MS, 24)) + 10**18
        calls = calls_at(ends - 100_000, ends, group=None, bytes=4000, step=np.arange(24) // 4)
        summaries.append(summary_of(rank, calls))
    matched, _, notes = match_collectives(summaries)
    assert matched == []
    assert [note.id for note in notes] == ["collectives-unmatched"]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, Partition]:
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=4))
    order = draw(st.permutations(range(sum(sizes))))
    cuts = np.cumsum(sizes)[:-1]
    return sum(sizes), sorted(sorted(part.tolist()) for part in np.split(np.array(order), cuts))


@given(partitions(), st.integers(8, 20), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_any_partition_that_repeats_is_found(drawn: tuple[int, Partition], steps: int, seed: int) -> None:
    ranks, partition = drawn
    sites: list[Site] = [(partition, 4000), ([list(range(ranks))], 64)]
    matched, _, _ = match_collectives(program(sites, steps, ranks, seed=seed))
    assert found(matched) == expected(sites, steps)
    assert same_rows(matched)


def test_a_thousand_ranks_in_one_group_cost_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    import trine.analyzers.group_inference as inference

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("nothing had to be inferred")

    monkeypatch.setattr(inference, "infer_groups", refused)
    matched, _, _ = match_collectives(program([([list(range(1024))], 64)], 8, 1024))
    assert found(matched) == {(tuple(range(1024)), 8)}


def test_regular_groups_of_many_ranks_take_seconds_at_most() -> None:
    ranks = 512
    tensor = [list(range(first, first + 8)) for first in range(0, ranks, 8)]
    data = [list(range(first, ranks, 8)) for first in range(8)]
    sites = [(tensor, 4000), (data, 9000)]
    summaries = program(sites, 8, ranks)
    began = time.process_time()
    matched, _, _ = match_collectives(summaries)
    assert time.process_time() - began < 5
    assert found(matched) == expected(sites, 8)


# --- the verdict -------------------------------------------------------------------------------


def few_events(exposed: float) -> Breakdown:
    """A window of 400 ms with fewer events than a rule takes for evidence."""
    window = 400 * MS
    hidden = window - round(exposed * window)
    return Breakdown(
        window_ns=window,
        compute_ns=hidden,
        exposed_communication_ns=window - hidden,
        exposed_copy_ns=0,
        idle_ns=0,
        idle=IdleCauses(0, 0, 0, 0, 0, 0),
        busy=BusyTime(window, hidden, window - hidden, 0),
        overlap_ns=0,
        overlap_efficiency=0.0,
        basis="host",
        steps=(0, 1, 2),
        events=66,
    )


def _said(exposed: float, matched: bool, ranks: int = 4) -> str:
    steps = 6 if matched else 2
    summaries = program(
        [(TENSOR_4, 4000), (DATA_4, 9000)],
        steps,
        4,
        asleep={} if matched else {3: 20 * MS},
        breakdown=few_events(exposed),
        breakdown_missing=None,
    )[:ranks]
    return verdict(gather(analysed(summaries)), ()).sentence


def test_much_exposed_communication_is_said_though_who_waited_is_not_known() -> None:
    assert "97 % of the step is communication" in (said := _said(0.97, matched=False))
    assert "could not be matched" in said
    assert "too few steps" not in said
    assert "no single rank" in _said(0.97, matched=True)
    assert "one rank alone" in _said(0.97, matched=False, ranks=1)


def test_little_exposed_communication_leaves_too_few_events_the_reason() -> None:
    assert "too few steps or events" in _said(0.05, matched=False)
