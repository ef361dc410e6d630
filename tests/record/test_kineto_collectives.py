"""Collectives from each generation of metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_builders import annotation, call, kernel, operator, trace, written

from trine.record.model import MISSING, Rank
from trine.record.readers._kineto_terms import bytes_of, operation_of_call, ranks_of
from trine.record.readers.kineto import read_file

METADATA = {
    "Collective name": "_allgather_base",
    "dtype": "BFloat16",
    "In msg nelems": 100,
    "Out msg nelems": 400,
    "Group size": 4,
    "Process Group Name": "7",
    "Process Group Description": "mesh_dp",
    "Process Group Ranks": "[0, 2, 4, 6]",
    "Seq": 12,
}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_events(*events: dict[str, Any], **facts: Any) -> Rank:
        return read_file(written(tmp_path / "trace.json", trace(*events, **facts)))

    return read_events


def only(rank: Rank) -> dict[str, Any]:
    assert rank.collectives is not None and len(rank.collectives) == 1
    return dict(rank.collectives.to_pandas().iloc[0])


def test_metadata_on_the_kernel(read: Any) -> None:
    rank = read(
        call("cudaLaunchKernelExC", 5, 1, 3),
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 10, 4, 3, **METADATA),
    )
    found = only(rank)
    assert (found["operation"], found["group"], found["sequence"], found["dtype"]) == (
        "all_gather",
        "7",
        12,
        "bfloat16",
    )
    assert (found["in_bytes"], found["out_bytes"], found["bytes"]) == (200, 800, 800)
    assert (found["issued_ns"], found["start_ns"], found["end_ns"]) == (5000, 10000, 14000)
    assert (found["device_row"], found["host_row"]) == (0, 0)
    assert [(group.id, group.description, group.ranks) for group in rank.groups] == [
        ("7", "mesh_dp", (0, 2, 4, 6))
    ]


def test_metadata_on_the_host_only(read: Any) -> None:
    rank = read(
        operator("record_param_comms", 0, 20, **METADATA, **{"External id": 99}),
        call("cudaLaunchKernel", 5, 1, 3),
        kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(x)", 10, 4, 3, **{"External id": 3}),
    )
    found = only(rank)
    assert (found["operation"], found["group"], found["bytes"], found["host_row"]) == (
        "all_gather",
        "7",
        800,
        0,
    )


def test_metadata_by_external_id_where_the_launch_is_unknown(read: Any) -> None:
    rank = read(
        operator("record_param_comms", 0, 20, **METADATA, **{"External id": 99}),
        kernel("ncclDevKernel_Generic(x)", 10, 4, **{"External id": 99}),
    )
    assert only(rank)["operation"] == "all_gather"


def test_no_metadata_but_an_annotation_with_shapes(read: Any) -> None:
    rank = read(
        operator("c10d::allreduce_", 0, 30, **{"Input Dims": [[[4, 2048]]], "Input type": ["TensorList"]}),
        operator("record_param_comms", 1, 28),
        annotation("nccl:all_reduce", 2, 20, **{"Input Dims": [[4, 2048]], "Input type": ["c10::Half"]}),
        call("cudaLaunchKernel", 5, 1, 3),
        kernel("ncclDevKernel_AllReduce_Sum_f16_RING_LL(x)", 10, 4, 3),
    )
    found = only(rank)
    assert (found["operation"], found["dtype"], found["bytes"]) == ("all_reduce", "float16", 4 * 2048 * 2)
    assert found["group"] is None


def test_send_receive_kernels_are_named_by_what_encloses_their_launch(read: Any) -> None:
    rank = read(
        annotation("nccl:all_to_all", 0, 20),
        call("cudaLaunchKernel", 5, 1, 3),
        kernel("ncclDevKernel_SendRecv(x)", 10, 4, 3, stream=20),
        kernel("ncclDevKernel_SendRecv(x)", 20, 4, stream=20),  # its launch was not recorded
        kernel("ncclDevKernel_SendRecv(x)", 30, 4, stream=21),
    )
    assert rank.collectives.text("operation").tolist() == ["all_to_all", "all_to_all", "send_recv"]


def test_only_the_name_is_known(read: Any) -> None:
    found = only(read(kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 10, 4)))
    assert (found["operation"], found["group"], found["bytes"], found["issued_ns"]) == (
        "all_reduce",
        None,
        MISSING,
        MISSING,
    )


def test_point_to_point_names_its_peer(read: Any) -> None:
    send = {**METADATA, "Collective name": "send", "Dst Rank": 6, "Src Rank": 2}
    assert only(read(kernel("ncclDevKernel_SendRecv(x)", 1, 1, **send)))["peer"] == 6
    received = read(
        annotation("nccl:recv 0<-3", 0, 9),
        call("cudaLaunchKernel", 1, 1, 2),
        kernel("ncclDevKernel_SendRecv(x)", 3, 1, 2),
    )
    assert (only(received)["operation"], only(received)["peer"]) == ("recv", 3)


def test_gloo_runs_on_worker_threads(read: Any) -> None:
    tensor = {"Input Dims": [[1000]], "Input type": ["float"]}
    listed = {"Input Dims": [[[1000]], []], "Input type": ["TensorList", ""]}
    rank = read(
        operator("c10d::allreduce_", 5, 1, tid=1, **listed),
        operator("c10d::allreduce_", 7, 1, tid=1, **listed),
        annotation("gloo:all_reduce", 20, 30, tid=2, **tensor),
        annotation("gloo:all_reduce", 10, 30, tid=3, **tensor),
        annotation("gloo:all_gather", 50, 3, tid=3, **tensor),
    )
    collectives = rank.collectives
    assert collectives.text("operation").tolist() == ["all_reduce", "all_reduce", "all_gather"]
    assert collectives["issued_ns"].tolist() == [5000, 7000, MISSING]
    assert collectives["bytes"].tolist() == [4000, 4000, MISSING]
    assert collectives["host_row"].tolist() == [3, 2, 4]


def test_torch_prepares_and_waits_without_communicating(read: Any) -> None:
    rank = read(
        operator("record_param_comms", 0, 1, **{"Collective name": "wait"}),
        operator("record_param_comms", 0, 1, **{"Collective name": "init"}),
    )
    assert rank.collectives is None


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("barrier", "barrier"),
        ("recv", "recv"),
        ("wait", None),
        ("init", None),
    ],
)
def test_torchs_names(name: str, operation: str | None) -> None:
    assert operation_of_call(name) == operation


def test_bytes_as_nccl_tests_count_them() -> None:
    assert bytes_of("all_gather", 1, 8) == 8
    assert bytes_of("reduce_scatter", 8, 1) == 8
    assert bytes_of("all_to_all", 8, 9) == 8
    assert bytes_of("all_reduce", 5, 5) == 5
    assert bytes_of("send", 5, 0) == 5
    assert bytes_of("recv", 0, 5) == 5
    assert bytes_of("all_gather", 1, MISSING) == MISSING


def test_ranks_of_a_group() -> None:
    assert ranks_of([3, 1]) == (3, 1)
    assert ranks_of("[0, 1, 2]", 3) == (0, 1, 2)
    assert ranks_of("[0, 8, 16, ...]", 5, 0, 8) == (0, 8, 16, 24, 32)
    assert ranks_of("[0, 8, 16, ...]", 5) == ()
    assert ranks_of(None) == ()
    assert ranks_of({"a": 1}, 10**9, 0, 1) == ()
