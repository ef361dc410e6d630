"""Nsight Systems: what each table becomes, over the schemas and with what may be missing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nsight_exports import (
    COMMUNICATOR,
    GEMM,
    KERNEL,
    MATMUL,
    NEW_COLUMNS,
    REDUCE,
    REDUCTION,
    SESSION_NS,
    STEP,
    Training,
    build,
    payload,
    pid_of,
)

import trine
from trine.record.errors import UnreadableInput
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Job, Rank
from trine.record.readers import nsight
from trine.record.readers._nsight_nesting import enclosing_rows
from trine.record.readers._nsight_ranges import operator_name
from trine.record.readers._nsight_work import kernel_name


def notes(holder: Rank | Job) -> dict[str, str]:
    return {note.id: note.message for note in holder.quality}


def of_kind(rank: Rank, table: str, kind: str) -> list[str | None]:
    found = getattr(rank, table)
    kinds = DEVICE_KINDS if table == "device" else HOST_KINDS
    return list(found.text("name")[found["kind"] == kinds.index(kind)])


def test_kernels_copies_calls_and_ranges_become_tables(tmp_path: Path) -> None:
    job = trine.load(build(tmp_path / "a.sqlite"))
    assert (job.format, job.rank_ids, job.world_size) == ("nsight", (0, 1), 2)
    rank = job.rank(1)
    assert of_kind(rank, "device", "compute") == [GEMM] * 4
    assert of_kind(rank, "device", "copy") == ["Memcpy HtoD (Pageable -> Device)"] * 4
    assert rank.device is not None and rank.host is not None
    gemm = np.flatnonzero(rank.device.text("name") == GEMM)
    assert set(rank.device["end_ns"][gemm] - rank.device["start_ns"][gemm]) == {MATMUL}
    assert set(rank.device["grid_blocks"][gemm]) == {128} and set(rank.device["block_threads"][gemm]) == {128}
    assert (rank.device["device"] == 1).all()
    launch = rank.device["launch"]
    assert (launch >= 0).all()
    assert set(rank.host.text("name")[launch[gemm]]) == {"cudaLaunchKernel"}  # no version in it
    assert of_kind(rank, "host", "operator") == ["aten::mm"] * 4
    inside = rank.host["parent"][launch[gemm]]
    assert set(rank.host.text("name")[inside]) == {"aten::mm"}
    assert set(rank.host.text("shapes")[inside]) == {"[[64, 32], [32, 8]]"}
    assert sorted(rank.host["sequence"][inside]) == [0, 1, 2, 3]
    # What blocks the host is a wait: synchronisations, and copies of pageable memory.
    assert sorted(of_kind(rank, "host", "sync")) == ["cudaMemcpyAsync"] * 4 + ["cudaStreamSynchronize"] * 4


def test_steps_come_from_ranges_and_times_are_unix_time(tmp_path: Path) -> None:
    rank = trine.load(build(tmp_path / "a.sqlite")).rank(0)
    assert rank.steps is not None and rank.device is not None
    assert list(rank.steps["index"]) == [10, 11, 12, 13]
    assert rank.steps["start_ns"][0] == SESSION_NS
    assert sorted(set(rank.device["step"])) == [10, 11, 12, 13]
    assert "'step'" in notes(rank)["steps-from-annotations"]
    shifted = trine.load(build(tmp_path / "b.sqlite", start_ns=None)).rank(0)
    assert shifted.steps is not None and shifted.steps["start_ns"][0] == 0


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("ProfilerStep#{}", [10, 11, 12, 13]),
        ("iteration{}", [10, 11, 12, 13]),
        ("train_step", [0, 1, 2, 3]),
        ("[pl][profile]run_training_batch", [0, 1, 2, 3]),
        ("Step [{}/99]", [10, 11, 12, 13]),
        ("epoch 1, batch {}", [10, 11, 12, 13]),
        ("epoch {}", None),
        ("1 batch of {}", None),
        ("batch_to_device", None),
        ("optimizer_step {}", None),
        ("layer {}", None),
        ("forward step {}", None),
    ],
)
def test_what_is_called_like_a_step(tmp_path: Path, name: str, numbers: list[int] | None) -> None:
    rank = trine.load(build(tmp_path / "a.sqlite", Training(step_name=name))).rank(0)
    assert (None if rank.steps is None else list(rank.steps["index"])) == numbers


def test_nccl_ranges_name_the_collectives(tmp_path: Path) -> None:
    training = Training(late_ns=4_000_000)
    for form in ("binary", "json"):
        path = build(tmp_path / f"{form}.sqlite", Training(late_ns=4_000_000, payloads=form))
        rank = trine.load(path).rank(0)
        assert rank.collectives is not None
        assert list(rank.collectives.text("operation")) == ["all_reduce"] * training.steps
        assert set(rank.collectives["bytes"]) == {4096}
        assert set(rank.collectives.text("group")) == {f"nccl {COMMUNICATOR:x}"}
        assert set(rank.collectives["end_ns"] - rank.collectives["start_ns"]) == {REDUCE + 4_000_000}
    analysis = trine.analyze(trine.load(path))
    assert [rank.communication.last_in for rank in analysis.ranks if rank.communication] == [0, 3]
    (row,) = analysis.collectives
    assert (row.op, row.calls, row.transfer_ns, row.wait_ns) == ("all_reduce", 3, 3 * REDUCE, 3 * 4_000_000)


def test_a_group_of_sends_and_receives_is_an_all_to_all(tmp_path: Path) -> None:
    """PyTorch does an all-to-all as one group of a send and a receive for each rank."""
    tid, start = pid_of(0) + 1, 200_000_000

    def call(name: str, begin: int, end: int, blob: bytes | None = None) -> dict[str, object]:
        return {"start": begin, "end": end, "eventType": 59, "text": name, "textId": None, "globalTid": tid, "domainId": 1, "binaryData": blob, "jsonText": None}  # fmt: skip

    said = payload(16777226, COMMUNICATOR, 512, 1, form="<QQi4x")
    ranges = [call("ncclGroupStart", start, start + 100)]
    ranges += [
        call(name, start + 1_000 * k, start + 1_000 * k + 500, said)
        for k, name in enumerate(["ncclSend", "ncclRecv"] * 2, 1)
    ]
    ranges += [call("ncclGroupEnd", start + 10_000, start + 40_000)]
    pair = start + 1_000_000
    ranges += [call("ncclSend", pair, pair + 20_000, said)]
    launches = [
        {
            "start": at + 12_000 - 11_000 * (at == pair),
            "end": at + 13_000 - 11_000 * (at == pair),
            "globalTid": tid,
            "correlationId": number,
            "nameId": 1,
        }
        for number, at in ((9001, start), (9002, pair))
    ]
    kernels = [
        {
            "start": at + 50_000,
            "end": at + 90_000,
            "deviceId": 0,
            "contextId": 1,
            "streamId": 15,
            "correlationId": number,
            "globalPid": pid_of(0),
            "demangledName": 2,
        }
        for number, at in ((9001, start), (9002, pair))
    ]
    strings = [
        {"id": 1, "value": "cuLaunchKernelEx"},
        {"id": 2, "value": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)"},
    ]
    path = build(tmp_path / "a.sqlite")
    add_rows(
        path,
        {
            "NVTX_EVENTS": ranges,
            "CUPTI_ACTIVITY_KIND_RUNTIME": launches,
            "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
            "StringIds": strings,
        },
    )
    table = trine.load(path).rank(0).collectives
    assert table is not None
    assert list(table.text("operation"))[-2:] == ["all_to_all", "send"]
    assert list(table["bytes"])[-2:] == [1024, 512]
    assert list(table["peer"])[-2:] == [MISSING, 1]


def add_rows(path: Path, rows: dict[str, list[dict[str, object]]]) -> None:
    with sqlite3.connect(path) as connection:
        for table, each in rows.items():
            for row in each:
                names = ", ".join(f'"{name}"' for name in row)
                connection.execute(
                    f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", list(row.values())
                )
    connection.close()


# --- what may be missing -------------------------------------------------------------------------


def test_an_old_schema_lacks_columns_and_is_read_all_the_same(tmp_path: Path) -> None:
    old = trine.load(build(tmp_path / "old.sqlite", lacking=NEW_COLUMNS)).rank(0)
    assert old.device is not None and (old.device["graph_node"] == MISSING).all()
    assert old.collectives is not None
    assert (
        set(old.collectives.text("operation")) == {"all_reduce"}
        and (old.collectives["bytes"] == MISSING).all()
    )


TABLES = [
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
    "TARGET_INFO_GPU",
    "TARGET_INFO_SESSION_START_TIME",
    "TARGET_INFO_SYSTEM_ENV",
    "META_DATA_EXPORT",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES",
]


@pytest.mark.parametrize("table", TABLES)
def test_any_table_may_be_absent(tmp_path: Path, table: str) -> None:
    analysis = trine.analyze(trine.load(build(tmp_path / "a.sqlite", without=[table])))
    assert len(analysis.ranks) == 2
    said = {note.id for note in analysis.data_quality}
    if table in TABLES[:4] and table != "CUPTI_ACTIVITY_KIND_MEMCPY":
        assert "nsight-tables-absent" in said
    if table == "TARGET_INFO_GPU":
        assert "nsight-no-device-name" in said


@pytest.mark.parametrize(
    "column",
    ["globalPid", "deviceId", "streamId", "correlationId", "contextId", "demangledName", "gridX", "blockZ"],
)
def test_any_column_of_kernels_may_be_absent(tmp_path: Path, column: str) -> None:
    tables = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")
    path = build(tmp_path / "a.sqlite", lacking={table: {column} for table in tables})
    # Without correlations no work has a launch, and so no step.
    analysis = trine.analyze(trine.load(path), steps="all" if column == "correlationId" else "complete")
    assert len(analysis.ranks) == 2
    assert all(rank.summary.breakdown is not None for rank in analysis.ranks)


def test_kernels_without_a_process_go_to_the_process_whose_calls_explain_them(tmp_path: Path) -> None:
    tables = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")
    job = trine.load(build(tmp_path / "a.sqlite", lacking={table: {"globalPid"} for table in tables}))
    assert job.rank_ids == (0, 1) and "no globalPid" in notes(job)["nsight-no-process"]
    for rank in job:
        assert rank.device is not None and rank.host is not None
        assert set(rank.device["device"]) == {rank.rank}
        assert (rank.device["launch"] >= 0).all() and (rank.host.text("name") == "aten::mm").sum() == 4


def test_one_process_with_two_devices_is_two_ranks(tmp_path: Path) -> None:
    job = trine.load(
        build(tmp_path / "a.sqlite", Training(processes=1, devices_per_process=2, payloads=None))
    )
    assert job.rank_ids == (0, 1) and "drives 2 devices" in notes(job)["nsight-one-process"]
    assert [set(rank.device["device"]) for rank in job if rank.device is not None] == [{0}, {1}]
    assert "shared-host" in notes(job.rank(0))


def test_one_thread_that_reduces_for_two_devices_counts_each_devices_bytes(tmp_path: Path) -> None:
    path = build(tmp_path / "a.sqlite", Training(processes=1, devices_per_process=2, payloads=None))
    tid, start = pid_of(0) + 1, 200_000_000
    blob = payload(16777223, COMMUNICATOR, 4096, 0, form="<QQQ")
    names = ("ncclGroupStart", "ncclAllReduce", "ncclAllReduce", "ncclGroupEnd")
    ranges = [
        {"start": start + 100 * k, "end": start + 100 * k + (50 if name != "ncclGroupEnd" else 9_000), "eventType": 59, "text": name, "globalTid": tid, "domainId": 1, "binaryData": blob if name == "ncclAllReduce" else None}
        for k, name in enumerate(names)
    ]  # fmt: skip
    calls = [{"start": start + 1_000 * k, "end": start + 1_000 * k + 500, "globalTid": tid, "correlationId": 9_000 + k, "nameId": 1} for k in (1, 2)]  # fmt: skip
    kernels = [{"start": start + 20_000, "end": start + 90_000, "deviceId": k - 1, "streamId": 15, "correlationId": 9_000 + k, "globalPid": pid_of(0), "demangledName": 2} for k in (1, 2)]  # fmt: skip
    strings = [{"id": 1, "value": "cuLaunchKernelEx"}, {"id": 2, "value": REDUCTION}]
    add_rows(path, {"NVTX_EVENTS": ranges, "CUPTI_ACTIVITY_KIND_RUNTIME": calls, "CUPTI_ACTIVITY_KIND_KERNEL": kernels, "StringIds": strings})  # fmt: skip
    for rank in trine.load(path):
        assert rank.collectives is not None
        assert (rank.collectives.text("operation")[-1], rank.collectives["bytes"][-1]) == ("all_reduce", 4096)


def test_a_kernel_on_anothers_device_makes_no_second_rank(tmp_path: Path) -> None:
    path = build(tmp_path / "a.sqlite", Training(steps=20))
    stray = {
        "start": 0,
        "end": 10,
        "deviceId": 0,
        "contextId": 9,
        "streamId": 7,
        "correlationId": 1,
        "globalPid": pid_of(1),
    }
    add_rows(path, {"CUPTI_ACTIVITY_KIND_KERNEL": [stray]})
    job = trine.load(path)
    assert job.rank_ids == (0, 1)
    device = job.rank(1).device
    assert device is not None and sorted(set(device["device"])) == [0, 1]


def test_device_work_without_a_name_is_still_work(tmp_path: Path) -> None:
    rank = trine.load(build(tmp_path / "a.sqlite", without=["StringIds"])).rank(0)
    assert set(of_kind(rank, "device", "compute")) == {"unnamed kernel"}


# --- whose rank it is ----------------------------------------------------------------------------


def test_ranks_are_those_that_nccl_stated(tmp_path: Path) -> None:
    """Devices are in another order than ranks: only the communicator's own ranks tell."""
    path = build(tmp_path / "a.sqlite", Training(payloads=None))
    blobs = [payload(16777218, COMMUNICATOR, 2, 1 - process, process, form="<Qiii4x") for process in (0, 1)]
    ranges = [
        {
            "start": -9,
            "end": -8,
            "eventType": 59,
            "text": "ncclCommInitRankConfig",
            "globalTid": pid_of(process) + 1,
            "domainId": 1,
            "binaryData": blob,
        }
        for process, blob in enumerate(blobs)
    ]
    add_rows(path, {"NVTX_EVENTS": ranges})
    job = trine.load(path)
    assert job.world_size == 2 and "rank-unknown" not in notes(job)
    device = job.rank(0).device
    assert device is not None and set(device["device"]) == {1}


