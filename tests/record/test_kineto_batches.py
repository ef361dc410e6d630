"""``batch_isend_irecv``: one kernel and several messages, each with its peer, matched with the other side's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_builders import annotation, call, kernel, operator, trace, written

import trine
from trine.analyzers.studies import result_of
from trine.analyzers.studies.groups import GroupsResult
from trine.record.readers.kineto import read_file


def message(operation: str, peer: int, ts: float, external: int, elements: int = 1000) -> dict[str, Any]:
    """What PyTorch notes of one message of a batch."""
    return operator(
        "record_param_comms",
        ts,
        1,
        **{
            "Collective name": operation,
            "dtype": "BFloat16",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": 3,
            "Process Group Name": "5",
            "Process Group Description": "default_pg",
            "Process Group Ranks": "[0, 1, 2]",
            "Dst Rank" if operation == "send" else "Src Rank": peer,
            "External id": external,
        },
    )


def batch(
    messages: list[tuple[str, int]], ts: float, start: float, end: float, number: int
) -> list[dict[str, Any]]:
    noted = [message(name, peer, ts + i, number * 10 + i) for i, (name, peer) in enumerate(messages)]
    after = ts + len(messages)
    return [
        *noted,
        annotation("nccl:coalesced", after, 3),
        call("cudaLaunchKernelExC", after + 1, 1, number),
        kernel("ncclDevKernel_SendRecv(x)", start, end - start, number, stream=20),
    ]


def test_each_message_of_a_batch_is_a_row(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.json",
        trace(
            *batch([("send", 2), ("recv", 0)], ts=0, start=20, end=50, number=1),
            call("cudaLaunchKernel", 60, 1, 2),
            kernel("gemm", 61, 5, 2),
            *batch([("send", 0)], ts=70, start=90, end=95, number=3),
            rank=1,
            world_size=3,
        ),
    )
    table = read_file(path).collectives
    assert table is not None
    rows = list(zip(table.text("operation"), table["peer"].tolist(), table["start_ns"].tolist(), strict=True))
    assert sorted(rows) == [("recv", 0, 20_000), ("send", 0, 90_000), ("send", 2, 20_000)]
    assert table["device_row"].tolist().count(table["device_row"][0]) == 2
    assert set(table["bytes"].tolist()) == {2000} and set(table.text("group")) == {"5"}


def test_a_batch_of_all_to_all_stays_what_it_is(tmp_path: Path) -> None:
    """No message was noted, so nothing is spread."""
    events = batch([], ts=0, start=20, end=50, number=1)
    table = read_file(written(tmp_path / "a.json", trace(*events))).collectives
    assert table is not None and table.text("operation").tolist() == ["send_recv"]


def test_a_kernel_that_names_its_peer_is_no_batch(tmp_path: Path) -> None:
    alone = message("send", 1, 0, 7)
    named = {"Collective name": "send", "Dst Rank": 1, "External id": 7}
    events = [
        alone,
        call("cudaLaunchKernelExC", 2, 1, 1),
        kernel("ncclDevKernel_SendRecv(x)", 5, 4, 1, **named),
    ]
    table = read_file(written(tmp_path / "a.json", trace(*events))).collectives
    assert table is not None and table["peer"].tolist() == [1]


def test_the_late_stage_of_a_pipeline_is_named(tmp_path: Path) -> None:
    """Three stages exchange in batches; stage 1 computes longer and enters each batch 40 µs late."""
    neighbours = {0: [("send", 1), ("recv", 1)], 1: [("recv", 0), ("send", 0), ("send", 2), ("recv", 2)]}
    neighbours[2] = [("recv", 1), ("send", 1)]
    for rank in range(3):
        late = 40 if rank == 1 else 0
        events: list[dict[str, Any]] = []
        for number in range(1, 5):
            at = number * 200.0
            events += [
                call("cudaLaunchKernel", at - 90, 1, 100 + number),
                kernel("gemm", at - 80, 70 + late, 100 + number),
                *batch(neighbours[rank], at - 20, at + late, at + 60, number),
            ]
        written(tmp_path / f"rank{rank}.json", trace(*events, rank=rank, world_size=3))
    analysis = trine.analyze(trine.load(tmp_path), steps="all")
    shares = {rank.rank: rank.communication for rank in analysis.ranks}
    assert all(share is not None for share in shares.values())
    assert shares[1].lateness_ns == 4 * 4 * 40_000 and shares[0].lateness_ns == shares[2].lateness_ns == 0
    assert shares[1].late_doing[0].activity == "compute"
    # 20 µs of each message are transfer, 40 µs wait at the other side.
    assert shares[0].transfer_ns == 8 * 20_000 and shares[0].wait_ns == 8 * 40_000
    result = result_of(analysis, "groups", GroupsResult)
    assert result is not None
    (pipeline,) = result.kinds
    assert (pipeline.kind, pipeline.late[0].rank, pipeline.late[0].doing) == ("pipeline", 1, "compute")
