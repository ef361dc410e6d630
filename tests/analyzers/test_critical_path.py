"""The critical path against brute force, against programs run without a part, and on real traces."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_tables import rank_of
from device_simulator import (
    CALL_NS,
    DELAY_NS,
    GAP_NS,
    Host,
    Launch,
    Step,
    StreamWait,
    Sync,
    parents_of,
    simulate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import trine
from trine.analyzers.reports import text as report
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies._path_graph import NEVER, Graph, graph_of
from trine.analyzers.studies._path_replay import Plan, Scenario, measured, plan_of, replay
from trine.analyzers.studies.critical_path import CriticalPath, PathPart, reduce
from trine.record.model import MISSING, Rank, Table

ALL = parse_selection("all")


def scope_of(rank: Rank) -> Scope:
    selected = select(rank, ALL)
    return Scope(rank, ALL, selected, ((rank, selected),), rank.collectives)


def path_of(rank: Rank) -> PathPart:
    parts = reduce(scope_of(rank))
    assert parts is not None
    return parts[0]


def graph_by(rank: Rank) -> Graph:
    graph = graph_of(rank, select(rank, ALL))
    assert graph is not None
    return graph


# --- programs ------------------------------------------------------------------------------------------

streams = st.sampled_from([7, 20, 24])
parts = st.one_of(
    st.builds(
        Launch,
        st.integers(500, 60_000),
        streams,
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([None, "aten::x", "aten::y"]),
        st.sampled_from(["compute", "compute", "communication", "copy"]),
    ),
    st.builds(Host, st.integers(200, 90_000), st.sampled_from([None, "aten::host", "python"])),
    st.builds(Sync, streams, st.just("cudaStreamSynchronize"), st.sampled_from([None, "aten::item"])),
    st.builds(StreamWait, streams, streams).filter(lambda part: part.stream != part.other),
)
programs = st.lists(
    st.lists(parts, min_size=1, max_size=25).map(lambda body: Step((Launch(1_000), *body))),
    min_size=1,
    max_size=3,
)


def slowly(plan: Plan, scenario: Scenario) -> int:
    """The recurrence as it is written, one event after the other."""
    graph, waits = plan.graph, plan.graph.waits
    nodes = sorted(
        [(int(time), 0, wait) for wait, time in enumerate(waits.end)]
        + [(int(time), 1, work) for work, time in enumerate(graph.start)]
    )
    returned = [0]
    end: dict[int, int] = {}
    lane_end: dict[int, int] = {}
    epoch_of_wait = [
        sum(1 for end_ns in waits.end[:number] if end_ns <= begun) for number, begun in enumerate(waits.start)
    ]
    for _, kind, row in nodes:
        if kind == 0:
            back = max(
                returned[epoch_of_wait[row]] + int(scenario.call[row]) + int(scenario.cost[row]), returned[-1]
            )
            if waits.work[row] >= 0 and scenario.held[row]:
                back = max(back, end[int(waits.work[row])] + int(scenario.after[row]))
            returned.append(back)
            continue
        ready = lane_end.get(int(graph.lane[row]), 0) + int(plan.gap[row])
        if graph.dependency[row] >= 0:
            ready = max(ready, end[int(graph.dependency[row])])
        if scenario.ready[row] > NEVER // 2:
            epoch = int((waits.end <= graph.launch[row]).sum())
            ready = max(ready, returned[epoch] + int(scenario.ready[row]))
        end[row] = lane_end[int(graph.lane[row])] = ready + int(scenario.weight[row])
    return max([returned[-1] + scenario.tail, *lane_end.values()])


@given(programs, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=120)
def test_the_replay_is_the_recurrence_and_without_a_change_it_is_the_step(steps, told, random) -> None:
    graph = graph_by(simulate(steps, given=told))
    plan = plan_of(graph)
    base = measured(plan)
    gone = np.array([random.random() < 0.3 for _ in range(len(graph))])
    blind = np.array([random.random() < 0.5 for _ in range(len(graph.waits))], dtype=bool)
    shorter = replace(
        base,
        weight=np.where(gone, base.weight - (graph.end - graph.start), base.weight),
        held=base.held & ~blind,
    )
    lengths = replay(plan, [base, shorter])
    assert lengths[0] == graph.end_ns - graph.begin_ns
    assert lengths.tolist() == [slowly(plan, base), slowly(plan, shorter)]
    assert lengths[1] <= lengths[0]


@given(programs, st.booleans())
@settings(max_examples=80)
def test_segments_sum_to_the_step_and_no_part_gains_more_than_it_holds(steps, told) -> None:
    path = path_of(simulate(steps, given=told))
    assert sum(path.segments_ns.values()) == path.length_ns
    assert sum(step.length_ns for step in path.steps) == path.length_ns
    for step in path.steps:
        assert sum(step.segments_ns.values()) == step.length_ns and step.length_ns >= 0
    for entry in path.entries:
        assert entry.gain_ns is not None and 0 <= entry.gain_ns <= path.length_ns
        if entry.kind in ("kernel", "copy", "collective"):
            # A nanosecond more where a launch and a rounded end fall together.
            assert entry.gain_ns <= entry.on_path_ns + 2 and entry.on_path_ns <= entry.total_ns


def test_a_program_run_without_its_kernel_is_as_much_shorter_as_foretold() -> None:
    def steps(middle: int) -> list[Step]:
        body = [
            Launch(40_000, name="first"),
            Launch(middle, name="middle"),
            Launch(30_000, 20, "side"),
            Sync(),
        ]
        return [Step((*body, Host(10_000, "aten::host"))) for _ in range(3)]

    path = path_of(simulate(steps(50_000)))
    gain = {entry.name: entry.gain_ns for entry in path.entries if entry.kind == "kernel"}
    real = path.length_ns - path_of(simulate(steps(0))).length_ns
    # A kernel of no length is not recorded, so its gap goes too.
    assert gain["middle"] == 3 * 50_000 and abs(real - gain["middle"]) <= 3 * GAP_NS
    assert gain.get("side", 0) == 0


def test_blocking_calls_are_foretold_by_the_program_without_them() -> None:
    def steps(blocking: bool) -> list[Step]:
        layer = [Launch(20_000, operator="aten::mm"), Host(8_000, "aten::view")]
        ask = [Sync(operator="aten::item")] if blocking else []
        return [Step(tuple((layer * 3 + ask) * 10)) for _ in range(3)]

    with_them = path_of(simulate(steps(True)))
    without = path_of(simulate(steps(False)))
    foretold = with_them.without_blocking_ns
    calls = 3 * 10 * (CALL_NS + 500)
    assert without.length_ns <= foretold <= without.length_ns + 2 * calls
    assert foretold < 0.9 * with_them.length_ns
    (entry,) = [entry for entry in with_them.entries if entry.kind == "blocking"]
    assert entry.name == "aten::item (cudaStreamSynchronize)" and entry.count >= 29
    assert not [entry for entry in without.entries if entry.kind == "blocking"]


def test_a_host_bound_step_runs_along_the_host_and_a_device_bound_one_along_the_kernels() -> None:
    host = path_of(simulate([Step(tuple([Launch(2_000), Host(30_000, "aten::python")] * 20))] * 2))
    device = path_of(simulate([Step(tuple([Launch(40_000), Host(1_000, "aten::view")] * 20))] * 2))
    assert host.segments_ns["operator"] > 0.9 * host.length_ns
    assert device.segments_ns["kernel"] > 0.9 * device.length_ns
    # The device alone would still take its kernels.
    assert host.without_host_ns < 0.25 * host.length_ns and device.without_host_ns > 0.95 * device.length_ns


def test_the_path_enters_another_stream_with_and_without_synchronisation_events() -> None:
    def steps(exchange: int) -> list[Step]:
        body = (
            Launch(30_000, name="before"), StreamWait(20, 7), Launch(exchange, 20, "ncclDevKernel", kind="communication"),
            Launch(20_000, name="hidden"), StreamWait(7, 20), Launch(30_000, name="after"),
        )  # fmt: skip
        return [Step(body)] * 2

    real = path_of(simulate(steps(200_000))).length_ns - path_of(simulate(steps(1))).length_ns
    for told in (True, False):
        path = path_of(simulate(steps(200_000), given=told))
        assert (path.given > 0) == told and (path.inferred > 0) != told
        assert path.segments_ns["communication"] == 2 * 200_000
        gain = {entry.name: entry.gain_ns for entry in path.entries if entry.kind in ("kernel", "collective")}
        assert gain.get("hidden", 0) == 0
        # Without the collective the kernel beside it is next in line.
        assert abs((gain["ncclDevKernel"] or 0) - real) <= 2 * GAP_NS < 0.01 * real


def test_waiting_for_an_event_waits_for_what_was_given_before_it_was_recorded() -> None:
    """The event lies between two kernels: the host goes on when the first has ended, the second still runs."""
    rank = simulate(
        [
            Step(
                (
                    Launch(50_000, name="first"),
                    Launch(400_000, name="second"),
                    Sync(name="cudaEventSynchronize"),
                )
            )
        ]
    )
    host, device = rank.host, rank.device
    assert host is not None and device is not None
    sync = int(np.flatnonzero(host["name"] == rank.strings.find("cudaEventSynchronize"))[0])
    host["end_ns"][sync] = device["end_ns"][0] + 4_000
    recorded = int(host["correlation"][int(device["launch"][1])])
    rank.synchronizations = Table(
        "synchronizations",
        {
            "kind": [rank.strings.code("event_sync")],
            "start_ns": [host["start_ns"][sync]],
            "end_ns": [host["end_ns"][sync]],
            "source_stream": [7],
            # Recorded when the second kernel was launched, which is then not waited for.
            "source_correlation": [recorded],
            "correlation": [host["correlation"][sync]],
        },
        rank.strings,
    )
    waits = graph_by(rank).waits
    assert device.text("name")[waits.work[waits.row == sync]].tolist() == ["first"]


def test_streams_that_are_not_named_are_inferred() -> None:
    body = (Launch(30_000), StreamWait(20, 7), Launch(200_000, 20, "ncclDevKernel", kind="communication"))
    rank = simulate([Step(body)] * 2, given=True)
    assert rank.synchronizations is not None
    rank.synchronizations["stream"][:] = MISSING
    path = path_of(rank)
    assert path.given == 0 and path.inferred >= 2


def test_work_that_two_streams_do_at_once_is_on_the_path_once() -> None:
    body = (Launch(50_000), Launch(100_000, 20, "long"), Sync(20), Sync(7))
    path = path_of(simulate([Step(body)]))
    assert (
        path.segments_ns["kernel"] == 100_000
        and path.length_ns < 100_000 + 2 * DELAY_NS + 6 * CALL_NS + 4_200
    )


def test_a_silent_host_that_goes_on_when_its_work_ends_was_waiting() -> None:
    rank = simulate([Step((Launch(900_000), Host(900_000 + DELAY_NS, "aten::cat"), Launch(10_000)))])
    path = path_of(rank)
    assert path.segments_ns["kernel"] >= 900_000 and path.segments_ns.get("operator", 0) < 50_000
    # Half as long, it ends in the middle of the kernel, and nothing says that it waited.
    busy = path_of(simulate([Step((Launch(300_000), Host(450_000, "aten::cat"), Launch(10_000)))]))
    assert busy.segments_ns["operator"] >= 450_000


def test_work_launched_before_the_trace_is_what_the_first_blocking_call_waits_for() -> None:
    rank = simulate([Step((Launch(900_000), Sync(), Host(10_000, "aten::view"), Launch(10_000)))])
    assert rank.device is not None
    rank.device.columns["launch"][0] = -1
    rank.device.columns["step"][0] = MISSING
    path = path_of(rank)
    assert path.segments_ns["kernel"] >= 900_000 and path.segments_ns["synchronization"] < 10_000


def test_a_bare_launching_call_is_not_taken_for_the_work_it_launches() -> None:
    rank = simulate([Step(tuple([Launch(50_000)] * 20))])
    called = [entry for entry in path_of(rank).entries if entry.name == "cudaLaunchKernel"]
    assert all(entry.total_ns <= 20 * CALL_NS for entry in called)
    owned = path_of(simulate([Step(tuple([Launch(50_000, operator="aten::mm")] * 20))]))
    (product,) = [entry for entry in owned.entries if entry.name == "aten::mm"]
    assert product.total_ns >= 20 * 50_000


# --- real traces ---------------------------------------------------------------------------------------


def analysed(path: Path) -> CriticalPath:
    found = result_of(trine.analyze(trine.load(path), workers=1), "critical_path", CriticalPath)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "category", "share"),
    [
        ("a100_nccl_metadata.json.gz", "operator", 0.8),
        ("v100_ns_resolution.json.gz", "kernel", 0.95),
        ("torch1.9_resnet50_workers0.json.gz", "loader", 0.25),
        ("h100_qwen1.5_0.5b.json.gz", "kernel", 0.55),
    ],
)
def test_real_traces_replay_to_within_half_a_percent(
    data: Path, name: str, category: str, share: float
) -> None:
    result = analysed(data / "traces" / "kineto" / "single" / name)
    (rank,) = result.ranks
    assert result.job is None
    assert sum(rank.segments_ns.values()) == rank.length_ns
    assert abs(rank.replay_error) < 0.005
    assert rank.segments_ns[category] > share * rank.length_ns


def test_the_path_of_the_job_runs_through_the_rank_that_sleeps(data: Path) -> None:
    job = analysed(data / "traces" / "kineto" / "torchrec_straggler_v100").job
    assert job is not None
    first = job.ranks[0]
    assert first.rank == 2 and first.on_path_ns > 0.95 * job.length_ns
    assert first.segments_ns["python"] > 0.85 * job.length_ns
    # It sleeps a second a step, and two steps are complete.
    assert job.without[0].ranks == (2,) and abs(job.without[0].gain_ns - 2e9) < 0.05e9
    assert job.length_ns == job.communication_ns + sum(rank.on_path_ns for rank in job.ranks)


def test_the_path_of_the_job_runs_through_a_rank_that_is_truly_late(data: Path) -> None:
    result = analysed(data / "traces" / "kineto" / "megatron_tp8_a100")
    assert result.job is not None
    assert result.job.ranks[0].rank in (0, 6) and result.job.ranks[0].on_path_ns > 0.9 * result.job.length_ns
    assert result.job.without[-1].ranks == (0, 6)
    by_rank = {rank.rank: rank for rank in result.ranks}
    # The late ranks wait for nobody, the ones that are early for them.
    assert all(
        by_rank[rank].segments_ns.get("waiting", 0) < 0.02 * by_rank[rank].length_ns for rank in (0, 6)
    )
    assert by_rank[4].segments_ns["waiting"] > 0.5 * by_rank[4].length_ns


@pytest.mark.parametrize("name", ["gloo_ddp4_cpu", "torchrec_straggler_v100", "megatron_tp8_a100"])
def test_nobody_is_named_for_whom_nobody_waited(data: Path, name: str) -> None:
    """A rank that merely ended last made no other rank wait: it must not stand beside one that did."""
    analysis = trine.analyze(trine.load(data / "traces" / "kineto" / name), workers=1)
    found = result_of(analysis, "critical_path", CriticalPath)
    assert found is not None and found.job is not None and found.job.without
    caused = {
        rank.summary.rank: rank.communication.caused_wait_ns
        for rank in analysis.ranks
        if rank.communication is not None
    }
    named = {rank for one in found.job.without for rank in one.ranks}
    assert named and all(caused[rank] > 0 for rank in named)


def test_a_pair_is_told_with_what_its_costlier_rank_costs_alone(data: Path) -> None:
    analysis = trine.analyze(trine.load(data / "traces" / "kineto" / "megatron_tp8_a100"), workers=1)
    text = " ".join(report.render(analysis).split())
    assert "had nobody waited for ranks 0 and 6, the job would have been 18.7 ms shorter" in text
    assert "(for rank 0 alone 7.11 ms)" in text


def test_parts_stay_small(data: Path) -> None:
    for name in ("megatron_tp8_a100", "gloo_ddp4_cpu"):
        job = trine.load(data / "traces" / "kineto" / name)
        rank = next(iter(job))
        part: Any = reduce(scope_of(rank))
        assert len(pickle.dumps(part)) < 30_000


def test_between_collectives_no_nanosecond_is_lost(data: Path) -> None:
    for name in ("megatron_tp8_a100", "torchrec_straggler_v100", "gloo_ddp4_cpu"):
        for rank in trine.load(data / "traces" / "kineto" / name):
            selected = select(rank, parse_selection("complete"))
            parts = reduce(Scope(rank, ALL, selected, ((rank, selected),), rank.collectives))
            assert parts is not None and parts[0].links is not None and rank.collectives is not None
            links = parts[0].links
            start = np.append(rank.collectives["start_ns"][links.row], links.end_ns)
            end = np.append(rank.collectives["end_ns"][links.row], links.begin_ns)
            spanned = start - end[links.previous]
            # A collective that another one of its rank overlaps begins before that one's end.
            assert (links.between.sum(axis=1) == np.maximum(spanned, 0)).all()


# --- whatever a trace may hold ---------------------------------------------------------------------------

device_spans = st.lists(
    st.tuples(
        st.integers(-50, 400),  # start
        st.integers(0, 120),  # length: also none, also overlapping on one stream
        st.sampled_from(["compute", "communication", "copy"]),
        st.one_of(st.none(), st.integers(0, 14)),  # which host row launched it, whatever that is
        st.sampled_from([7, 7, 20]),
        st.sampled_from(["a", "b", "nccl"]),
        st.sampled_from([0, 1, MISSING]),
    ),
    min_size=1,
    max_size=14,
)
host_spans = st.lists(
    st.tuples(
        st.integers(-50, 400),
        st.integers(0, 200),
        st.sampled_from(["runtime", "sync", "operator", "python", "annotation", "loader", "collector"]),
        st.sampled_from(
            ["cudaLaunchKernel", "cudaStreamWaitEvent", "cudaDeviceSynchronize", "aten::x", "gloo:all_reduce"]
        ),
        st.integers(1, 3),
    ),
    max_size=15,
)


@given(device_spans, host_spans, st.booleans(), st.sampled_from([1, 1_000, 100_000]))
@settings(max_examples=100)
def test_any_tables_give_a_path_that_sums_and_a_replay_that_is_exact(device, host, marked, scale) -> None:
    rows = [
        {"start_ns": s * scale, "end_ns": (s + n) * scale, "kind": kind, "name": name, "thread": thread}
        for s, n, kind, name, thread in host
    ]
    around = parents_of(rows)
    rank = rank_of(
        device=[
            (
                s * scale,
                (s + n) * scale,
                kind,
                -1 if launch is None or launch >= len(rows) else launch,
                step,
                name,
                stream,
            )
            for s, n, kind, launch, stream, name, step in device
        ],
        host=[
            (row["start_ns"], row["end_ns"], row["kind"], row["name"], row["thread"], parent)
            for row, parent in zip(rows, around, strict=True)
        ],
        steps=[(0, -60 * scale, 200 * scale), (1, 200 * scale, 700 * scale)] if marked else None,
    )
    graph = graph_of(rank, select(rank, ALL))
    parts = reduce(scope_of(rank))
    assert (parts is None) == (graph is None or graph.end_ns <= graph.begin_ns)
    if parts is None or graph is None:
        return
    path = parts[0]
    assert sum(path.segments_ns.values()) == path.length_ns == graph.end_ns - graph.begin_ns
    assert all(amount > 0 for amount in path.segments_ns.values())
    assert sum(step.length_ns for step in path.steps) == path.length_ns
    plan = plan_of(graph)
    assert replay(plan, [measured(plan)]).tolist() == [path.length_ns]
    assert all(0 <= (entry.gain_ns or 0) <= path.length_ns for entry in path.entries)
