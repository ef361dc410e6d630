from __future__ import annotations

import numpy as np
import pytest
from analysis_tables import calls_at, summary_of
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.matching import Calls, match_collectives
from trine.record.model import MISSING, Group


def times(count: int, seed: int = 0, gap: int = 1_000_000) -> np.ndarray:
    """Ends of calls at irregular distances, as in a real step."""
    return np.cumsum(np.random.default_rng(seed).integers(gap // 2, 2 * gap, count)) + 10**18


def rank_calls(ends: np.ndarray, lateness: int = 0, **columns):
    return calls_at(ends - 200_000 + lateness, ends, **columns)


def only(calls: list[Calls]) -> Calls:
    assert len(calls) == 1
    return calls[0]


def test_equal_counts_match_in_order() -> None:
    ends = times(12)
    matched, alone, quality = match_collectives([summary_of(r, rank_calls(ends)) for r in (0, 1)])
    call = only(matched)
    assert call.rows.tolist() == [[i, i] for i in range(12)]
    assert (alone, quality) == ([], [])


@pytest.mark.parametrize(
    ("kept", "word"), [(slice(1, None), "end"), (slice(0, 11), "start"), (slice(2, 10), "agree")]
)
def test_a_rank_with_fewer_calls_is_aligned_where_the_ends_agree(kept: slice, word: str) -> None:
    ends = times(12)
    rows = range(12)[kept]
    summaries = [summary_of(0, rank_calls(ends)), summary_of(1, rank_calls(ends[kept] + 5_000_000_000))]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[row, i] for i, row in enumerate(rows)]
    assert [note.id for note in quality] == ["collectives-aligned"]
    assert word in quality[0].message


def test_lists_that_lost_calls_at_opposite_ends_still_meet() -> None:
    ends = times(20)
    summaries = [summary_of(0, rank_calls(ends[:17])), summary_of(1, rank_calls(ends[3:] + 77_000_000_000))]
    matched, _, _ = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[i + 3, i] for i in range(14)]


def test_steps_decide_where_everything_repeats() -> None:
    """A perfectly regular run: any lag fits the ends, only the step numbers tell which is right."""
    ends = np.arange(1, 13) * 1_000_000
    steps = np.arange(12) // 2
    summaries = [
        summary_of(0, rank_calls(ends, step=steps)),
        summary_of(1, rank_calls(ends[2:] + 40_000_000, step=steps[2:])),
    ]
    matched, _, _ = match_collectives(summaries)
    assert only(matched).rows[0].tolist() == [2, 0]


def test_steps_that_a_rank_lost_are_left_out_in_the_middle_too() -> None:
    """Roll-ups keep other slow steps whole on other ranks."""
    ends = times(20)
    steps = np.arange(20) // 4
    kept = np.flatnonzero(np.isin(steps, (0, 2, 4)))
    odd = np.flatnonzero(np.isin(steps, (0, 1, 2, 4)))[:-1]  # and its step 4 lacks a call
    summaries = [
        summary_of(0, rank_calls(ends, step=steps)),
        summary_of(1, rank_calls(ends[kept], step=steps[kept])),
        summary_of(2, rank_calls(ends[odd], step=steps[odd])),
    ]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).rows.tolist() == [
        [a, b, c]
        for a, b, c in zip([0, 1, 2, 3, 8, 9, 10, 11], range(8), [0, 1, 2, 3, 8, 9, 10, 11], strict=True)
    ]
    assert "step numbers" in quality[0].message


def test_sequence_numbers_are_the_identity_of_a_call() -> None:
    ends = times(6)
    summaries = [
        summary_of(0, rank_calls(ends, sequence=[1, 2, 3, 4, 5, 6])),
        summary_of(1, rank_calls(ends[[0, 1, 3, 5]], sequence=[1, 2, 4, 6])),
    ]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[0, 0], [1, 1], [3, 2], [5, 3]]
    assert "sequence" in quality[0].message


def test_calls_of_a_coalesced_batch_share_a_sequence_number() -> None:
    ends = times(4)
    summaries = [summary_of(r, rank_calls(ends, sequence=[7, 7, 8, 8])) for r in (0, 1)]
    assert only(match_collectives(summaries)[0]).rows.tolist() == [[i, i] for i in range(4)]


