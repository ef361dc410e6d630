"""Files into which the traces of several processes were put: each is a rank, and nobody launches a stranger's work."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_builders import call, kernel, operator, step, written

from trine.record.model import MISSING, Job, Rank
from trine.record.readers.kineto import open_job, read_file

Json = dict[str, Any]
Digest = tuple[int, ...]


def digest(rank: Rank) -> Digest:
    """Rows of the tables and the sum of all times from a call to its work: another launch changes it."""
    assert rank.host is not None
    tables = (rank.host, rank.device, rank.steps, rank.collectives, rank.memory)
    counts = tuple(0 if table is None else len(table) for table in tables)
    if rank.device is None:
        return counts
    launch = rank.device["launch"]
    joined = launch >= 0
    lag = rank.device["start_ns"][joined] - rank.host["start_ns"][launch[joined]]
    return (*counts, int(joined.sum()), int(lag.sum()))


def ids(job: Job) -> set[str]:
    return {note.id for note in job.quality}


# --- real ranks, put together ----------------------------------------------------------------------


def in_containers(event: Json) -> Json:
    """The same event as where every rank is process 1 of its container and sees device 0 only."""
    event = dict(event)
    process = event.get("pid")
    if isinstance(process, int):
        on_host = process > 100
        event["pid"] = 1 if on_host else 0 if event["ph"] != "M" else process
        if isinstance(event.get("tid"), int) and on_host:
            event["tid"] %= 10
    if "device" in event.get("args", ()):
        event["args"] = {**event["args"], "device": 0}
    return event


def on_one_device(event: Json) -> Json:
    """The same event where every rank sees device 0 only."""
    if "device" not in event.get("args", ()):
        return event
    return {**event, "pid": 0, "args": {**event["args"], "device": 0}}


def merged(
    folder: Path, change: Callable[[Json], Json] = dict, by_time: bool = False, marks: bool = True
) -> Json:
    """The traces of a folder as one."""
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))]
    events = [change(event) for trace in traces for event in trace["traceEvents"]]
    if not marks:
        events = [event for event in events if event.get("cat") != "Trace" and event["ph"] != "i"]
    if by_time:
        events.sort(key=lambda event: event.get("ts", 0))
    return {**traces[0], "traceEvents": events}


@pytest.mark.parametrize(
    ("change", "by_time", "marks"),
    [
        (dict, False, True),
        (dict, True, True),
        (dict, True, False),
        (on_one_device, False, True),
        (on_one_device, False, False),
        (in_containers, False, True),
        (in_containers, False, False),
    ],
    ids=[
        "one after the other",
        "by time",
        "by time, without closing marks",
        "one device number",
        "one device number, without closing marks",
        "one process number",
        "one process number, without closing marks",
    ],
)
def test_ranks_in_one_file_are_read_as_from_their_own(
    data: Path, tmp_path: Path, change: Callable[[Json], Json], by_time: bool, marks: bool
) -> None:
    folder = data / "traces" / "kineto" / "torchrec_straggler_v100"
    path = written(tmp_path / "all.json", merged(folder, change, by_time, marks))
    job = open_job(path)
    assert job.rank_ids == (0, 1, 2, 3) and job.world_size == 4
    assert "merged-file" in ids(job)
    assert sorted(map(digest, job)) == sorted(map(digest, open_job(folder)))


@pytest.mark.slow
def test_ranks_of_gloo_in_one_file(data: Path, tmp_path: Path) -> None:
    folder = data / "traces" / "kineto" / "gloo_ddp4_cpu"
    job = open_job(written(tmp_path / "all.json.gz", merged(folder)))
    assert [digest(rank) for rank in job] == [digest(rank) for rank in open_job(folder)]


@pytest.mark.parametrize("change", [on_one_device, in_containers])
def test_what_cannot_be_told_apart_is_launched_by_nobody(
    data: Path, tmp_path: Path, change: Callable[[Json], Json]
) -> None:
    """Sorted by time and with one device number nothing says whose a kernel is; then it is nobody's, and that is said."""
    folder = data / "traces" / "kineto" / "torchrec_straggler_v100"
    truth: dict[tuple[int, int], set[int]] = {}
    for rank in open_job(folder):
        for start, correlation, begun in _launches(rank):
            truth.setdefault((start, correlation), set()).add(begun)
    ranks = list(open_job(written(tmp_path / "all.json", merged(folder, change, by_time=True))))
    pairs = [pair for rank in ranks for pair in _launches(rank)]
    wrong = sum(begun not in truth.get((start, correlation), ()) for start, correlation, begun in pairs)
    # A kernel whose own call, and a call whose own kernel, were not recorded look like a pair to anyone.
    assert len(pairs) > 500 and wrong <= 2
    said = {note.id for rank in ranks for note in rank.quality}
    assert said & {"unclear-owner", "colliding-correlations"}


def _launches(rank: Rank) -> list[tuple[int, int, int]]:
    assert rank.device is not None and rank.host is not None
    joined = rank.device["launch"] >= 0
    return list(
        zip(
            rank.device["start_ns"][joined].tolist(),
            rank.device["correlation"][joined].tolist(),
            rank.host["start_ns"][rank.device["launch"][joined]].tolist(),
            strict=True,
        )
    )


# --- small ones ------------------------------------------------------------------------------------


