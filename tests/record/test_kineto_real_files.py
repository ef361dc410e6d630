"""Every real trace at hand, by what is known of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trine
from trine.record.model import HOST_KINDS, MISSING, Rank, Table

KINETO = Path("traces") / "kineto"


def load(data: Path, name: str) -> list[Rank]:
    return list(trine.load(data / KINETO / name))


def only(data: Path, name: str) -> Rank:
    return load(data, name)[0]


def count(table: Table, kind: str) -> int:
    return int(np.count_nonzero(table["kind"] == HOST_KINDS.index(kind)))


def test_every_file_is_read_and_consistent(data: Path) -> None:
    files = sorted((data / KINETO).rglob("*.json.gz"))
    assert len(files) >= 30
    for file in files:
        for rank in trine.load(file):
            check(rank)


def check(rank: Rank) -> None:
    """What holds of any rank's tables."""
    host, device = rank.host, rank.device
    assert host is not None, rank.source
    parent = host["parent"]
    inside = parent >= 0
    assert (host["thread"][parent[inside]] == host["thread"][inside]).all()
    assert (host["start_ns"][parent[inside]] <= host["start_ns"][inside]).all()
    assert (host["end_ns"][parent[inside]] + 1000 >= host["end_ns"][inside]).all()
    assert (host["end_ns"] >= host["start_ns"]).all()
    if device is not None:
        launched = device["launch"] >= 0
        assert (host["correlation"][device["launch"][launched]] == device["correlation"][launched]).all()
        assert (device["step"][~launched] == MISSING).all()
    if rank.collectives is not None and device is not None:
        rows = rank.collectives["device_row"]
        assert (device["kind"][rows[rows >= 0]] == 1).all()
    assert not {q.id for q in rank.quality} & {
        "dropped-events",
        "truncated-file",
        "untimed-events",
        "rank-renamed",
    }


@pytest.mark.parametrize(
    ("name", "ranks", "world"),
    [
        ("megatron_tp8_a100", tuple(range(8)), 8),
        ("torchrec_straggler_v100", tuple(range(4)), 4),
        ("gloo_ddp4_cpu", tuple(range(4)), 4),
        ("single/mi300x_resnet_act_checkpoint.json.gz", (0,), 8),
        ("odd/cpu_only.json.gz", (34,), 300),
        ("odd/rank_not_found.json.gz", (0,), None),
        ("odd/distributed_info_not_found.json.gz", (0,), None),
    ],
)
def test_ranks_and_worlds(data: Path, name: str, ranks: tuple[int, ...], world: int | None) -> None:
    job = trine.load(data / KINETO / name)
    assert (job.rank_ids, job.world_size) == (ranks, world)
    assert [rank.rank for rank in job] == list(ranks)


def test_a_folder_of_unrelated_traces_says_so(data: Path) -> None:
    job = trine.load(data / KINETO / "single")
    assert "mixed-runs" in {quality.id for quality in job.quality}


@pytest.mark.parametrize(
    ("name", "steps", "device", "launched"),
    [
        ("single/a100_nccl_metadata.json.gz", [4, 5, 6], 3774, 3774),
        ("single/v100_ns_resolution.json.gz", [101, 102, 103, 104, 105], 6095, 6095),
        ("single/mi300x_resnet_act_checkpoint.json.gz", [15, 16, 17], 3653, 3653 - 968),
        ("single/torch1.8_toplevel_list.json.gz", [5, 6, 7, 8, 9, 10], 9927, 9162),
        ("single/torch1.9_resnet50_workers0.json.gz", [5, 6, 7, 8, 9, 10], 9096, 9096),
        ("odd/triton_example.json.gz", [1], 1, 1),
    ],
)
def test_steps_and_launches(data: Path, name: str, steps: list[int], device: int, launched: int) -> None:
    rank = only(data, name)
    assert rank.steps is not None and rank.steps["index"].tolist() == steps
    assert rank.device is not None and len(rank.device) == device
    assert int(np.count_nonzero(rank.device["launch"] >= 0)) == launched


def collectives(rank: Rank) -> dict[tuple[Any, ...], int]:
    assert rank.collectives is not None
    frame = rank.collectives.to_pandas()
    grouped = frame.groupby(["operation", "group", "dtype", "bytes"], dropna=False).size()
    return {key: int(value) for key, value in grouped.items()}


def test_collectives_with_metadata(data: Path) -> None:
    rank = only(data, "single/a100_nccl_metadata.json.gz")
    assert collectives(rank)["all_reduce", "0", "float32", 4 * 6637568] == 3
    assert collectives(rank)["broadcast", "0", "int64", 8 * 53] == 3
    assert rank.groups[0].ranks == (0, 1)


def test_collectives_without_metadata(data: Path) -> None:
    rank = only(data, "megatron_tp8_a100")
    assert rank.collectives is not None
    frame = rank.collectives.to_pandas()
    assert set(frame["operation"]) == {"all_reduce"}
    assert frame.groupby(["dtype", "bytes"]).size().to_dict() == {
        ("float16", 4 * 2048 * 4096 * 2): 81,
        ("float32", 4 * 2048 * 4): 3,
    }
    assert (rank.collectives["issued_ns"] <= rank.collectives["start_ns"]).all()


def test_all_to_all_behind_send_and_receive(data: Path) -> None:
    for rank in load(data, "torchrec_straggler_v100"):
        assert rank.collectives is not None
        assert set(rank.collectives.text("operation")) == {"all_to_all"}
        assert len(rank.collectives) == (12 if rank.rank == 2 else 13)


def test_gloo(data: Path) -> None:
    for rank in load(data, "gloo_ddp4_cpu"):
        assert rank.device is None and rank.memory is not None
        table = rank.collectives
        assert table is not None
        operations = table.text("operation")
        assert (operations == "all_reduce").sum() == (33 if rank.rank in (0, 2) else 30)
        assert (operations == "all_gather").sum() == 3
        assert (table["issued_ns"] != MISSING).all() and (table["issued_ns"] <= table["start_ns"]).all()
        assert set(table["bytes"][operations == "all_reduce"].tolist()) >= {1049600, 1051648, 1052672, 2048}


def test_waiting_for_the_loader_is_seen_in_old_traces(data: Path) -> None:
    slow, fast = (only(data, f"single/torch1.9_resnet50_workers{workers}.json.gz") for workers in (0, 4))
    times = []
    for rank in (slow, fast):
        assert rank.host is not None
        rows = rank.host["kind"] == HOST_KINDS.index("loader")
        times.append(int((rank.host["end_ns"] - rank.host["start_ns"])[rows].sum()))
    assert times[0] > 5 * times[1] > 0


def test_stacks_shapes_and_memory(data: Path) -> None:
    for name in ("h100", "mi300x"):
        rank = only(data, f"single/{name}_qwen1.5_0.5b.json.gz")
        assert rank.host is not None and rank.memory is not None
        assert count(rank.host, "python") > 4000 and count(rank.host, "sync") > 0
        assert (rank.host["shapes"] >= 0).any()
        assert set(rank.memory["device"].tolist()) <= {-1, 0}
        assert (rank.memory["reserved_bytes"] > 0).any()
        assert rank.devices[0].memory_bytes is not None
