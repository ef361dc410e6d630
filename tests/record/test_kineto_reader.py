"""The Kineto reader: what each part of a trace becomes, one small trace at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_builders import annotation, call, kernel, operator, small, step, trace, written

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table
from trine.record.readers.kineto import read_file


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_content(content: Any, name: str = "trace.json") -> Rank:
        return read_file(written(tmp_path / name, content))

    return read_content


def kinds(table: Table) -> dict[str | None, str]:
    names = DEVICE_KINDS if table.name == "device" else HOST_KINDS
    return {name: names[kind] for name, kind in zip(table.text("name"), table["kind"], strict=True)}


def ids(rank: Rank) -> set[str]:
    return {quality.id for quality in rank.quality}


def row(table: Table, index: int) -> dict[str, Any]:
    return dict(table.to_pandas().iloc[index])


# --- time ------------------------------------------------------------------------------------------


def test_times_are_unix_nanoseconds(read: Any) -> None:
    rank = read(trace(operator("mm", 4458676522690.655, 1.001), baseTimeNanoseconds=1711964646000000000))
    assert rank.host["start_ns"].tolist() == [1711964646000000000 + 4458676522690655]
    assert (rank.host["end_ns"] - rank.host["start_ns"]).tolist() == [1001]


def test_device_starts_are_what_a_double_of_microseconds_holds(read: Any) -> None:
    absolute = read(trace(kernel("gemm", 1606910596297023, 5.001)))
    assert absolute.device["start_ns"].tolist() == [round(1606910596297023.0 * 1000)]
    assert (absolute.device["end_ns"] - absolute.device["start_ns"]).tolist() == [5001]
    relative = read(trace(kernel("gemm", 4458676522690.655, 1.001), baseTimeNanoseconds=1711964646000000000))
    from_base = relative.device["start_ns"][0] - 1711964646000000000
    assert from_base == round(4458676522690.655 * 1000)
    assert abs(from_base - 4458676522690655) <= 1


def test_the_base_time_may_come_after_the_events(read: Any) -> None:
    rank = read(
        b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2}], "baseTimeNanoseconds": 5000}'
    )
    assert rank.device["start_ns"].tolist() == [6000]


def test_absolute_times_keep_every_digit(read: Any) -> None:
    rank = read(b'[{"ph":"X","cat":"cpu_op","name":"k","ts":1712195495519695.837,"dur":0.001}]')
    assert rank.host["start_ns"].tolist() == [1712195495519695837]
    assert rank.host["end_ns"].tolist() == [1712195495519695838]


def test_negative_and_missing_durations_are_of_no_length(read: Any) -> None:
    rank = read(trace(kernel("a", 5, -3), kernel("b", -7, 0), kernel("c", 9, None), kernel("d", None, 4)))
    assert (rank.device["end_ns"] - rank.device["start_ns"]).tolist() == [0, 0, 0]
    assert rank.device["start_ns"].tolist() == [5000, -7000, 9000]
    assert {"negative-durations", "untimed-events"} <= ids(rank)


def test_times_as_text(read: Any) -> None:
    rank = read(trace(operator("a", "1606910596297023", "5")))
    assert rank.host["start_ns"].tolist() == [1606910596297023000]


# --- device work -----------------------------------------------------------------------------------


def test_kinds_of_device_work(read: Any) -> None:
    copy = {**kernel("Memcpy HtoD (Pinned -> Device)", 1, 1), "cat": "gpu_memcpy"}
    memset = {**kernel("Memset (Device)", 1, 1), "cat": "gpu_memset"}
    mark = {**kernel("ProfilerStep#1", 1, 9), "cat": "gpu_user_annotation"}
    sync = {**kernel("Stream Sync", 1, 9), "cat": "cuda_sync"}
    metadata = {"Collective name": "allreduce"}
    rank = read(
        trace(
            kernel("gemm", 1, 1),
            kernel("__amd_rocclr_copyBuffer", 1, 1),
            kernel("ncclDevKernel_Generic(x)", 1, 1),
            kernel("my_own_ring", 1, 1, **metadata),
            copy,
            memset,
            mark,
            sync,
        )
    )
    assert kinds(rank.device) == {
        "gemm": "compute",
        "__amd_rocclr_copyBuffer": "compute",
        "ncclDevKernel_Generic(x)": "communication",
        "my_own_ring": "communication",
        "Memcpy HtoD (Pinned -> Device)": "copy",
        "Memset (Device)": "copy",
    }


def test_categories_of_torch_1_8(read: Any) -> None:
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 1, "tid": "4093687616", "ts": 0, "dur": 9,
         "args": {"Input dims": [[2, 3]], "External id": 2}},
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#5", "pid": 1, "tid": "4093687616", "ts": 0, "dur": 10},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": "4093687616", "ts": 1, "dur": 1,
         "args": {"correlation": 4, "external id": 2}},
        {"ph": "s", "id": 4, "cat": "async", "name": "launch", "pid": 1, "tid": 4093687616, "ts": 1},
        {"ph": "X", "cat": "Kernel", "name": "gemm", "pid": 0, "tid": "stream 7", "ts": 3, "dur": 2,
         "args": {"correlation": 4}},
        {"ph": "X", "cat": "Memset", "name": "Memset (Device)", "pid": 0, "tid": "stream 7", "ts": 6, "dur": 1},
    ]  # fmt: skip
    rank = read(events)
    assert kinds(rank.host) == {
        "aten::mm": "operator",
        "ProfilerStep#5": "annotation",
        "cudaLaunchKernel": "runtime",
    }
    assert kinds(rank.device) == {"gemm": "compute", "Memset (Device)": "copy"}
    assert rank.device["stream"].tolist() == [7, 7]
    assert rank.device["launch"].tolist() == [2, -1]
    assert rank.device["step"].tolist() == [5, MISSING]
    assert rank.host["thread"].tolist() == [4093687616] * 3
    assert rank.host.text("shapes")[0] == "[[2, 3]]"


def test_rocm_agents_and_stream_zero(read: Any) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "Cijk_x", "pid": 2, "tid": 0, "ts": 1, "dur": 1,
             "args": {"device": 2, "stream": 0, "correlation": 117, "kind": "Dispatch Kernel"}}  # fmt: skip
    rank = read(trace(call("hipExtModuleLaunchKernel", 0, 1, 117), event))
    found = row(rank.device, 0)
    assert (found["device"], found["stream"], found["launch"]) == (2, 0, 0)


@pytest.mark.parametrize("runtime", ["cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime"])
def test_runtimes_of_other_devices(read: Any, runtime: str) -> None:
    rank = read(trace({**call("launch", 1, 1, 3), "cat": runtime}, kernel("k", 4, 1, 3)))
    assert rank.device["launch"].tolist() == [0]


def test_one_graph_launch_has_many_kernels(read: Any) -> None:
    rank = read(trace(call("cudaGraphLaunch", 1, 1, 3), *(kernel(f"k{i}", 4 + i, 1, 3) for i in range(3))))
    assert rank.device["launch"].tolist() == [0, 0, 0]


def test_a_repeated_correlation_means_its_last_call_before_the_work(read: Any) -> None:
    rank = read(
        trace(
            call("cudaLaunchKernel", 1, 1, 3),
            kernel("a", 4, 1, 3),
            call("cudaLaunchKernel", 101, 1, 3),
            kernel("b", 104, 1, 3),
        )
    )
    assert rank.device["launch"].tolist() == [0, 1]


def test_work_without_launch_is_counted(read: Any) -> None:
    rank = read(trace(step(1, 0, 10), kernel("a", 4, 1, 3), kernel("b", 5, 1)))
    note = next(quality for quality in rank.quality if quality.id == "no-launch-record")
    assert note.message == "2 of 2 device events have no launch record, so they belong to no step"
    assert rank.device["step"].tolist() == [MISSING, MISSING]


# --- host ------------------------------------------------------------------------------------------


def test_kinds_of_host_spans(read: Any) -> None:
    python = {"cat": "python_function"}
    rank = read(
        trace(
            operator("aten::mm", 1, 1),
            annotation("forward", 1, 1),
            annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1, 1),
            annotation("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 1, 1),
            operator("train.py(3): main", 1, 1) | python,
            operator("torch/utils/data/dataloader.py(628): __next__", 1, 1) | python,
            operator("Python GC", 1, 1) | python,
            call("cudaLaunchKernel", 1, 1, 1),
            call("cudaDeviceSynchronize", 1, 1, 2),
            call("hipStreamSynchronize", 1, 1, 3),
            call("hipMemcpyWithStream", 1, 1, 4),
        )
    )
    assert kinds(rank.host) == {
        "aten::mm": "operator",
        "forward": "annotation",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "loader",
        "[pl][profile][_TrainingEpochLoop].train_dataloader_next": "loader",
        "train.py(3): main": "python",
        "torch/utils/data/dataloader.py(628): __next__": "loader",
        "Python GC": "collector",
        "cudaLaunchKernel": "runtime",
        "cudaDeviceSynchronize": "sync",
        "hipStreamSynchronize": "sync",
        "hipMemcpyWithStream": "sync",
    }


def test_a_pageable_copy_that_ends_within_its_call_blocks(read: Any) -> None:
    def copy(name: str, ts: int, correlation: int) -> dict[str, Any]:
        return {**kernel(name, ts, 5, correlation), "cat": "gpu_memcpy"}

    rank = read(
        trace(
            call("cudaMemcpyAsync", 0, 10, 1),
            copy("Memcpy DtoH (Device -> Pageable)", 2, 1),
            call("cudaMemcpyAsync", 20, 1, 2),
            copy("Memcpy HtoD (Pageable -> Device)", 22, 2),
            call("cudaMemcpyAsync", 40, 10, 3),
            copy("Memcpy HtoD (Pinned -> Device)", 42, 3),
        )
    )
    assert [HOST_KINDS[kind] for kind in rank.host["kind"]] == ["sync", "runtime", "runtime"]


def test_parents_nest_per_thread(read: Any) -> None:
    rank = read(
        trace(
            operator("outer", 0, 100),
            operator("inner", 10, 20),
            operator("innermost", 12, 5),
            operator("sibling", 30, 10),
            operator("elsewhere", 15, 5, tid=2),
            operator("later", 100, 5),
            operator("crossing", 90, 30),
        )
    )
    assert rank.host["parent"].tolist() == [-1, 0, 1, 0, -1, 6, -1]


def test_a_child_may_outlast_its_parent_by_the_rounding_of_old_files(read: Any) -> None:
    rank = read(trace(operator("outer", 0, 10), operator("inner", 5, 6)))
    assert rank.host["parent"].tolist() == [-1, 0]


def test_threads_of_two_processes_stay_apart(read: Any) -> None:
    other = {**operator("b", 1, 2, tid=1), "pid": 10}
    named = {**operator("c", 1, 2), "tid": "worker"}
    rank = read(trace(operator("a", 0, 10, tid=1), other, named))
    assert len(set(rank.host["thread"].tolist())) == 3
    assert rank.host["parent"].tolist() == [-1, -1, -1]


def test_begin_and_end_events_become_one_span(read: Any) -> None:
    common = {"cat": "user_annotation", "pid": 1, "tid": 1}
    rank = read(
        trace(
            {"ph": "B", "name": "a", "ts": 1.5, **common},
            {"ph": "B", "name": "b", "ts": 2, **common},
            {"ph": "E", "ts": 3, **common},
            {"ph": "E", "ts": 9, **common},
            {"ph": "E", "ts": 10, **common},
        )
    )
    spans = rank.host.to_pandas()[["name", "start_ns", "end_ns"]].to_numpy().tolist()
    assert spans == [["b", 2000, 3000], ["a", 1500, 9000]]
    assert "unclosed-events" in ids(rank)


def test_stacks_and_modules_are_kept_once(read: Any) -> None:
    extra = {"Call stack": "a.py(1): f;b.py(2): g", "Module Hierarchy": "Net.Linear"}
    rank = read(trace(*(operator("aten::mm", index, 1, **extra) for index in range(50))))
    assert set(rank.host.text("stack")) == {"a.py(1): f;b.py(2): g"}
    assert set(rank.host.text("module")) == {"Net.Linear"}
    assert len(rank.strings) == 3


# --- steps -----------------------------------------------------------------------------------------


def test_work_belongs_to_the_step_that_launched_it(read: Any) -> None:
    launches = [5, 15, 29, 31, 55, 75]
    rank = read(
        trace(
            step(3, 10, 15),  # a pause of 5 follows
            step(4, 30, 20),
            step(5, 50, 20),
            *(call("cudaLaunchKernel", ts, 1, ts) for ts in launches),
            *(kernel("k", 200 + ts, 1, ts) for ts in launches),
        )
    )
    assert rank.steps["index"].tolist() == [3, 4, 5]
    assert rank.device["step"].tolist() == [MISSING, 3, 3, 4, 5, 5]


def test_repeated_step_numbers_are_said(read: Any) -> None:
    rank = read(trace(step(1, 0, 10), step(2, 10, 10), step(1, 30, 10), operator("a", 0, 1)))
    assert rank.steps["index"].tolist() == [1, 2]
    assert "repeated-steps" in ids(rank)


def test_no_steps_is_absent_not_empty(read: Any) -> None:
    rank = read(trace(operator("a", 0, 1)))
    assert rank.steps is None and rank.device is None and rank.memory is None and rank.collectives is None
    assert {"no-steps", "no-device-events"} <= ids(rank)


# --- memory, devices, facts ------------------------------------------------------------------------


def test_memory_events(read: Any) -> None:
    def event(ts: int, **args: Any) -> dict[str, Any]:
        return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts,
                "args": args}  # fmt: skip

    rank = read(
        trace(
            event(
                5,
                Addr=7,
                Bytes=-128,
                **{"Device Id": 0, "Device Type": 1, "Total Allocated": 0, "Total Reserved": 9},
            ),
            event(2, Addr=7, Bytes=128, **{"Device Id": 0, "Device Type": 1, "Total Allocated": 128}),
            event(3, Bytes=4, **{"Device Id": 0, "Device Type": 0}),
        )
    )
    memory = rank.memory
    assert memory["time_ns"].tolist() == [2000, 3000, 5000]
    assert memory["bytes"].tolist() == [128, 4, -128]
    assert memory["device"].tolist() == [0, -1, 0]
    assert memory["allocated_bytes"].tolist() == [128, MISSING, 0]
    assert memory["reserved_bytes"].tolist() == [MISSING, MISSING, 9]


def test_facts_before_and_after_the_events(read: Any) -> None:
    rank = read(
        b'{"schemaVersion": 1, "deviceProperties": [{"id": 3, "name": "NVIDIA H100", "totalGlobalMem": 85}],'
        b'"traceEvents": [{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2}],'
        b'"distributedInfo": {"rank": 5, "world_size": 8, "backend": "nccl", "nccl_version": "unknown", "pg_config": ['
        b'{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 8, "ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}]}, "host_name": "a"}'
    )
    assert (rank.rank, rank.world_size, rank.host_name) == (5, 8, "a")
    assert (
        rank.devices[0].name == "NVIDIA H100"
        and rank.devices[0].index == 3
        and rank.devices[0].memory_bytes == 85
    )
    assert rank.groups[0].ranks == tuple(range(8)) and rank.groups[0].description == "default_pg"
    assert rank.metadata["backend"] == "nccl"


@pytest.mark.parametrize(
    "odd", ["x", [1], {"rank": "x", "world_size": [], "pg_config": "y"}, {"pg_config": [1, {}]}, 3]
)
def test_odd_facts_do_no_harm(read: Any, odd: Any) -> None:
    rank = read(
        trace(
            kernel("k", 1, 1),
            distributedInfo=odd,
            deviceProperties=odd,
            baseTimeNanoseconds=odd,
            host_name=odd,
        )
        if not isinstance(odd, int)
        else trace(kernel("k", 1, 1), distributedInfo=odd, deviceProperties=odd)
    )
    assert len(rank.device) == 1


def test_odd_values_in_events_do_no_harm(read: Any) -> None:
    rank = read(
        trace(
            {"ph": "X", "cat": "kernel", "name": None, "pid": [1], "tid": {"a": 1}, "ts": 1, "dur": 1, "args": None},
            {"ph": "X", "cat": "kernel", "name": ["a"], "pid": 1.5, "tid": None, "ts": 1, "dur": 1,
             "args": {"stream": "x", "device": 1e300, "correlation": 2**70, "bytes": "0x10"}},
            {"ph": "X", "cat": ["kernel"], "name": "x", "ts": 1, "dur": 1},
            {"ph": "X", "cat": "cpu_op", "name": 5, "pid": {}, "tid": [], "ts": 1, "dur": 1, "args": [1, 2]},
            {"ph": 7, "cat": "kernel", "name": "x", "ts": 1, "dur": 1},
            kernel("k", 1, 1),
        )
    )  # fmt: skip
    assert len(rank.device) == 3 and len(rank.host) == 1
    assert rank.device["bytes"].tolist() == [MISSING, 16, MISSING]
    assert rank.device["correlation"].tolist() == [MISSING] * 3


def test_sixty_four_bit_extremes(read: Any) -> None:
    rank = read(
        trace(
            operator("record_param_comms", 1, 1, **{"Comms Id": 10159970886766084423, "Addr": 2**64 - 1}),
            kernel("a", 1, 1, 2**63 - 1, stream=-(2**63)),
            kernel("b", 1e30, 1),
            kernel("c", 1, 1e30),
        )
    )
    assert rank.device["correlation"].tolist() == [2**63 - 1, MISSING]
    assert "untimed-events" in ids(rank)


def test_unknown_categories_are_counted(read: Any) -> None:
    rank = read(trace(kernel("k", 1, 1), *({**operator("x", 1, 1), "cat": "quantum_op"} for _ in range(3))))
    note = next(quality for quality in rank.quality if quality.id == "unknown-categories")
    assert "quantum_op (3)" in note.message


def test_a_sound_trace_has_nothing_to_say(read: Any) -> None:
    rank = read(small(0, 1))
    assert rank.quality == []
    assert np.all(rank.device["step"] == 1)
