"""From tables to rows of the timeline: everything with a time is drawn, once, in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dashboard_samples import MS, Recorder
from pipelines import rank_with

from trine.dashboard.lanes import DEEPEST, KINDS, RankLanes, build
from trine.record import load
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Strings, Table

T0 = 1_700_000_000_000_000_000


def rank_of(**tables: dict[str, list[int]]) -> Rank:
    strings = Strings(["a", "b", "c"])
    made = {name: Table(name, columns, strings) for name, columns in tables.items()}
    return Rank(0, "test", "kineto", strings, **made)  # type: ignore[arg-type]


def rows(lanes: RankLanes) -> dict[tuple[str, str, int], list[tuple[float, float, str, str]]]:
    return {
        (lane.group, lane.label, lane.depth): [
            (start, end, lanes.names[name], KINDS[kind])
            for start, end, name, kind in zip(lane.start, lane.end, lane.name, lane.kind, strict=True)
        ]
        for lane in lanes.lanes
    }


def test_streams_and_threads_by_depth() -> None:
    lanes = build(
        rank_of(
            device={
                "start_ns": [T0 + 5, T0 + 9, T0],
                "end_ns": [T0 + 8, T0 + 11, T0 + 2],
                "kind": [0, 1, 2],
                "device": [0, 0, 0],
                "stream": [7, 20, 7],
                "name": [0, 1, 2],
            },
            host={
                "start_ns": [T0 + 1, T0 + 2, T0 + 1],
                "end_ns": [T0 + 9, T0 + 3, T0 + 100],
                "kind": [0, 1, 3],
                "thread": [3, 3, 9],
                "name": [0, 1, 2],
                "parent": [-1, 0, -1],
            },
        )
    )
    assert lanes.origin_ns == T0 and (lanes.begin, lanes.end) == (0.0, 100.0)
    assert list(rows(lanes)) == [  # streams by number, the busiest thread first
        ("device", "stream 7", 0),
        ("device", "stream 20", 0),
        ("host", "thread 9", 0),
        ("host", "thread 3", 0),
        ("host", "thread 3", 1),
    ]
    assert rows(lanes)["device", "stream 7", 0] == [(0.0, 2.0, "c", "copy"), (5.0, 8.0, "a", "compute")]
    assert rows(lanes)["host", "thread 3", 1] == [(2.0, 3.0, "b", "runtime")]


def test_several_devices_are_named() -> None:
    place = {"start_ns": [T0, T0], "end_ns": [T0 + 1, T0 + 1], "device": [0, 1], "stream": [7, 7]}
    assert [lane.label for lane in build(rank_of(device=place)).lanes] == [
        "device 0 stream 7",
        "device 1 stream 7",
    ]


def test_what_has_no_time_is_left_out() -> None:
    table = {
        "start_ns": [T0, MISSING, T0 + 4],
        "end_ns": [T0 + 1, T0 + 2, T0 + 3],
        "stream": [1, 1, 1],
        "device": [0, 0, 0],
    }
    assert build(rank_of(device=table)).spans == 1
    empty = build(rank_of())
    assert empty.lanes == () and empty.spans == 0 and empty.end == 0.0


def test_collectives_without_a_device_row_have_lanes_of_their_own() -> None:
    table = {
        "operation": [0, 1, 0, 0],
        "issued_ns": [T0, T0 + 1, T0 + 20, MISSING],
        "start_ns": [T0, MISSING, T0 + 20, T0],
        "end_ns": [T0 + 10, T0 + 5, MISSING, T0 + 4],
        "device_row": [-1, -1, -1, 3],
    }
    lanes = rows(build(rank_of(collectives=table)))
    assert lanes == {
        ("collectives", "collectives", 0): [(0.0, 10.0, "a", "communication")],
        ("collectives", "collectives", 1): [(1.0, 5.0, "b", "communication")],
    }


def test_windows_of_a_record_join_its_own_lanes() -> None:
    def window(at: int) -> Rank:
        return rank_of(
            device={"start_ns": [at], "end_ns": [at + 5], "device": [0], "stream": [7], "name": [0]}
        )

    rank = rank_of(steps={"index": [1], "start_ns": [T0], "end_ns": [T0 + 100]})
    rank.windows = (window(T0 + 10), window(T0 + 50))
    assert rows(build(rank)) == {
        ("steps", "steps", 0): [(0.0, 100.0, "step 1", "step")],
        ("device", "stream 7", 0): [(10.0, 15.0, "a", "compute"), (50.0, 55.0, "a", "compute")],
    }


def test_phases_of_a_record_fill_their_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.steps(3, step_ns=40 * MS)
    lanes = build(load(tmp_path / "run").rank(0))
    phases = rows(lanes)["phases", "phases", 0]
    assert [(end - start, name) for start, end, name, _ in phases] == [
        (20e6, "forward"),
        (20e6, "backward"),
    ] * 3
    assert any("one after the other" in note for note in lanes.notes)


def test_micro_batches_of_a_pipeline_have_a_lane_and_say_what_they_did() -> None:
    iterations = {0: [("forward", 0, 0, 0, 10), ("backward_input", 0, 0, 10, 25), ("forward", 0, 1, 30, 40)]}
    rank = rank_with(0, iterations, {0: T0}, 2)
    found = rows(build(rank))
    assert list(found) == [("steps", "steps", 0), ("microbatches", "micro-batches", 0)]
    assert found["microbatches", "micro-batches", 0] == [
        (0.0, 10.0, "forward 0", "micro-batch:forward"),
        (10.0, 25.0, "backward of the input 0", "micro-batch:backward_input"),
        (30.0, 40.0, "forward 1", "micro-batch:forward"),
    ]


def test_chunks_of_a_rank_that_overlap_take_two_rows_and_name_their_stage() -> None:
    iterations = {0: [("forward", 0, 0, 0, 10), ("forward", 4, 0, 5, 15)]}
    found = rows(build(rank_with(0, iterations, {0: T0}, 4)))
    assert found["microbatches", "micro-batches", 0] == [
        (0.0, 10.0, "forward 0, stage 0", "micro-batch:forward")
    ]
    assert found["microbatches", "micro-batches", 1] == [
        (5.0, 15.0, "forward 0, stage 4", "micro-batch:forward")
    ]


def test_every_micro_batch_of_a_real_schedule_is_drawn(data: Path) -> None:
    rank = load(data / "traces" / "pipeline_schedule" / "pp8").rank(3)
    assert rank.microbatches is not None
    drawn = sum(len(lane) for lane in build(rank).lanes if lane.group == "microbatches")
    assert drawn == len(rank.microbatches) == 20 * 2 * 16


def test_very_deep_frames_are_cut_and_said() -> None:
    count = DEEPEST + 10
    lanes = build(
        rank_of(
            host={
                "start_ns": [T0 + at for at in range(count)],
                "end_ns": [T0 + 1000 - at for at in range(count)],
                "thread": [1] * count,
                "parent": list(range(-1, count - 1)),
            }
        )
    )
    assert len(lanes.lanes) == DEEPEST and "34 deep" in lanes.notes[0]


def test_kinds_cover_the_model() -> None:
    assert KINDS[: len(DEVICE_KINDS)] == DEVICE_KINDS
    assert KINDS[len(DEVICE_KINDS) : len(DEVICE_KINDS) + len(HOST_KINDS)] == HOST_KINDS


@pytest.mark.parametrize("folder", ["single", "odd", "gloo_ddp4_cpu"])
def test_every_real_trace_has_a_timeline(data: Path, folder: str) -> None:
    for path in sorted((data / "traces" / "kineto" / folder).iterdir()):
        job = load(path)
        rank = job.rank(job.rank_ids[0])
        lanes = build(rank)
        events = sum(0 if table is None else len(table) for table in (rank.device, rank.host))
        assert lanes.spans > 0 or events == 0, path.name
        for lane in lanes.lanes:
            assert (np.diff(lane.start) >= 0).all() and (lane.end >= lane.start).all()