def test_a_report_for_each_rank_knows_it_by_its_environment_else_by_its_name(tmp_path: Path) -> None:
    alone = Training(processes=1, payloads=None)
    for rank in (0, 1, 2):
        build(tmp_path / f"job_{9 - rank}.sqlite", alone, environment={"RANK": str(rank), "WORLD_SIZE": "4"})
    job = trine.load(tmp_path)
    assert (job.rank_ids, job.world_size, job.missing_ranks) == ((0, 1, 2), 4, (3,))
    assert job.rank(0).source.endswith("job_9.sqlite")
    named = tmp_path / "named"
    named.mkdir()
    for rank in (0, 1, 10):
        build(named / f"report_rank{rank}.sqlite", alone)
    assert trine.load(named).rank_ids == (0, 1, 10)


def test_reports_of_different_times_are_different_runs(tmp_path: Path) -> None:
    build(tmp_path / "monday.sqlite", Training(processes=2))
    build(
        tmp_path / "tuesday.sqlite",
        Training(processes=1, payloads=None),
        start_ns=SESSION_NS + 86_400 * 10**9,
    )
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1) and "left out is 1: tuesday.sqlite" in notes(job)["mixed-runs"]
    assert {Path(source.path).name for source in job.sources} == {"monday.sqlite"}


