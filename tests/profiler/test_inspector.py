"""NVIDIA's Inspector: lines in its documented format, joined to rows as the observer gives them on NCCL."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.profiler.inspector import InspectorJoin, InspectorTail
from trine.record.model import MISSING


def line(name: str, size: int, called_us: int, microseconds: int, **changes: Any) -> str:
    told: dict[str, Any] = {
        "header": {"id": "0xe62dedaa97644a", "rank": 0, "n_ranks": 8, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": called_us + 10**6,
            "hostname": "node",
            "pid": os.getpid(),
        },
        "coll_perf": {
            "coll": name,
            "coll_sn": 3,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": microseconds,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 1.0,
            "coll_busbw_gbs": 1.0,
            "event_trace_ts": {
                "coll_start_ts": called_us,
                "coll_stop_ts": called_us + 5,
                "kernel_events": [
                    {
                        "channel_id": 0,
                        "kernel_start_ts": called_us + 100,
                        "kernel_stop_ts": called_us + 90 + microseconds,
                    },
                    {
                        "channel_id": 1,
                        "kernel_start_ts": called_us + 101,
                        "kernel_stop_ts": called_us + 100 + microseconds,
                    },
                ],
            },
        },
    }
    for key, value in changes.items():
        told["metadata" if key == "pid" else "coll_perf"][key] = value
    return json.dumps(told) + "\n"


def row(operation: str, issued_ns: int, given: int, made: int) -> dict[str, Any]:
    return {
        "operation": operation,
        "group": "0",
        "in_bytes": given,
        "out_bytes": made,
        "issued_ns": issued_ns,
        "start_ns": MISSING,
        "end_ns": MISSING,
        "state": "issued",
    }


def columns(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.array([r[name] for r in rows]) if isinstance(rows[0][name], int) else [r[name] for r in rows]
        for name in rows[0]
    }


def test_rows_get_the_times_of_their_own_calls(tmp_path: Path) -> None:
    now = time.perf_counter_ns()
    unix_us = (time.time_ns() - time.perf_counter_ns() + now) // 1000
    file = tmp_path / "node-pid1.log"
    file.write_text(
        line("AllReduce", 400, unix_us + 10, 50)
        + line("AllGather", 800, unix_us + 3010, 70)
        + line("AllReduce", 400, unix_us + 20_010, 60)
        + line("AllReduce", 400, unix_us + 10, 99, pid=1)  # another process of the node
        + "{half a li"
    )
    join = InspectorJoin(InspectorTail(tmp_path, os.getpid()))
    given = columns(
        row("all_reduce", now, 400, 400),
        row("all_gather", now + 3_000_000, 100, 800),
        row("all_reduce", now + 20_000_000, 400, 400),
        row("broadcast", now + 21_000_000, 400, 400),
    )
    told = join.through(given, {"0": 8}, last=False)
    assert told["operation"] == ["all_reduce", "all_gather", "all_reduce"]
    # The earliest channel's start to the last one's stop.
    assert (told["end_ns"] - told["start_ns"]).tolist() == [50_000, 70_000, 60_000]
    assert np.abs(told["start_ns"] - given["issued_ns"][:3] - 110_000).max() < 100_000
    assert told["state"] == ["completed"] * 3
    assert join.matched == 3
    rest = join.through({}, {"0": 8}, last=True)
    assert rest["operation"] == ["broadcast"]
    assert rest["end_ns"].tolist() == [MISSING]


def test_a_line_that_comes_later_still_finds_its_row(tmp_path: Path) -> None:
    now = time.perf_counter_ns()
    unix_us = (time.time_ns() - time.perf_counter_ns() + now) // 1000
    join = InspectorJoin(InspectorTail(tmp_path / "not yet", os.getpid()))
    assert join.through(columns(row("all_reduce", now, 400, 400)), {"0": 8}, last=False) == {}
    (tmp_path / "not yet").mkdir()
    text = line("AllReduce", 400, unix_us + 10, 50)
    file = tmp_path / "not yet" / "dump"
    file.write_text(text[:40])
    assert join.through({}, {"0": 8}, last=False) == {}
    file.write_text(text)
    assert join.through({}, {"0": 8}, last=False)["state"] == ["completed"]


def test_lines_without_times_and_lines_that_are_none_are_counted(tmp_path: Path) -> None:
    plain = json.loads(line("AllReduce", 400, 1, 1))
    del plain["coll_perf"]["event_trace_ts"]
    (tmp_path / "dump").write_text(json.dumps(plain) + "\nnot json\n[]\n\n")
    tail = InspectorTail(tmp_path, os.getpid())
    tail.read()
    assert (tail.untimed, tail.unreadable) == (1, 2)
    assert tail.find("all_reduce", (400, 400), 8, 1000) is None


@pytest.mark.parametrize(
    "missing", ["NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_ENABLE", "NCCL_INSPECTOR_DUMP_VERBOSE"]
)
def test_only_a_dump_that_was_asked_for_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("NCCL_INSPECTOR_DUMP_DIR", str(tmp_path))
    for name in ("NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_ENABLE", "NCCL_INSPECTOR_DUMP_VERBOSE"):
        monkeypatch.setenv(name, "1")
    assert InspectorTail.of_environment() is not None
    monkeypatch.delenv(missing)
    assert InspectorTail.of_environment() is None
