"""What traces say of calls and phases: messages and collectives of groups on devices, and forwards between backwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kernel_traces import Call, mm, trace

from trine.optim.plan.whatif import recorded
from trine.optim.plan.whatif._windows import completed
from trine.optim.plan.whatif.build import joined, part_of
from trine.optim.plan.whatif.graph import LINK, Graph, is_pipeline
from trine.record.errors import UsageError
from trine.record.model import HOST_KINDS, MISSING, Group, Rank, Strings, Table


def communicating(kernel: str, us: float, **arguments: Any) -> Call:
    """A kernel that communicates, with what its trace says of the call."""
    return Call(f"record_param_comms {json.dumps(arguments)}", kernels=[(kernel, us)])


def job(folder: Path, ranks: Sequence[Sequence[Call]]) -> Path:
    """A trace of every rank; the calls' arguments stand at their kernels."""
    for rank, calls in enumerate(ranks):
        content = trace(calls)
        said = [
            json.loads(event["name"].split(" ", 1)[1])
            for event in content["traceEvents"]
            if event["name"].startswith("record_param_comms")
        ]
        kernels = [event for event in content["traceEvents"] if event["name"].startswith("nccl")]
        for event, arguments in zip(kernels, said, strict=True):
            event["args"] |= arguments
        content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        (folder / f"rank{rank}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def transfers_of(graph: Graph) -> list[list[tuple[str, tuple[int, ...], int]]]:
    return [
        [(task.key, task.group, round(task.seconds * 1e6)) for task in each.tasks if task.lane == LINK]
        for each in graph.steps[0].ranks
    ]


def message(operation: str, peer: int, us: float) -> Call:
    end = "Dst Rank" if operation == "send" else "Src Rank"
    return communicating("ncclDevKernel_SendRecv", us, **{"Collective name": operation, end: peer, "Process Group Name": "pp",
                         "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"})  # fmt: skip


def test_stages_on_devices_send_each_other_messages(tmp_path: Path) -> None:
    work = mm(256, 64, 64, 50.0)
    first = [work, message("send", 1, 10.0), message("recv", 1, 90.0), work]
    second = [message("recv", 0, 70.0), work, message("send", 0, 10.0)]
    run = recorded(job(tmp_path, [first, second]))
    assert is_pipeline(run.graph)
    assert transfers_of(run.graph) == [
        [("0>1 1", (), 10), ("1>0 1", (), 10)],
        [("0>1 1", (), 10), ("1>0 1", (), 10)],
    ]
    with pytest.raises(UsageError, match="this record is a pipeline's"):
        run.what_if({"straggler": False})


def test_all_reduces_of_two_groups_are_counted_apart(tmp_path: Path) -> None:
    def reduced(group: str, members: Sequence[int], us: float) -> Call:
        said = {"Collective name": "allreduce", "Process Group Name": group, "Process Group Ranks": str(list(members)),
                "Group size": len(members), "In msg nelems": 2**20, "Out msg nelems": 2**20, "dtype": "Float"}  # fmt: skip
        return communicating("ncclDevKernel_AllReduce_Sum_f32_RING_LL", us, **said)

    work = mm(256, 64, 64, 50.0)
    alone, both = (0, 2), (0, 1, 2)
    ranks = [
        [work, reduced("1", alone, 10.0), reduced("0", both, 100.0)],
        [work, reduced("0", both, 100.0)],
        [work, reduced("1", alone, 20.0), reduced("0", both, 300.0)],
    ]
    graph = recorded(job(tmp_path, ranks)).graph
    pair, whole = ("all_reduce of group 1 from 0 1", alone, 10), ("all_reduce of group 0 from 0 1", both, 100)
    assert transfers_of(graph) == [[pair, whole], [whole], [pair, whole]]


def test_a_forward_between_two_backwards_is_a_forward(tmp_path: Path) -> None:
    def backward(sequence: int) -> Call:
        inside = [mm(64, 64, 256, 10.0, backward=True, sequence=sequence)]
        return Call("autograd::engine::evaluate_function: MmBackward0", inside=inside, backward=True)

    forward = [mm(256, 64, 64, 10.0), mm(256, 64, 64, 10.0)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace([*forward, backward(2), backward(1)] * 2)), encoding="utf-8")
    graph = recorded(path).graph
    phases = [task.phase for task in graph.steps[1].ranks[0].tasks if task.kind == "product"]
    assert phases == ["forward", "forward", "backward", "backward"] * 2
    with pytest.raises(UsageError, match="this step is of several micro-batches"):
        recorded(path).what_if({"checkpointing.mode": "full"})