# --- the other tables ----------------------------------------------------------------------------


def test_waits_know_the_call_that_recorded_their_event(tmp_path: Path) -> None:
    pid = pid_of(0)
    waits = [
        {"start": 100, "end": 120, "syncType": 2, "deviceId": 0, "streamId": 15, "correlationId": 71, "globalPid": pid, "eventId": 5, "eventSyncId": 3},
        {"start": 200, "end": 900, "syncType": 3, "deviceId": 0, "streamId": 7, "correlationId": 72, "globalPid": pid, "eventId": 4294967295, "eventSyncId": 0},
    ]  # fmt: skip
    records = [
        {
            "timestamp": at,
            "deviceId": 0,
            "streamId": 7,
            "correlationId": number,
            "globalPid": pid,
            "eventId": 5,
            "eventSyncId": count,
        }
        for at, number, count in ((10, 61, 2), (50, 62, 3), (110, 63, 4))
    ]
    extra = {"CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": waits, "CUPTI_ACTIVITY_KIND_CUDA_EVENT": records}
    table = trine.load(build(tmp_path / "a.sqlite", extra=extra)).rank(0).synchronizations
    assert table is not None
    assert list(table.text("kind")) == ["stream_wait", "stream_sync"]
    assert list(table["source_correlation"]) == [62, MISSING] and list(table["source_stream"]) == [7, MISSING]
    assert list(table["event"]) == [5, MISSING]


