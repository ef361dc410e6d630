"""The reference values of ``expected.json``, computed here from the reader's tables alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_times import GRID_NS, rounded_as_the_reference

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
def test_to_the_last_digit_with_times_rounded_as_the_reference_did(
    data: Path, name: str, selection: str
) -> None:
    for rank in trine.load(data / "traces" / "kineto" / name):
        assert measured(rounded_as_the_reference(rank), selection) == expected(
            data, name, rank.rank, selection
        )


@pytest.mark.parametrize("name", SETS)
def test_exact_times_agree_within_the_references_rounding(data: Path, name: str) -> None:
    for rank in trine.load(data / "traces" / "kineto" / name):
        found, wanted = measured(rank, "all_events"), expected(data, name, rank.rank, "all_events")
        assert {k: found[k] for k in found if "kernels" in k} == {
            k: wanted[k] for k in found if "kernels" in k
        }
        for key in ("span_us", "idle_us"):
            assert abs(found[key] - wanted[key]) <= 40 * GRID_NS, key


def test_whole_microseconds_stay_whole(data: Path) -> None:
    """The reference says 595240.936 us here, of a file that holds no fraction of a microsecond."""
    rank = next(iter(trine.load(data / "traces" / "kineto" / "megatron_tp8_a100")))
    assert measured(rank, "all_events")["span_us"] == 595_241_000
