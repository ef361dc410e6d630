"""The JSON contract of the design, key by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis_builders import breakdown, build, communication, rank_result, steps_table
from analysis_tables import summary_of

from trine.analyzers import conclude, parse_selection, to_json
from trine.analyzers.results import (
    Analysis,
    CheckItem,
    Finding,
    Gain,
    MemorySummary,
    Mfu,
    NotBound,
    Prediction,
    Recommendation,
)
from trine.record.model import Job

TOP = {
    "schema", "source", "data_quality", "hardware", "ranks", "collectives", "mfu", "pipeline", "critical_path",
    "kernels", "operators", "memory_owners", "desync", "padding", "goodput", "checklist", "not_bound_by", "findings",
}  # fmt: skip
RANK = {
    "rank", "window_ns", "steps", "phases_ns", "breakdown_ns", "idle_ns", "busy_ns", "overlap_ns",
    "overlap_efficiency", "communication", "clock_offset_ns", "memory", "step_time_ns",
}  # fmt: skip
COLLECTIVE = {
    "op", "group", "ranks", "bytes", "calls", "transfer_ns", "wait_ns", "algbw_bytes_per_s", "busbw_bytes_per_s",
}  # fmt: skip


def healthy() -> Analysis:
    memory = MemorySummary(100, 120, 1000, {"parameters": 40, "unattributed": 60}, False, 0, "device")
    return build(
        [
            rank_result(rank, steps=steps_table(), window=breakdown(), part=communication(), memory=memory)
            for rank in (0, 1)
        ]
    )


def test_a_full_analysis_has_every_key_of_the_contract() -> None:
    content = to_json(healthy())
    assert content["schema"] == "trine.analysis/1"
    assert set(content) >= TOP
    assert set(content["source"]) >= {"format", "world_size", "ranks", "missing_ranks", "steps"}
    rank = content["ranks"][0]
    assert set(rank) >= RANK
    assert set(rank["breakdown_ns"]) == {"compute", "exposed_communication", "exposed_copy", "idle"}
    assert set(rank["idle_ns"]) == {"data", "host", "sync", "dependency", "bubble", "other"}
    assert set(rank["busy_ns"]) == {"any", "compute", "communication", "copy"}
    assert set(rank["communication"]) >= {
        "transfer_ns", "wait_ns", "caused_wait_ns", "lateness_ns", "last_in", "matched",
    }  # fmt: skip
    assert set(rank["memory"]) >= {"peak_bytes", "reserved_peak_bytes", "at_peak_bytes"}
    assert set(rank["step_time_ns"]) >= {"median", "low", "high", "p95"}
    assert set(rank["phases_ns"]) == {
        "data", "copy", "forward", "backward", "optimizer", "exposed_communication", "other",
    }  # fmt: skip
    assert all(set(entry) >= COLLECTIVE for entry in content["collectives"])


def test_it_is_plain_json_and_integers_stay_integers() -> None:
    content = to_json(healthy())
    assert json.loads(json.dumps(content, allow_nan=False)) == content

    def check(value, key: str) -> None:
        if isinstance(value, dict):
            for inner, one in value.items():
                check(one, inner if not key.endswith("_ns") else key)
        elif isinstance(value, list):
            for one in value:
                check(one, key)
        elif value is not None and key.endswith(("_ns", "_bytes")):
            assert type(value) is int, key

    check({name: part for name, part in content.items() if name != "findings"}, "")


def test_what_cannot_be_said_is_null_and_the_reason_is_there() -> None:
    job = Job(Path("by hand"), "kineto", (), None)
    content = to_json(conclude(job, [summary_of(0)], parse_selection("all")))
    rank = content["ranks"][0]
    for key in (
        "window_ns",
        "phases_ns",
        "breakdown_ns",
        "idle_ns",
        "busy_ns",
        "communication",
        "memory",
        "step_time_ns",
    ):
        assert rank[key] is None
    assert rank["breakdown_missing"] == "made by hand"
    assert content["mfu"] is None and content["pipeline"] is None
    said = {note["id"]: note["message"] for note in content["data_quality"]}
    assert "no-mfu" in said and "unknown-hardware" in said


def test_findings_carry_their_prediction_and_the_change() -> None:
    finding = Finding(
        "low-precision-unused",
        "opportunity",
        "Matrix products run in fp32",
        {"share": np.float64(0.5), "ranks": (0, 1), "nan": float("nan")},
        Recommendation(
            {"precision.dtype": "bf16"},
            "bf16 is faster",
            "losses differ by rounding",
            Prediction(Gain(1, 2, 3), Gain(7, 8, 9), -100, "a × b", {"a": np.int64(4)}),
        ),
        0.25,
    )
    analysis = replace(
        healthy(),
        findings=(finding,),
        not_bound_by=(NotBound("input-bound", "1 % waits for data"),),
        checklist=(CheckItem("mfu", "MFU above 50 %", "unknown", "no peak", "calibrate"),),
        mfu=Mfu(None, None, None, 1e12, "bf16", {"palm": 0.4, "counted": 0.3}, 0.5),
    )
    content = to_json(analysis)
    (found,) = content["findings"]
    assert found["recommendation"]["change"] == {"precision.dtype": "bf16"}
    assert found["recommendation"]["predicted"] == {
        "gain_ns": {"low": 1, "mid": 2, "high": 3},
        "step_time_ns": {"low": 7, "mid": 8, "high": 9},
        "peak_bytes_change": -100,
        "formula": "a × b",
        "inputs": {"a": 4},
    }
    assert found["evidence"] == {"share": 0.5, "ranks": [0, 1], "nan": None}
    assert content["not_bound_by"][0]["id"] == "input-bound"
    assert set(content["checklist"][0]) >= {"id", "state", "evidence", "next"}
    assert set(content["mfu"]) >= {
        "value",
        "convention",
        "flops_per_step",
        "peak_flops_per_s",
        "range",
        "hfu",
    }
    assert content["mfu"]["value"] is None and content["mfu"]["range"] == {"palm": 0.4, "counted": 0.3}
    json.dumps(content, allow_nan=False)


@pytest.mark.parametrize("kind", ["all", "complete"])
def test_the_selection_is_named(kind: str) -> None:
    job = Job(Path("by hand"), "kineto", (), None)
    assert to_json(conclude(job, [summary_of(0)], parse_selection(kind)))["source"]["selection"] == kind