# --- what the record knows of a window's calls --------------------------------------------------------------


def calls(strings: Strings, step: int, *rows: tuple[str, str | None, int]) -> dict[str, list[int]]:
    """Columns of collectives (operation, group, bytes), one after another."""
    at = [1000 * step + place for place in range(len(rows))]
    return {
        "operation": [strings.code(operation) for operation, _, _ in rows],
        "group": [strings.code(group) for _, group, _ in rows],
        "bytes": [size for _, _, size in rows],
        "step": [step] * len(rows),
        "issued_ns": at,
        "start_ns": at,
        "end_ns": at,
    }


def collectives(*steps: Sequence[tuple[str, str | None, int]]) -> Table:
    strings = Strings()
    parts = [calls(strings, step, *rows) for step, rows in enumerate(steps)]
    return Table(
        "collectives", {name: [each for part in parts for each in part[name]] for name in parts[0]}, strings
    )


def test_a_windows_calls_are_of_the_groups_that_the_record_names() -> None:
    pair = Group("1", None, "mesh_tensor", (0, 1))
    window = Rank(0, "", "kineto", Strings(), collectives=collectives(
        [("all_reduce", None, 8), ("all_gather", None, MISSING)], [("all_reduce", None, 8)], [("all_reduce", "2", 8)],
    ))  # fmt: skip
    record = Rank(0, "", "trine", Strings(), groups=(pair,), collectives=collectives(
        [("all_reduce", "0", 8), ("all_gather", "1", 64)], [("all_reduce", "0", 8), ("all_reduce", "1", 8)],
        [("all_reduce", "0", 8)],
    ))  # fmt: skip
    found = completed(window, record)
    assert found.collectives is not None and found.groups == (pair,)
    # Of the second step the record has a call more: whose is whose is not known. The third names its own.
    assert found.collectives.text("group").tolist() == ["0", "1", None, "2"]
    assert found.collectives["bytes"].tolist() == [8, 64, 8, 8]


def test_a_bucket_that_leaves_as_backward_ends_is_no_forwards() -> None:
    strings = Strings()
    passes = [
        (0, 40, 50, 90),
        (110, 150, 160, 200),
    ]  # µs: a forward's product, a backward function around its product
    function, shapes, types = (
        "autograd::engine::evaluate_function: MmBackward0",
        "[[64, 64], [64, 64]]",
        '["float", "float"]',
    )
    rows = [
        row
        for first, last, begin, end in passes
        for row in (("aten::mm", first, last), (function, begin, end), ("aten::mm", begin + 1, end - 10))
    ]
    host = Table("host", {
        "name": [strings.code(name) for name, _, _ in rows],
        "start_ns": [start * 1000 for _, start, _ in rows],
        "end_ns": [end * 1000 for _, _, end in rows],
        "kind": [HOST_KINDS.index("operator")] * len(rows),
        "shapes": [strings.code(shapes)] * len(rows),
        "types": [strings.code(types)] * len(rows),
        "step": [0] * len(rows),
    }, strings)  # fmt: skip
    issued = [(end - 2) * 1000 for *_, end in passes]
    sent = Table("collectives", {
        "operation": [strings.code("all_reduce")] * 2,
        "bytes": [2**20] * 2,
        "issued_ns": issued,
        "start_ns": issued,
        "end_ns": [at + 5000 for at in issued],
    }, strings)  # fmt: skip
    steps = Table("steps", {"index": [0], "start_ns": [0], "end_ns": [220_000]}, strings)
    rank = Rank(0, "", "kineto", strings, host=host, collectives=sent, steps=steps)
    tasks = joined([part_of(rank)], 1, "a job")[0].steps[0].ranks[0].tasks
    assert [(task.phase, task.of_gradients) for task in tasks if task.lane == LINK] == [
        ("backward", True)
    ] * 2