def test_sequence_numbers_that_contradict_the_operations_are_not_believed() -> None:
    ends = times(6)
    names = ["all_reduce", "all_gather", "reduce_scatter"] * 2

    def calls(sequence):
        return [
            {"operation": name, "group": "0", "start_ns": end - 1000, "end_ns": end, "sequence": number}
            for name, end, number in zip(names, ends.tolist(), sequence, strict=True)
        ]

    # The second rank's observer began to count one call late.
    matched, _, _ = match_collectives([summary_of(0, calls(range(6))), summary_of(1, calls(range(-1, 5)))])
    assert {call.operation: len(call.rows) for call in matched} == dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter"), 2
    )


def test_groups_are_told_apart() -> None:
    ends = times(8)
    groups = (Group("tp", None, None, (0, 1)), Group("dp", None, None, (0, 2)))
    summaries = [
        summary_of(0, rank_calls(ends, group=["tp", "dp"] * 4), groups=groups),
        summary_of(1, rank_calls(ends[::2], group="tp"), groups=groups),
        summary_of(2, rank_calls(ends[1::2], group="dp"), groups=groups),
    ]
    matched, _, quality = match_collectives(summaries)
    assert {call.group: (call.ranks, call.rows[:, 0].tolist()) for call in matched} == {
        "tp": ((0, 1), [0, 2, 4, 6]),
        "dp": ((0, 2), [1, 3, 5, 7]),
    }
    assert quality == []


def test_disjoint_groups_may_share_a_name() -> None:
    ends = times(5)
    near, far = Group("mesh_tp", None, None, (0, 1)), Group("mesh_tp", None, None, (2, 3))
    summaries = [
        summary_of(rank, rank_calls(ends + rank // 2 * 40_000_000, group="mesh_tp"), groups=(group,))
        for rank, group in ((0, near), (1, near), (2, far), (3, far))
    ]
    matched, _, _ = match_collectives(summaries)
    assert sorted(call.ranks for call in matched) == [(0, 1), (2, 3)]


def test_calls_of_smaller_groups_are_recognised_among_unnamed_ones() -> None:
    """gloo's traces name no groups: rank 0 makes calls that rank 1 never makes."""
    ends = times(6)
    small = [0, 16, 0, 0, 16, 0]
    sizes = [16 if s else 1000 for s in small]
    keep = [i for i, s in enumerate(small) if not s]
    summaries = [
        summary_of(0, rank_calls(ends, group=None, bytes=sizes)),
        summary_of(1, rank_calls(ends[keep], group=None, bytes=1000)),
    ]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[row, i] for i, row in enumerate(keep)]
    assert "rank 0 2" in quality[0].message


def test_point_to_point_pairs_match_sender_with_receiver() -> None:
    ends = times(6)
    forward = calls_at(ends[:3] - 100, ends[:3], "send", "pp", peer=1)
    backward = calls_at(ends[3:] - 100, ends[3:], "recv", "pp", peer=1)
    other = calls_at(ends[:3] - 50, ends[:3], "recv", "pp", peer=0) + calls_at(
        ends[3:] - 50, ends[3:], "send", "pp", peer=0
    )
    matched, _, _ = match_collectives([summary_of(0, forward + backward), summary_of(1, other)])
    assert [(call.operation, call.pattern, call.size) for call in matched] == [("send_recv", "pair", 2)] * 2
    assert [call.rows.tolist() for call in matched] == [
        [[0, 0], [1, 1], [2, 2]],
        [[3, 3], [4, 4], [5, 5]],
    ]


def test_a_rank_that_recorded_almost_nothing_is_left_out_and_said() -> None:
    ends = times(40)
    summaries = [summary_of(r, rank_calls(ends)) for r in (0, 1)] + [summary_of(2, rank_calls(ends[:3]))]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).ranks == (0, 1) and len(only(matched).rows) == 40
    assert quality[0].id == "collectives-left-out" and "[2]" in quality[0].message


def test_a_member_that_recorded_nothing_of_its_group_is_said() -> None:
    groups = (Group("0", None, None, (0, 1, 2, 3)),)
    summaries = [summary_of(r, rank_calls(times(4)), groups=groups) for r in (0, 1)] + [
        summary_of(2, groups=groups)
    ]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).ranks == (0, 1)
    assert [note.id for note in quality] == ["collectives-left-out"] and "[2]" in quality[0].message


