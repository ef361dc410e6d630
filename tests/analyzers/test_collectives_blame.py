"""Transfer, wait, lateness and caused wait by their definitions, on calls made by hand."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from analysis_tables import calls_at, step_table, summary_of
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.conclusion import conclude
from trine.analyzers.operations import bus_factor, canonical_operation, pattern_of
from trine.analyzers.results import Analysis, RankSummary
from trine.analyzers.selection import parse_selection
from trine.record.model import Group, Job, Quality, Strings

MS = 1_000_000


def concluded(
    *summaries: RankSummary, world: int | None = None, quality: tuple[Quality, ...] = ()
) -> Analysis:
    from pathlib import Path

    job = Job(Path("by hand"), "kineto", (), world, quality=list(quality))
    return conclude(job, summaries, parse_selection("all"))


def shares(analysis: Analysis) -> dict[int, tuple[int, int, int, int, int, int]]:
    return {
        r.rank: (c.transfer_ns, c.wait_ns, c.caused_wait_ns, c.lateness_ns, c.last_in, c.matched)
        for r in analysis.ranks
        if (c := r.communication) is not None
    }


def test_all_must_enter_the_last_causes_the_others_waits() -> None:
    # Rank 2 enters last, 3 ms after the second last; all leave together.
    analysis = concluded(
        *(
            summary_of(rank, calls_at([start], [10 * MS], bytes=1000))
            for rank, start in enumerate((0, 4 * MS, 7 * MS))
        )
    )
    assert shares(analysis) == {
        0: (3 * MS, 7 * MS, 0, 0, 0, 1),
        1: (3 * MS, 3 * MS, 0, 0, 0, 1),
        2: (3 * MS, 0, 10 * MS, 3 * MS, 1, 1),
    }
    (result,) = analysis.collectives
    assert (result.transfer_ns, result.wait_ns, result.calls, result.bytes) == (3 * MS, 10 * MS, 1, 1000)
    assert result.algbw_bytes_per_s == pytest.approx(1000 / 0.003)
    assert result.busbw_bytes_per_s == pytest.approx(1000 / 0.003 * 2 * 2 / 3)
    assert result.caused_by == {2: 10 * MS}
    assert {(cell.rank, cell.wait_ns) for cell in analysis.heatmap} == {(0, 7 * MS), (1, 3 * MS), (2, 0)}


def test_ties_cause_nothing() -> None:
    analysis = concluded(*(summary_of(r, calls_at([s], [10])) for r, s in enumerate((0, 5, 5))))
    # Two entered last together: the lower is counted, and neither is late or blamed.
    assert [share[2:5] for share in shares(analysis).values()] == [(0, 0, 0), (0, 0, 1), (0, 0, 0)]
    analysis = concluded(*(summary_of(r, calls_at([5], [10])) for r in range(3)))
    assert all(share[2:5] == (0, 0, 0) for share in shares(analysis).values())


def rooted(operation: str, starts, ends, root: int | None):
    return concluded(
        *(
            summary_of(rank, calls_at([start], [end], operation, **({} if root is None else {"peer": root})))
            for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
        )
    )


def test_others_wait_for_the_root_of_a_broadcast() -> None:
    late_root = shares(rooted("broadcast", (8, 0, 2), (12, 13, 13), root=0))
    # transfer: latest end − latest start = 13 − 8; waits: 4−5→0, 13−5, 11−5
    assert late_root == {0: (5, 0, 14, 6, 1, 1), 1: (5, 8, 0, 0, 0, 1), 2: (5, 6, 0, 0, 0, 1)}
    late_receiver = shares(rooted("broadcast", (0, 8, 2), (4, 13, 13), root=0))
    assert all(share[2:5] == (0, 0, 0) for share in late_receiver.values())


def test_the_root_of_a_reduce_waits_for_its_contributors() -> None:
    late_contributor = shares(rooted("reduce", (0, 8, 2), (13, 12, 6), root=0))
    assert late_contributor[1] == (5, 0, 8, 6, 1, 1)
    late_root = shares(rooted("reduce", (8, 0, 2), (13, 5, 6), root=0))
    assert all(share[2:5] == (0, 0, 0) for share in late_root.values())


@pytest.mark.parametrize("operation", ["broadcast", "gather", "scatter", "reduce"])
def test_without_a_known_root_nobody_is_blamed(operation: str) -> None:
    unknown = shares(rooted(operation, (8, 0, 2), (12, 13, 13), root=None))
    assert all(share[2:5] == (0, 0, 0) for share in unknown.values())


@pytest.mark.parametrize(("send", "recv", "late"), [((0, 10), (6, 11), 1), ((6, 11), (0, 11), 0)])
def test_the_later_side_of_a_pair_is_late(send, recv, late: int) -> None:
    analysis = concluded(
        summary_of(0, calls_at([send[0]], [send[1]], "send", peer=1)),
        summary_of(1, calls_at([recv[0]], [recv[1]], "recv", peer=0)),
    )
    transfer = max(send[1], recv[1]) - max(send[0], recv[0])
    found = shares(analysis)
    assert all(share[0] == transfer for share in found.values())
    assert found[late][3:] == (6, 1, 1)
    assert found[1 - late][1] == found[late][2] > 0
    assert analysis.collectives[0].op == "send_recv" and analysis.collectives[0].ranks == (0, 1)


def test_what_the_late_rank_was_doing_is_weighed_by_its_lateness() -> None:
    slow = calls_at([5 * MS, 17 * MS, 26 * MS], [10 * MS, 20 * MS, 30 * MS])
    fast = calls_at([0, 11 * MS, 25 * MS], [10 * MS, 20 * MS, 30 * MS])
    late = summary_of(
        1, slow, activity=["python", "python", "compute"], activity_example=("sleep", "f", None)
    )
    doing = concluded(summary_of(0, fast), late).ranks[1].communication
    assert doing is not None
    assert [(one.activity, one.total_ns, one.example) for one in doing.late_doing] == [
        ("python", 11 * MS, "f"),
        ("compute", 1 * MS, None),
    ]


def test_what_made_a_rank_late_is_what_it_did_beyond_the_others() -> None:
    """It slept 30 ms before 100 ms of work that all ranks do: the work is longer, the sleep is the reason."""

    def beside(late_python: int, late_compute: int) -> list[tuple[str, int, str | None]]:
        others = [
            summary_of(
                rank,
                calls_at([200 * MS], [260 * MS]),
                activity=["compute"],
                activity_ns={"compute": np.array([100 * MS]), "python": np.array([5 * MS])},
            )
            for rank in (0, 1)
        ]
        late = summary_of(
            2,
            calls_at([230 * MS], [260 * MS]),
            activity=["compute"],
            activity_example=("aten::linear",),
            activity_ns={"python": np.array([late_python * MS]), "compute": np.array([late_compute * MS])},
            activity_spans={"python": {0: "sleep"}, "compute": {0: "aten::linear"}},
        )
        share = concluded(*others, late).ranks[2].communication
        assert share is not None
        return [(one.activity, one.total_ns, one.example) for one in share.late_doing]

    assert beside(35, 100) == [("python", 30 * MS, "sleep")]
    assert beside(5, 130) == [("compute", 30 * MS, "aten::linear")]
    # Nothing took it longer than the others: the longest remains.
    assert beside(5, 100) == [("compute", 30 * MS, "aten::linear")]


def test_calls_issued_together_are_late_for_one_reason() -> None:
    """Two buckets of a backward pass: a sleep before the forward makes the second as late as the first."""

    def rank(number: int, late: int, python: int) -> RankSummary:
        spans = {"python": {0: "sleep"}, "compute": {1: "aten::mm"}} if late else {}
        return summary_of(
            number,
            calls_at([(100 + late) * MS, (110 + late) * MS], [300 * MS, 310 * MS]),
            activity=["compute", "compute"],
            activity_ns={"compute": np.array([90, 10]) * MS, "python": np.array([python, 0]) * MS},
            activity_spans=spans,
        )

    share = concluded(rank(0, 0, 5), rank(1, 100, 105)).ranks[1].communication
    assert share is not None
    assert [(one.activity, one.total_ns, one.example) for one in share.late_doing] == [
        ("python", 200 * MS, "sleep")
    ]


def test_waits_are_never_below_zero_and_untimed_calls_count_nothing() -> None:
    one = [*calls_at([0, 20], [10, 30]), {"operation": "all_reduce", "group": "0"}]
    other = [*calls_at([9, 12], [5, 30]), {"operation": "all_reduce", "group": "0"}]
    for share in shares(concluded(summary_of(0, one), summary_of(1, other))).values():
        assert min(share) >= 0 and share[5] <= 2


def test_missing_ranks_are_left_out_and_said() -> None:
    groups = (Group("0", None, None, (0, 1, 2, 3)),)
    analysis = concluded(
        *(summary_of(r, calls_at([r], [10], bytes=100), groups=groups) for r in (0, 2)), world=4
    )
    assert analysis.source.missing_ranks == (1, 3)
    assert set(shares(analysis)) == {0, 2}
    (result,) = analysis.collectives
    # The bus still carries the whole group's data.
    assert result.busbw_bytes_per_s == pytest.approx(result.algbw_bytes_per_s * 2 * 3 / 4)
    assert any(note.id == "missing-ranks" and "1, 3" in note.message for note in analysis.data_quality)


def test_one_rank_alone_cannot_tell_waiting_from_transferring() -> None:
    analysis = concluded(summary_of(0, calls_at([0], [10], bytes=100)), world=2)
    assert analysis.ranks[0].communication is None and analysis.ranks[0].clock_offset_ns is None
    assert analysis.collectives[0].transfer_ns == 10 and analysis.heatmap == ()
    assert any(note.id == "collectives-alone" for note in analysis.data_quality)


def test_untimed_collectives_are_said_with_the_remedy() -> None:
    calls = [{"operation": "all_reduce", "group": "0", "issued_ns": i} for i in range(3)]
    analysis = concluded(summary_of(0, calls), summary_of(1, calls))
    assert analysis.collectives == () and all(rank.communication is None for rank in analysis.ranks)
    note = next(note for note in analysis.data_quality if note.id == "collectives-untimed")
    assert "3 collectives" in note.message and "deep window" in note.message


def test_kinds_of_one_operation_are_told_apart_by_group_in_the_heatmap() -> None:
    ends = np.array([10, 20])
    both = calls_at(ends - 5, ends, group=["a", "b"])
    names = {cell.collective for cell in concluded(summary_of(0, both), summary_of(1, both)).heatmap}
    assert names == {"all_reduce in a", "all_reduce in b"}
    groups = (Group("a", None, "tp", (0, 1)), Group("b", None, "tp", (0, 1)))
    both_tp = [summary_of(rank, both, groups=groups) for rank in (0, 1)]
    cells = concluded(*both_tp).heatmap
    assert [(cell.collective, cell.calls) for cell in cells] == [("all_reduce", 2)] * 2


def test_the_same_note_of_many_ranks_is_said_once() -> None:
    notes = tuple(Quality("no-steps", "info", "no steps", rank) for rank in (0, 1, 2, 5))
    analysis = concluded(summary_of(0), quality=(*notes, Quality("x", "error", "first", 3)))
    assert [(n.id, n.message, n.rank) for n in analysis.data_quality[:1]] == [("x", "first", 3)]
    assert "no steps (ranks 0-2, 5)" in [note.message for note in analysis.data_quality]


# --- properties --------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Ranks whose calls end together; each enters when it likes."""
    ranks, calls = draw(st.integers(2, 5)), draw(st.integers(3, 12))
    seed = draw(st.integers(0, 10_000))
    generator = np.random.default_rng(seed)
    ends = np.cumsum(generator.integers(10 * MS, 60 * MS, calls)) + 10**18
    durations = generator.integers(1000, 5 * MS, (ranks, calls))
    return ends, durations