def test_device_memory_is_what_the_allocator_reserved(tmp_path: Path) -> None:
    events = [
        {
            "start": at,
            "bytes": size,
            "memoryOperationType": kind,
            "memKind": memory,
            "address": address,
            "deviceId": 0,
            "globalPid": pid_of(0),
        }
        for at, size, kind, memory, address in (
            (1, 100, 0, 2, 8),
            (2, 50, 0, 2, 16),
            (3, 7, 0, 1, 24),
            (4, 100, 1, 2, 8),
        )
    ]
    rank = trine.load(build(tmp_path / "a.sqlite", extra={"CUDA_GPU_MEMORY_USAGE_EVENTS": events})).rank(0)
    assert rank.memory is not None
    assert list(rank.memory["reserved_bytes"]) == [100, 150, 50]  # pinned host memory is no device's
    assert list(rank.memory.text("action")) == ["segment_alloc", "segment_alloc", "segment_free"]


def test_metrics_are_thinned_to_means(tmp_path: Path) -> None:
    readings = [
        {"timestamp": at * 1000, "typeId": 0, "metricId": 1, "value": at % 2 * 100} for at in range(50_000)
    ]
    named = [{"typeId": 0, "metricId": 1, "metricName": "SMs Active [Throughput %]"}]
    extra = {"GPU_METRICS": readings, "TARGET_INFO_GPU_METRICS": named}
    samples = trine.load(build(tmp_path / "a.sqlite", Training(processes=1), extra=extra)).rank(0).samples
    assert samples is not None and len(samples) <= 2002
    assert set(samples.text("metric")) == {"gpu/sms_active_throughput_percent"}
    assert samples["value"].mean() == pytest.approx(50, abs=1)