def process(number: Any, device: int, at: float, *, label: str | None = None, count: int = 10) -> list[Json]:
    """A step of one process with as many launches; correlations 1, 2, ... as every process has them."""
    events = [step(1, at, 100.0 * count + 50)]
    for index in range(count):
        events.append(operator("aten::mm", at + 100 * index, 20))
        events.append(call("cudaLaunchKernel", at + 100 * index + 5, 5, index + 1))
    own = [{**event, "pid": number} for event in events]
    own += [
        {**kernel(f"gemm_{device}", at + 100 * index + 30, 40, index + 1, device=device), "pid": device}
        for index in range(count)
    ]
    name = {"ph": "M", "name": "process_name", "pid": number, "args": {"name": label or "python"}}
    return [*own, name]


def test_the_owner_of_a_device_is_who_called(tmp_path: Path) -> None:
    """All correlations collide, and the file is in order of time: the ranks run half a call apart."""
    events = sorted(
        process(100, 4, 1000.0) + process(101, 5, 1050.0), key=lambda event: float(event.get("ts", 0))
    )
    first, second = open_job(written(tmp_path / "t.json", {"traceEvents": events}))
    for rank, name in ((first, "gemm_4"), (second, "gemm_5")):
        assert rank.device is not None and rank.host is not None
        assert set(rank.device.text("name").tolist()) == {name}
        lag = rank.device["start_ns"] - rank.host["start_ns"][rank.device["launch"]]
        assert set(lag.tolist()) == {25_000}
        assert rank.steps is not None and len(rank.steps) == 1


def test_ranks_by_their_labels(tmp_path: Path) -> None:
    events = process(100, 0, 1000.0, label="rank 6") + process(101, 0, 1010.0, label="Rank: 2")
    job = open_job(written(tmp_path / "t.json", {"traceEvents": events}))
    assert job.rank_ids == (2, 6) and "missing-ranks" in ids(job)
    events = process("[rank5] 100", 0, 1000.0) + process("[rank7] 100", 0, 1010.0)
    assert open_job(written(tmp_path / "u.json", {"traceEvents": events})).rank_ids == (5, 7)


def test_a_rank_of_a_merged_file_is_read_in_another_process(tmp_path: Path) -> None:
    events = process(100, 0, 1000.0) + process(101, 1, 1010.0)
    job = open_job(written(tmp_path / "t.json", {"traceEvents": events}))
    away = pickle.loads(pickle.dumps(job.sources[1]))
    assert digest(away.read(away)) == digest(job.rank(1))
    assert len(pickle.dumps(job.sources[1])) < 2_000


def test_among_other_files_the_busiest_process_is_kept_and_that_is_said(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.json", {"traceEvents": process(100, 0, 1000.0) + process(101, 1, 1010.0, count=20)}
    )
    rank = read_file(path)
    assert rank.device is not None and set(rank.device.text("name").tolist()) == {"gemm_1"}
    assert "merged-file" in {note.id for note in rank.quality}


def test_windows_of_one_process_are_one_rank(tmp_path: Path) -> None:
    """The control: one process that recorded twice, with correlations that begin again."""
    closing = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "ts": 0, "dur": 9}
    events = [*process(100, 0, 1000.0), closing, *process(100, 0, 90_000.0), closing]
    job = open_job(written(tmp_path / "t.json", {"traceEvents": events}))
    assert job.rank_ids == (0,) and "merged-file" not in ids(job)
    rank = job.rank(0)
    assert rank.device is not None and rank.host is not None and (rank.device["launch"] >= 0).all()
    lag = rank.device["start_ns"] - rank.host["start_ns"][rank.device["launch"]]
    assert set(lag.tolist()) == {25_000}


def test_a_stray_process_id_makes_no_rank(tmp_path: Path) -> None:
    stray = {**operator("record", 1000, 10), "cat": "user_annotation", "pid": 77}
    job = open_job(written(tmp_path / "t.json", {"traceEvents": [*process(100, 0, 1000.0), stray]}))
    rank = job.rank(0)
    assert job.rank_ids == (0,) and "several-process-ids" in {note.id for note in rank.quality}


def test_a_call_and_the_call_inside_it_are_one_launch(tmp_path: Path) -> None:
    """Level Zero under SYCL: both have the kernel's correlation, and it is no collision."""
    inner = {**call("zeCommandListAppendLaunchKernel", 11, 5, 5), "cat": "xpu_driver"}
    outer = {**call("urEnqueueKernelLaunch", 10, 8, 5), "cat": "xpu_runtime"}
    rank = read_file(written(tmp_path / "t.json", {"traceEvents": [outer, inner, kernel("k", 30, 5, 5)]}))
    assert rank.device is not None and rank.host is not None
    assert rank.host.text("name")[rank.device["launch"][0]] == "zeCommandListAppendLaunchKernel"
    assert "colliding-correlations" not in {note.id for note in rank.quality}


def test_two_calls_of_one_correlation_before_both_kernels(tmp_path: Path) -> None:
    calls = [call("cudaLaunchKernel", 10, 2, 5, tid=1), call("cudaLaunchKernel", 15, 2, 5, tid=2)]
    both_after = [kernel("a", 30, 5, 5), kernel("b", 40, 5, 5)]
    rank = read_file(written(tmp_path / "t.json", {"traceEvents": calls + both_after}))
    assert rank.device is not None and (rank.device["launch"] == -1).all()
    assert (rank.device["step"] == MISSING).all()
    assert "colliding-correlations" in {note.id for note in rank.quality}
    between = [kernel("a", 13, 1, 5), kernel("b", 40, 5, 5)]
    rank = read_file(written(tmp_path / "u.json", {"traceEvents": calls + between}))
    assert rank.device is not None and rank.host is not None
    assert rank.host["start_ns"][rank.device["launch"]].tolist() == [10_000, 15_000]
    assert np.count_nonzero(rank.device["launch"] < 0) == 0