def summaries_of(job, shifts=None) -> list[RankSummary]:
    ends, durations = job
    return [
        summary_of(rank, calls_at(ends - length + shift, ends + shift, bytes=1000))
        for rank, (length, shift) in enumerate(
            zip(durations, shifts if shifts is not None else [0] * len(durations), strict=True)
        )
    ]


@given(jobs(), st.integers(0, 4), st.one_of(st.integers(200_000, 10**16), st.integers(-(10**16), -200_000)))
def test_shifting_all_clocks_of_one_rank_changes_only_its_offset(job, which: int, shift: int) -> None:
    which %= len(job[1])
    before = concluded(*summaries_of(job))
    shifts = [shift if rank == which else 0 for rank in range(len(job[1]))]
    after = concluded(*summaries_of(job, shifts))
    assert shares(after) == shares(before)
    assert [asdict(result) for result in after.collectives] == [asdict(r) for r in before.collectives]
    assert all(rank.clock_offset_ns == 0 for rank in before.ranks)
    moved = shift if which == 0 else 0
    assert [rank.clock_offset_ns for rank in after.ranks] == [
        0 if rank == 0 else moved - shifts[rank] for rank in range(len(shifts))
    ]
    assert any(note.id == "clock-disagreement" for note in after.data_quality)
    assert not any(note.id == "clock-disagreement" for note in before.data_quality)


