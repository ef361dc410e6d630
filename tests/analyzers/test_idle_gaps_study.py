"""Idle time gap by gap: the causes are the breakdown's own, and each group says what ended it and what the host did."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from device_simulator import CALL_NS, DELAY_NS, Host, Launch, Step, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import trine
from trine.analyzers.breakdown import break_down
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies.idle_gaps import GapPart, IdleGaps, reduce
from trine.record.model import Rank

ALL = parse_selection("all")


def gaps_of(rank: Rank) -> GapPart:
    selected = select(rank, ALL)
    part = reduce(Scope(rank, ALL, selected, ((rank, selected),), None))
    assert part is not None
    return part


bodies = st.lists(
    st.one_of(
        st.builds(
            Launch,
            st.integers(500, 40_000),
            st.sampled_from([7, 20]),
            st.sampled_from(["a", "b"]),
            st.sampled_from([None, "aten::x"]),
        ),
        st.builds(
            Host,
            st.integers(200, 60_000),
            st.sampled_from([None, "aten::host", "enumerate(DataLoader)#x"]),
            st.sampled_from(["operator", "loader", "sync", "python"]),
        ),
    ),
    max_size=30,
)


@given(bodies)
@settings(max_examples=60)
def test_groups_of_any_program_sum_to_its_idle_causes(body) -> None:
    rank = simulate([Step((Launch(1_000), *body, Launch(1_000)))])
    part, (breakdown, _) = gaps_of(rank), break_down(rank, ALL)
    assert breakdown is not None
    assert part.causes_ns == asdict(breakdown.idle) and part.idle_ns == breakdown.idle_ns
    assert part.window_ns == breakdown.window_ns
    by_cause = dict.fromkeys(part.causes_ns, 0)
    for group in part.groups:
        by_cause[group.cause] += group.total_ns
        assert 0 < group.longest_ns <= group.total_ns and group.count > 0
    assert by_cause == part.causes_ns


def test_a_gap_names_its_launching_operator_and_what_the_host_did_before() -> None:
    body = (Launch(10_000), Host(80_000, "aten::slow"), Launch(10_000, name="gemm", operator="aten::mm"))
    groups = {group.cause: group for group in gaps_of(simulate([Step(body)])).groups}
    host = groups["host"]
    assert (host.operator, host.ended_by, host.doing, host.count) == ("aten::mm", "gemm", "aten::slow", 1)
    # From the first kernel's end to the launching call: the first call returned long before its kernel ended.
    assert host.total_ns == 80_000 + CALL_NS + CALL_NS // 2 - (DELAY_NS + 10_000)
    assert groups["dependency"].total_ns == DELAY_NS and groups["dependency"].doing is None


def test_waiting_for_the_loader_is_data_and_named() -> None:
    body = (Launch(10_000), Host(80_000, "enumerate(DataLoader)#x", "loader"), Launch(10_000))
    largest = gaps_of(simulate([Step(body)])).groups[0]
    assert largest.cause == "data" and largest.doing == "enumerate(DataLoader)#x"


def test_a_user_s_frame_is_preferred_to_a_library_s() -> None:
    rank = simulate([Step((Launch(10_000), Host(80_000), Launch(10_000, operator="aten::mm")))])
    assert rank.host is not None
    stack = "/x/site-packages/torch/nn/linear.py(1): forward;train.py(12): step;train.py(90): <module>"
    rank.host.columns["stack"][:] = rank.strings.code(stack)
    assert gaps_of(rank).groups[0].where == "train.py(12): step"


def test_real_traces_sum_and_point_at_what_their_makers_did(data: Path) -> None:
    traces = data / "traces" / "kineto"
    expected = {
        "torchrec_straggler_v100": ("host", "# running sparse arch"),
        "single/torch1.9_resnet50_workers0.json.gz": (
            "data",
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        ),
    }
    for name, said in expected.items():
        analysis = trine.analyze(trine.load(traces / name), workers=1)
        result = result_of(analysis, "idle_gaps", IdleGaps)
        assert result is not None
        assert (result.groups[0].cause, result.groups[0].doing) == said
        breakdowns = [rank.summary.breakdown for rank in analysis.ranks]
        assert result.idle_ns == sum(one.idle_ns for one in breakdowns if one is not None)
        for cause, amount in result.causes_ns.items():
            assert amount == sum(getattr(one.idle, cause) for one in breakdowns if one is not None)


def test_without_a_device_gaps_lie_between_operators(data: Path) -> None:
    rank = next(iter(trine.load(data / "traces" / "kineto" / "gloo_ddp4_cpu")))
    breakdown, _ = break_down(rank, parse_selection("complete"))
    selected = select(rank, parse_selection("complete"))
    part = reduce(Scope(rank, parse_selection("complete"), selected, ((rank, selected),), None))
    assert part is not None and breakdown is not None
    assert part.idle_ns == breakdown.idle_ns and part.causes_ns == asdict(breakdown.idle)
    assert any(group.doing == "Optimizer.step#AdamW.step" for group in part.groups)


def test_a_rank_without_a_breakdown_has_no_gaps() -> None:
    rank = replace(simulate([Step((Launch(1_000),))]), device=None, host=None)
    selected = select(rank, ALL)
    assert reduce(Scope(rank, ALL, selected, ((rank, selected),), None)) is None