def test_whole_graphs_are_device_work_and_said(tmp_path: Path) -> None:
    graphs = [
        {
            "start": 100_000_000,
            "end": 105_000_000,
            "deviceId": 0,
            "contextId": 1,
            "streamId": 7,
            "correlationId": 1,
            "globalPid": pid_of(0),
            "graphId": 3,
        }
    ]
    rank = trine.load(build(tmp_path / "a.sqlite", extra={"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": graphs})).rank(0)
    assert "CUDA graph 3" in of_kind(rank, "device", "compute")
    assert "--cuda-graph-trace=node" in notes(rank)["graphs-whole"]


def test_what_the_profiler_complained_about_is_said(tmp_path: Path) -> None:
    events = [
        {"severity": 2, "text": "Not all CUDA events might have been collected."},
        {"severity": 1, "text": "fine"},
    ]
    unused = [{"start": 1, "end": 2, "globalTid": pid_of(0), "nameId": 1}]
    rank = trine.load(
        build(tmp_path / "a.sqlite", extra={"DIAGNOSTIC_EVENT": events, "OSRT_API": unused})
    ).rank(0)
    assert "Not all CUDA events" in notes(rank)["nsight-diagnostic"]
    assert "OSRT_API" in notes(rank)["nsight-not-used"]
    healthy = trine.load(build(tmp_path / "b.sqlite")).rank(0)
    assert set(notes(healthy)) == {"steps-from-annotations"}


def test_unfinished_ranges_and_impossible_times_are_left_out_and_counted(tmp_path: Path) -> None:
    path = build(tmp_path / "a.sqlite")
    add_rows(
        path,
        {
            "NVTX_EVENTS": [
                {
                    "start": 5,
                    "end": None,
                    "eventType": 59,
                    "text": "open",
                    "globalTid": pid_of(0) + 1,
                    "domainId": 0,
                }
            ],
            "CUPTI_ACTIVITY_KIND_KERNEL": [{"start": 900, "end": 100, "deviceId": 0, "globalPid": pid_of(0)}],
        },
    )
    said = notes(trine.load(path).rank(0))
    assert "1 NVTX ranges were still open" in said["unfinished-ranges"]
    assert "1 events end before they start" in said["impossible-times"]


# --- names ---------------------------------------------------------------------------------------