@given(jobs())
def test_sums_hold_for_any_job(job) -> None:
    ends, durations = job
    found = shares(concluded(*summaries_of(job)))
    transfer = int(durations.min(axis=0).sum())
    for rank, share in found.items():
        assert share[0] == transfer
        assert share[0] + share[1] == int(durations[rank].sum())
    assert sum(share[4] for share in found.values()) <= len(ends)
    assert sum(share[2] for share in found.values()) <= sum(share[1] for share in found.values())


@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_ranks_and_rows_changes_nothing(job, random) -> None:
    before = concluded(*summaries_of(job))
    ends, durations = job
    order = list(range(len(ends)))
    random.shuffle(order)
    shuffled = summaries_of((ends[order], durations[:, order]))
    random.shuffle(shuffled)
    after = concluded(*shuffled)
    assert shares(after) == shares(before) and after.collectives == before.collectives


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("allreduce", "all_reduce"),
        ("nccl:all_reduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("gloo:broadcast", "broadcast"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("barrier", "barrier"),
        ("recv_any_source", "recv"),
        ("isend", "send"),
        ("mystery", "mystery"),
        (None, "unknown"),
    ],
)
def test_one_spelling_for_each_operation(name: str | None, operation: str) -> None:
    assert canonical_operation(name) == operation
    assert canonical_operation(operation) == operation


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(op, 8) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [
        1.75,
        0.875,
        0.875,
        0.875,
    ]
    assert {bus_factor(op, 8) for op in ("broadcast", "reduce", "send_recv")} == {1.0}
    assert bus_factor("all_reduce", 1) == 1.0
    assert pattern_of("barrier") == "all" and pattern_of("gather") == "to_root"


def test_where_spans_do_not_tell_the_phases_of_the_step_do() -> None:
    """An always-on record has no operators; rank 1 took longer than the others in data, then in nothing."""

    def recorded(rank: int, starts: list[int], data: list[int]) -> RankSummary:
        phases = [[amount, 0, 10, 10, 10, 100 - amount, 5] for amount in data]
        steps = step_table(Strings(), [(3, 0, 135), (4, 135, 270)], phases)
        return summary_of(rank, calls_at(starts, [1000, 2000], step=[3, 4]), steps=steps)

    analysis = concluded(recorded(0, [100, 1100], [5, 7]), recorded(1, [400, 1300], [50, 7]))
    share = analysis.ranks[1].communication
    assert share is not None
    assert [(one.activity, one.total_ns, one.example) for one in share.late_doing] == [
        ("loader", 300, "phase data"),
        ("unknown", 200, None),
    ]
