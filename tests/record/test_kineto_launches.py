"""What a trace says of launches, graphs, waits, modules and autograd, from every kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_builders import annotation, call, kernel, operator, step, trace, written

import trine
from trine.record.kernels import is_launch
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank
from trine.record.readers.kineto import read_file

KINETO = Path("traces") / "kineto"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_content(content: Any) -> Rank:
        return read_file(written(tmp_path / "trace.json", content))

    return read_content


def only(data: Path, name: str) -> Rank:
    return trine.load(data / KINETO / name).rank(0)


# --- launches --------------------------------------------------------------------------------------


def test_launch_shapes(read: Any) -> None:
    shape = {"grid": [17888, 2, 3], "block": [32, 4, 1], "est. achieved occupancy %": 75}
    rank = read(
        trace(
            kernel("a", 1, 1, **shape),
            kernel("b", 3, 1),
            kernel("c", 5, 1, grid=[0, 1, 1], block="x", **{"est. achieved occupancy %": "inf"}),
            kernel("d", 7, 1, grid=[2**40, 2**40, 1], block=[1, 1, 1], **{"est. achieved occupancy %": None}),
        )
    )
    assert rank.device["grid_blocks"].tolist() == [17888 * 6, MISSING, MISSING, MISSING]
    assert rank.device["block_threads"].tolist() == [128, MISSING, MISSING, 1]
    assert (
        rank.device["occupancy"].tolist()[0] == 0.75 and not np.isfinite(rank.device["occupancy"][1:]).any()
    )


def test_launch_shapes_that_rocm_writes_at_the_call(read: Any, data: Path) -> None:
    launch = call("hipLaunchKernel", 1, 1, 5)
    launch["args"] |= {"grid": [3, 1, 1], "block": [128, 1, 1], "kernel": "k"}
    rank = read(trace(call("hipMemcpyAsync", 0, 1, 4), launch, kernel("k", 5, 1, 5), kernel("x", 7, 1, 4)))
    assert rank.device["grid_blocks"].tolist() == [3, MISSING]
    assert rank.device["block_threads"].tolist() == [128, MISSING]
    real = only(data, "odd/mi250_minitoy_train_ROCm6_2_kineto.json.gz").device
    assert real is not None
    assert (real["grid_blocks"] > 0).sum() == (real["kind"] != DEVICE_KINDS.index("copy")).sum() == 14


def test_occupancy_from_what_fits(read: Any) -> None:
    """2,048 threads a multiprocessor; three blocks of 512 fit at once."""
    fits = {"activeBlocksPerMultiprocessor": 3, "limitingFactors": "WARPS|REGS"}
    properties = [{"id": 0, "name": "x", "maxThreadsPerMultiprocessor": 2048}]
    events = [kernel("k", 1, 1, block=[512, 1, 1], occupancy=fits), kernel("l", 3, 1, occupancy=fits)]
    rank = read(trace(*events, deviceProperties=properties))
    assert rank.device["occupancy"][0] == 0.75 and np.isnan(rank.device["occupancy"][1])
    assert np.isnan(read(trace(*events)).device["occupancy"]).all()  # what the device can hold is not known


def test_graphs(read: Any) -> None:
    def node(number: int, graph: int = 4) -> dict[str, int]:
        return {"graph id": graph, "graph node id": number}

    rank = read(
        trace(
            step(1, 0, 10),
            call("cudaGraphLaunch", 1, 1, 3),
            step(2, 10, 10),
            kernel("a", 14, 1, 3, **node(17179869185)),
            kernel("b", 16, 1, 3, **node(17179869186)),
            kernel("c", 18, 1, **node(0, 0)),
            kernel("d", 20, 1, **{"graph node id": 7}),
        )
    )
    assert rank.device["graph_node"].tolist() == [17179869185, 17179869186, MISSING, 7]
    assert rank.device["step"].tolist() == [1, 1, MISSING, MISSING]
    note = next(note for note in rank.quality if note.id == "graph-launches")
    assert "1 launches of graphs ran 2 device events" in note.message


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch",
        "cudaLaunchCooperativeKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy2DAsync", "hipLaunchKernel",
        "hipExtModuleLaunchKernel", "hipModuleLaunchKernel", "hipExtLaunchKernel", "hipGraphLaunch",
        "hipMemcpyWithStream", "urEnqueueKernelLaunch", "urEnqueueUSMMemcpy", "zeCommandListAppendLaunchKernel",
        "zeCommandListAppendMemoryCopy", "cuMemcpyHtoDAsync_v2",
    ],
)  # fmt: skip
def test_calls_that_launch(name: str) -> None:
    assert is_launch(name)


@pytest.mark.parametrize(
    "name",
    [
        "cudaEventRecord", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaLaunchHostFunc", "cudaMalloc",
        "cudaEventQuery", "cudaStreamIsCapturing", "hipDeviceSynchronize", "cudaStreamWaitEvent", "INVALID",
        "cudaGraphInstantiate", "zeCommandListAppendBarrier", "urEventWait", "cudaFuncSetAttribute",
    ],
)  # fmt: skip
def test_calls_that_do_not(name: str) -> None:
    assert not is_launch(name)


# --- other devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runtime",
    ["xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver", "glow_runtime", "hpu_op",
     "gcu_runtime", "Runtime", "cuda_driver"],
)  # fmt: skip
@pytest.mark.parametrize("work", ["kernel", "Kernel", "mtia_ccp_events", "gpu_memcpy"])
def test_every_device_is_joined_with_its_calls(read: Any, runtime: str, work: str) -> None:
    rank = read(trace({**call("launch", 1, 1, 3), "cat": runtime}, {**kernel("k", 4, 1, 3), "cat": work}))
    assert rank.device["launch"].tolist() == [0]
    assert [HOST_KINDS[kind] for kind in rank.host["kind"]] == ["runtime"]
    assert "unknown-categories" not in {note.id for note in rank.quality}


def test_xpu(read: Any) -> None:
    """Queues for streams, waits by their kind, and oneCCL's calls on the host's own threads."""
    work = {"device": 0, "sycl queue": "64", "l0 queue": "0x1", "kernel_id": 9, "correlation": 3}
    gemm = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 64, "ts": 5, "dur": 2, "args": work}
    wait = {**operator("zeEventHostSynchronize", 20, 5, Type="HOST_EVENT", correlation=5), "cat": "xpu_sync"}
    fence = {**operator("zeFence", 30, 5, Type="HOST_FENCE", correlation=6), "cat": "xpu_sync"}
    collective = {**operator("xccl::allreduce", 40, 9, Communicator_id=7), "cat": "collective_comm"}
    rank = read(
        trace({**call("urEnqueueKernelLaunch", 1, 1, 3), "cat": "xpu_runtime"}, gemm, wait, fence, collective)
    )
    assert (rank.device["stream"].tolist(), rank.device["launch"].tolist()) == ([64], [0])
    assert rank.synchronizations.text("kind").tolist() == ["event_sync", "stream_sync"]
    row = rank.host.text("name").tolist().index("xccl::allreduce")
    assert HOST_KINDS[rank.host["kind"][row]] == "annotation"


def test_a_collective_on_a_device_stays_there(read: Any) -> None:
    work = {**kernel("allreduce", 1, 5), "cat": "collective_comm"}
    rank = read(trace(work))
    assert DEVICE_KINDS[rank.device["kind"][0]] == "communication"


# --- waits -----------------------------------------------------------------------------------------


def sync(kind: str, ts: float, correlation: int, stream: int = -1, **args: Any) -> dict[str, Any]:
    arguments = {"cuda_sync_kind": kind, "stream": stream, "correlation": correlation, "device": 0, **args}
    return {"ph": "X", "cat": "cuda_sync", "name": kind, "pid": 0, "tid": stream, "ts": ts, "dur": 4, "args": arguments}  # fmt: skip


def test_waits(read: Any) -> None:
    waits = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 40, "wait_on_cuda_event_id": 8}
    unsaid = {**waits, "wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": 41}
    recorded = {
        **kernel("cudaEvent", 2, 0, 41, stream=9),
        "cat": "cuda_event",
        "args": {"event_id": 8, "stream": 9, "correlation": 41, "device": 0},
    }
    rank = read(
        trace(
            kernel("k", 1, 1),
            sync("Stream Wait Event", 30, 50, stream=20, **waits),
            sync("Event Sync", 10, 51, **unsaid),
            sync("Stream Sync", 40, 52, stream=7),
            sync("Context Sync", 50, 53),
            sync("A New Kind", 60, 54),
            recorded,
        )
    )
    table = rank.synchronizations
    assert table.text("kind").tolist() == ["event_sync", "stream_wait", "stream_sync", "device_sync", None]
    assert table["source_stream"].tolist() == [9, 7, MISSING, MISSING, MISSING]
    assert table["source_correlation"].tolist() == [41, 40, MISSING, MISSING, MISSING]
    assert table["stream"].tolist() == [MISSING, 20, 7, MISSING, MISSING]
    assert table["event"].tolist() == [8, 8, MISSING, MISSING, MISSING]
    assert table["correlation"].tolist() == [51, 50, 52, 53, 54]
    assert (table["end_ns"] - table["start_ns"]).tolist() == [4000] * 5
    assert len(rank.device) == 1


def test_waits_of_a_real_trace(data: Path) -> None:
    rank = only(data, "odd/event_sync_trace.json.gz")
    assert rank.synchronizations is not None and rank.host is not None
    assert rank.synchronizations.text("kind").tolist() == [
        "stream_sync",
        "event_sync",
        "event_sync",
        "device_sync",
    ]
    calls = set(rank.host["correlation"].tolist())
    assert set(rank.synchronizations["correlation"].tolist()) <= calls
    assert rank.synchronizations["source_correlation"].tolist()[1] in calls


def test_without_waits_there_is_no_table(read: Any) -> None:
    assert read(trace(kernel("k", 1, 1))).synchronizations is None


# --- operators -------------------------------------------------------------------------------------


def test_autograd_numbers_types_and_flops(read: Any) -> None:
    forward = {"Sequence number": 12, "Fwd thread id": 0, "Input type": ["float", ""], "flops": 2048}
    backward = {"Sequence number": 12, "Fwd thread id": 1, "Input type": [], "flops": "x"}
    rank = read(
        trace(operator("aten::mm", 1, 2, **forward), operator("MmBackward0", 9, 2, tid=2, **backward))
    )
    host = rank.host
    assert host["sequence"].tolist() == [12, 12]
    assert host["forward_thread"].tolist() == [MISSING, 1]
    assert host.text("types").tolist() == ['["float", ""]', None]
    assert host["flops"][0] == 2048 and np.isnan(host["flops"][1])


def test_modules_are_paths(read: Any) -> None:
    python = {"cat": "python_function"}
    rank = read(
        trace(
            operator("nn.Module: Net_0", 0, 100) | python,
            operator("net.py(3): forward", 1, 90) | python,
            operator("nn.Module: Linear_1", 10, 50) | python,
            operator("aten::linear", 20, 10),
            call("cudaLaunchKernel", 22, 2, 1),
            operator("aten::relu", 70, 10),
            operator("aten::add", 200, 10),
            operator("aten::own", 71, 2, **{"Module Hierarchy": "Said"}),
        )
    )
    modules = dict(zip(rank.host.text("name").tolist(), rank.host.text("module").tolist(), strict=True))
    assert modules == {
        "nn.Module: Net_0": "Net_0",
        "net.py(3): forward": "Net_0",
        "nn.Module: Linear_1": "Net_0.Linear_1",
        "aten::linear": "Net_0.Linear_1",
        "cudaLaunchKernel": "Net_0.Linear_1",
        "aten::relu": "Net_0",
        "aten::add": None,
        "aten::own": "Said",
    }


def test_modules_of_a_real_model(data: Path) -> None:
    host = only(data, "single/h100_qwen1.5_0.5b.json.gz").host
    assert host is not None
    operators = host["kind"] == HOST_KINDS.index("operator")
    modules = host.text("module")[operators]
    assert sum(module is not None for module in modules) > 0.95 * len(modules)
    layers = {module.split(".")[1] for module in modules if module and "DecoderLayer" in module}
    assert len(layers) == 24  # as Qwen1.5-0.5B has


def test_annotations_keep_their_types(read: Any) -> None:
    rank = read(trace(annotation("nccl:all_reduce", 1, 2, **{"Input Dims": [[4]], "Input type": ["float"]})))
    assert rank.host.text("types").tolist() == ['["float"]']