def test_names_lose_what_the_demangler_and_torch_add() -> None:
    assert (
        kernel_name(KERNEL)
        == "void at::native::elementwise_kernel<128, 4, at::native::mul_functor<float>>(int, T1)"
    )
    text = "f<(bool)1, a::[lambda(float) (instance 2)], (unsigned long)3>(char *, const T1 &)"
    assert kernel_name(text) == "f<true, a::{lambda(float)#2}, 3ul>(char*, const T1&)"
    assert operator_name("aten::mul, seq = 45328, op_id = 990726") == ("aten::mul", 45328, None, True)
    sized = "aten::mm, op_id = 3, sizes = [[2, 3], [3, 4]], input_op_ids = [(1,0)]"
    assert operator_name(sized) == ("aten::mm", MISSING, "[[2, 3], [3, 4]]", True)
    assert operator_name("a, b, seq = x") == ("a, b, seq = x", MISSING, None, False)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)), max_size=40))
def test_the_enclosing_span_is_the_innermost_that_holds_all_of_it(spans: list[tuple[int, int, int]]) -> None:
    """Against a slow reference: of the spans of the thread that began before, the last that is open long enough."""
    spans = sorted(spans, key=lambda span: (span[1], -span[2]))
    thread, start, length = (np.array([span[part] for span in spans], np.int64) for part in range(3))
    end = start + length
    found = enclosing_rows(thread, start, end).tolist()
    for row, parent in enumerate(found):
        held = [
            other
            for other in range(row)
            if thread[other] == thread[row] and end[other] > start[row] and end[other] >= end[row]
        ]
        assert parent == (held[-1] if held else -1)


# --- files ---------------------------------------------------------------------------------------


def test_nothing_is_written_beside_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "a folder # with ? signs %20"
    folder.mkdir()
    path = build(folder / "a.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    before = path.read_bytes()
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        trine.analyze(trine.load(path))
        assert [each.name for each in folder.iterdir()] == ["a.sqlite"] and path.read_bytes() == before
    finally:
        folder.chmod(0o755)


def test_other_databases_are_not_ours(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as connection:
        connection.execute("CREATE TABLE people (name)")
    connection.close()
    assert not nsight.recognizes(tmp_path / "x.sqlite")
    with pytest.raises(UnreadableInput, match="SQLite database without the tables"):
        trine.load(tmp_path / "x.sqlite")
    with pytest.raises(UnreadableInput, match="nsys export --type sqlite"):
        nsight.open_job(tmp_path / "x.sqlite")


def test_an_export_without_work_says_how_to_get_some(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as connection:
        connection.execute("CREATE TABLE META_DATA_EXPORT (name, value)")
    connection.close()
    with pytest.raises(UnreadableInput, match="nsys profile --trace=cuda,nvtx"):
        trine.load(tmp_path / "x.sqlite")


def test_a_view_under_a_tables_name_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE META_DATA_EXPORT (name, value)")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS 'end' FROM n"
        connection.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("UPDATE sqlite_master SET type = 'table' WHERE type = 'view'")
    connection.close()
    with pytest.raises(UnreadableInput, match="holds no kernels"):
        nsight.open_job(path)


def test_real_exports(data: Path) -> None:
    folder = data / "traces" / "nsys"
    healthy = trine.analyze(trine.load(folder / "healthy_1pct.sqlite"))
    (rank,) = healthy.ranks
    assert rank.summary.breakdown is not None
    assert [finding.id for finding in healthy.findings if finding.kind == "fault"] == []
    assert rank.summary.breakdown.window_ns == 403_990_000
    assert rank.summary.breakdown.idle_ns == 3_990_000  # one per cent, as the file's name says
    assert healthy.hardware.name is not None and "H100" in healthy.hardware.name
    assert any(note.id == "nsight-no-process" for note in healthy.data_quality)
    for name, kernels, calls in (("before", (1993, 2017), 33), ("after", (1793, 1794), 31)):
        job = trine.load(folder / f"mfu_2gpu_{name}.sqlite")
        for rank_, count in zip(job, kernels, strict=True):
            assert rank_.device is not None and (rank_.device["kind"] != 2).sum() == count
            assert rank_.collectives is not None
            assert list(rank_.collectives.text("operation")) == ["all_to_all"] * calls
        analysis = trine.analyze(job)
        assert analysis.collectives[0].calls == calls


def test_the_window_of_a_step_is_the_work_it_launched(tmp_path: Path) -> None:
    analysis = trine.analyze(trine.load(build(tmp_path / "a.sqlite")), steps="11:12")
    breakdown = analysis.ranks[0].summary.breakdown
    assert breakdown is not None and breakdown.steps == (11,)
    assert breakdown.window_ns < STEP and breakdown.compute_ns == MATMUL
