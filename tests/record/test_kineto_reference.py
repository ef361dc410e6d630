"""The reference values of ``expected.json``, computed here from the reader's tables alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trine
from trine.record.model import Rank

SETS = (
    "megatron_tp8_a100",
    "torchrec_straggler_v100",
    "single/a100_nccl_metadata.json.gz",
    "single/v100_ns_resolution.json.gz",
    "single/mi300x_resnet_act_checkpoint.json.gz",
)


def union(start: Any, end: Any) -> list[list[int]]:
    merged: list[list[int]] = []
    for begins, ends in sorted(zip(start.tolist(), end.tolist(), strict=True)):
        if merged and begins <= merged[-1][1]:
            merged[-1][1] = max(ends, merged[-1][1])
        else:
            merged.append([begins, ends])
    return merged


def total(spans: list[list[int]]) -> int:
    return sum(end - start for start, end in spans)


def overlap(one: list[list[int]], other: list[list[int]]) -> int:
    found = left = right = 0
    while left < len(one) and right < len(other):
        low, high = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        found += max(0, high - low)
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def measured(rank: Rank, selection: str) -> dict[str, int]:
    device, steps = rank.device, rank.steps
    assert device is not None
    rows = device["end_ns"] > device["start_ns"]
    if selection == "complete_steps" and steps is not None and len(steps) > 1:
        rows &= np.isin(device["step"], steps["index"][:-1])
    start, end, kind = device["start_ns"][rows], device["end_ns"][rows], device["kind"][rows]
    compute, communication, copies = (union(start[kind == k], end[kind == k]) for k in range(3))
    busy, span = total(union(start, end)), int(end.max() - start.min())
    both = overlap(compute, communication)
    return {
        "span_us": span,
        "busy_us": busy,
        "idle_us": span - busy,
        "compute_us": total(compute),
        "communication_us": total(communication),
        "memory_us": total(copies),
        "overlap_us": both,
        "exposed_communication_us": total(communication) - both,
        "kernels": int(np.count_nonzero(kind < 2)),
        "communication_kernels": int(np.count_nonzero(kind == 1)),
    }


def expected(data: Path, name: str, rank: int, selection: str) -> dict[str, int]:
    values = json.loads((data / "traces" / "expected.json").read_text())[f"kineto/{name}"]
    wanted = values["ranks"][str(rank)][selection]
    return {key: round(value * 1000) if key.endswith("_us") else value for key, value in wanted.items()}


@pytest.mark.parametrize("selection", ["all_events", "complete_steps"])
@pytest.mark.parametrize("name", SETS)
def test_to_the_last_digit(data: Path, name: str, selection: str) -> None:
    for rank in trine.load(data / "traces" / "kineto" / name):
        assert measured(rank, selection) == expected(data, name, rank.rank, selection)


def test_host_times_of_whole_microseconds_stay_whole(data: Path) -> None:
    """Device starts are what a double of microseconds holds; the host's nest and stay exact."""
    host = next(iter(trine.load(data / "traces" / "kineto" / "megatron_tp8_a100"))).host
    assert host is not None
    assert not (host["start_ns"] % 1000).any() and not (host["end_ns"] % 1000).any()