def test_sequence_numbers_that_contradict_the_times_are_not_believed() -> None:
    """All calls are alike, and one rank's observer began to count a call later."""
    ends = times(10)
    summaries = [
        summary_of(0, rank_calls(ends, sequence=np.arange(10))),
        summary_of(1, rank_calls(ends[1:], sequence=np.arange(9))),
    ]
    matched, _, _ = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[i + 1, i] for i in range(9)]


def test_calls_that_never_overlap_are_not_the_same_calls() -> None:
    one = np.cumsum(np.random.default_rng(1).integers(10**6, 10**8, 30))
    other = np.cumsum(np.random.default_rng(2).integers(10**6, 10**8, 30))
    summaries = [
        summary_of(0, calls_at(one - 1000, one, group=None)),
        summary_of(1, calls_at(other - 1000, other, group=None)),
    ]
    matched, _, quality = match_collectives(summaries)
    assert matched == [] and [note.id for note in quality] == ["collectives-unmatched"]


def test_different_operations_in_one_place_are_left_out_and_said() -> None:
    ends = times(20)
    names = ["all_reduce"] * 20
    summaries = [
        summary_of(
            r, [{**call, "operation": name} for call, name in zip(rank_calls(ends), names, strict=True)]
        )
        for r in (0, 1)
    ]
    odd = rank_calls(ends)
    odd[4]["operation"] = "broadcast"
    matched, _, quality = match_collectives([summaries[0], summary_of(1, odd)])
    assert len(only(matched).rows) == 19
    assert quality[0].id == "collectives-disagree"


def test_untimed_calls_match_by_order_and_keep_no_times() -> None:
    calls = [{"operation": "all_reduce", "group": "0", "issued_ns": 10 * i} for i in range(5)]
    matched, _, _ = match_collectives([summary_of(r, calls) for r in (0, 1)])
    assert (only(matched).start_ns == MISSING).all()


def test_ranks_without_times_do_not_keep_the_others_from_being_matched() -> None:
    """On NCCL deep windows know starts and ends, and large jobs have them on one rank a node."""
    ends = times(6)
    issued = [{"operation": "all_reduce", "group": "0", "issued_ns": 10 * i} for i in range(500)]
    summaries = [summary_of(r, rank_calls(ends) if r in (0, 8) else issued) for r in (0, 1, 2, 8)]
    matched, _, quality = match_collectives(summaries)
    assert only(matched).ranks == (0, 8) and len(only(matched).rows) == 6
    assert quality[0].id == "collectives-untimed" and "2 of 4 ranks" in quality[0].message


def test_one_rank_alone_has_nothing_to_match() -> None:
    matched, alone, _ = match_collectives([summary_of(0, rank_calls(times(3))), summary_of(1)])
    assert matched == [] and only(alone).ranks == (0,)


@given(
    st.integers(4, 30),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(-(10**15), 10**15),
    st.integers(0, 1000),
)
def test_whatever_was_lost_and_however_clocks_differ_the_same_calls_are_found(
    count: int, lost_first: int, lost_last: int, shift: int, seed: int
) -> None:
    ends = times(count, seed)
    kept = np.arange(count)[lost_first : count - lost_last]
    if len(kept) < max(3, count / 2):
        return
    summaries = [
        summary_of(0, rank_calls(ends)),
        summary_of(1, rank_calls(ends[kept] + shift, lateness=150_000)),
        summary_of(2, rank_calls(ends)),
    ]
    matched, _, _ = match_collectives(summaries)
    assert only(matched).rows.tolist() == [[row, i, row] for i, row in enumerate(kept.tolist())]


def test_short_calls_that_end_when_each_rank_has_its_turn_are_the_same_calls() -> None:
    """Ranks that share a host's cores: on one clock all calls overlap; set by their ends the clocks would be apart."""
    ends = times(40, gap=100_000_000)
    turns = np.random.default_rng(1).integers(0, 40_000_000, (3, 40))
    turns[0] = 0
    summaries = [
        summary_of(rank, calls_at(ends - 1_000_000, ends + turns[rank], sequence=np.arange(40)))
        for rank in range(3)
    ]
    matched, _, quality = match_collectives(summaries)
    assert len(only(matched).rows) == 40
    assert quality == []
