"""What is unusual in a trace is said, and what is usual is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_builders import call, kernel, operator, small, step, trace, written

import trine
from trine.record.model import Quality, Rank
from trine.record.readers.kineto import open_job, read_file

KINETO = Path("traces") / "kineto"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_content(content: Any) -> Rank:
        return read_file(written(tmp_path / "trace.json", content))

    return read_content


def note(rank: Rank, id: str) -> Quality | None:
    return next((quality for quality in rank.quality if quality.id == id), None)


#: Path → notes that it must have, notes that it must not have. Counts stand in the messages.
UNUSUAL: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "megatron_tp8_a100": (
        {"no-collective-metadata": "84 of 84", "whole-microseconds": ""},
        ("no-launch-record", "no-steps", "overlapping-on-stream", "missing-ranks"),
    ),
    "torchrec_straggler_v100": (
        {"no-collective-metadata": "13 of 13", "no-launch-record": "1 of 262"},
        ("missing-ranks", "rank-unknown"),
    ),
    "gloo_ddp4_cpu": ({"no-device-events": "", "host-collectives": "36"}, ("whole-microseconds",)),
    "single/a100_nccl_metadata.json.gz": (
        {
            "missing-ranks": "1 of 2",
            "no-work-record": "3 of 3,777",
            "left-out-events": "gpu_user_annotation (30)",
        },
        ("no-collective-metadata", "absolute-times", "no-launch-record"),
    ),
    "single/v100_ns_resolution.json.gz": ({"absolute-times": "256 ns"}, ("whole-microseconds",)),
    "single/mi300x_resnet_act_checkpoint.json.gz": (
        {
            "no-launch-record": "968 of 3,653",
            "device-lags-host": "2.4 steps",
            "agent-device-numbers": "(2)",
            "missing-ranks": "7 of 8",
        },
        ("absolute-times",),
    ),
    "single/h100_qwen1.5_0.5b.json.gz": ({"no-launch-record": ""}, ("agent-device-numbers",)),
    "single/mi300x_qwen1.5_0.5b.json.gz": ({"agent-device-numbers": "(2)"}, ()),
    "single/torch1.9_resnet50_workers0.json.gz": (
        {"old-categories": "Kernel", "memory-without-totals": "", "rank-unknown": ""},
        ("bare-list",),
    ),
    "single/torch1.9_resnet50_workers4.json.gz": ({"old-categories": "Operator"}, ()),
    "single/torch1.8_toplevel_list.json.gz": (
        {"bare-list": "", "old-categories": "", "no-launch-record": "765 of 9,927", "rank-unknown": ""},
        (),
    ),
    "odd/rank_not_found.json.gz": ({"rank-unknown": "", "no-device-events": ""}, ()),
    "odd/distributed_info_not_found.json.gz": ({"rank-unknown": "", "no-device-events": ""}, ()),
    "odd/rank_non_gpu.json.gz": ({"no-device-events": ""}, ("rank-unknown",)),
    "odd/cpu_only.json.gz": ({"no-device-events": "", "missing-ranks": "299 of 300"}, ("rank-unknown",)),
    "odd/large_integer.json.gz": ({"beyond-64-bit": "1 integer does not fit 64 bits"}, ()),
    "odd/mi250_minitoy_train_ROCm6_2_kineto.json.gz": ({"agent-device-numbers": "(2)"}, ()),
    "odd/triton_example.json.gz": ({"several-process-ids": "3100453"}, ("merged-file",)),
    "odd/event_sync_trace.json.gz": ({"waits-recorded": "4 waits"}, ()),
    "odd/step_based_trace_2543932.json.gz": (
        {"left-out-events": "gpu_user_annotation (10)", "no-steps": ""},
        (),
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_in_a_real_trace_is_said(data: Path, name: str) -> None:
    job = trine.load(data / KINETO / name)
    found = {quality.id: quality.message for quality in (*job.rank(job.rank_ids[0]).quality, *job.quality)}
    wanted, unwanted = UNUSUAL[name]
    for id, part in wanted.items():
        assert part in found[id], f"{id}: {found[id]}"
    assert not set(unwanted) & set(found)


def test_every_real_trace_is_in_the_list(data: Path) -> None:
    names = {
        str(path.relative_to(data / KINETO)) if path.parent.name in ("single", "odd") else path.parent.name
        for path in (data / KINETO).rglob("*.json.gz")
    }
    assert names <= set(UNUSUAL)


def test_a_healthy_trace_is_silent(tmp_path: Path) -> None:
    job = open_job(written(tmp_path / "t.json", small(0, 1)))
    assert job.quality == [] and job.rank(0).quality == []


# --- one oddity each, and its control --------------------------------------------------------------


def test_overlap_on_a_stream(read: Any) -> None:
    events = [kernel("a", 0, 10), kernel("b", 5, 3), kernel("c", 20, 5), kernel("d", 22, 9, stream=8)]
    said = note(read(trace(*events)), "overlapping-on-stream")
    assert said is not None and said.message.startswith("1 device events")
    apart = [kernel("a", 0, 10), kernel("b", 9, 3), kernel("c", 20, 5)]  # 1 us is rounding
    assert note(read(trace(*apart)), "overlapping-on-stream") is None


def test_overlap_with_a_long_one_before(read: Any) -> None:
    """A short kernel between hides nothing: what matters is the latest end so far."""
    events = [kernel("long", 0, 100), kernel("short", 10, 5), kernel("later", 50, 5)]
    said = note(read(trace(*events)), "overlapping-on-stream")
    assert said is not None and said.message.startswith("2 device events")


def test_launches_without_work(read: Any) -> None:
    calls = [call("cudaLaunchKernel", 10 * index, 2, index + 1) for index in range(20)]
    calls += [call("cudaEventRecord", 300, 1, 99)]  # never has any
    work = [kernel("k", 10 * index + 5, 2, index + 1) for index in range(20)]
    assert note(read(trace(*calls, *work)), "no-work-record") is None
    few = note(read(trace(*calls, *work[:-1])), "no-work-record")
    assert few is not None and few.severity == "info" and few.message.startswith("1 of 20")
    many = note(read(trace(*calls, *work[:10])), "no-work-record")
    assert many is not None and many.severity == "warning" and "cudaLaunchKernel (10)" in many.message


def test_launches_where_no_work_was_recorded_at_all(read: Any) -> None:
    said = note(read(trace(step(1, 0, 9), call("cudaLaunchKernel", 1, 1, 5))), "no-device-events")
    assert said is not None and "1 calls launched some" in said.message
    said = note(read(trace(step(1, 0, 9), operator("aten::mm", 1, 1))), "no-device-events")
    assert said is not None and "launched" not in said.message


def test_calls_that_the_profiler_cannot_name(read: Any) -> None:
    rank = read(trace(call("INVALID", 1, 1, 5), call("INVALID", 3, 1, 6), kernel("k", 5, 1, 5)))
    said = note(rank, "unnamed-calls")
    assert said is not None and said.message.startswith("2 runtime calls")
    assert rank.device["launch"].tolist() == [0]  # what it launched is joined all the same


def test_a_device_far_behind(read: Any) -> None:
    def work(late: float) -> Rank:
        events = [event for index in range(4) for event in (step(index, 100 * index, 90), call("cudaLaunchKernel", 100 * index + 10, 2, index + 1))]  # fmt: skip
        return read(trace(*events, *(kernel("k", 100 * index + late, 20, index + 1) for index in range(4))))

    said = note(work(250), "device-lags-host")
    assert said is not None and "2.0 steps" in said.message
    assert note(work(60), "device-lags-host") is None


def test_whole_microseconds(read: Any) -> None:
    events = [operator("aten::mm", index, 1) for index in range(200)]
    assert note(read(trace(*events)), "whole-microseconds") is not None
    finer = [*events, operator("aten::mm", 300.001, 1)]
    assert note(read(trace(*finer)), "whole-microseconds") is None


def test_absolute_times(read: Any) -> None:
    said = note(read(trace(operator("aten::mm", 1712195495519695.837, 1))), "absolute-times")
    assert said is not None
    relative = trace(operator("aten::mm", 4458676522690.655, 1), baseTimeNanoseconds=1711964646000000000)
    assert note(read(relative), "absolute-times") is None


def test_events_left_out_are_counted(read: Any) -> None:
    overhead = {**operator("Buffer Flush", 5, 1), "cat": "overhead", "pid": -1}
    said = note(read(trace(operator("aten::mm", 1, 1), overhead, overhead)), "left-out-events")
    assert said is not None and "overhead (2)" in said.message


def test_metadata_after_the_events_as_on_demand_traces_have_it(tmp_path: Path) -> None:
    events = written(tmp_path / "e.json", trace(kernel("k", 1, 1))).read_bytes().rstrip(b"}")
    info = (
        b', "distributedInfo": {"backend": "nccl", "rank": "3", "world_size": "4", "nccl_version": "unknown", '
        b'"pg_config": [{"pg_name": "7", "pg_desc": "tp", "pg_size": 2, "ranks": "[2, 3]"}]}}'
    )
    job = open_job(written(tmp_path / "t.json", events + info))
    rank = job.rank(3)
    assert (job.rank_ids, job.world_size) == ((3,), 4)
    assert [(group.id, group.ranks) for group in rank.groups] == [("7", (2, 3))]


@pytest.mark.parametrize("odd", [b"Infinity", b"-Infinity", b"NaN", b"nan", b"1e999", b"-inf"])
def test_numbers_that_json_does_not_have(tmp_path: Path, odd: bytes) -> None:
    text = (
        b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":5,"dur":1,"args":{"stream":7,'
        b'"blocks per SM":%s}},{"ph":"X","cat":"kernel","name":"b","pid":0,"tid":7,"ts":%s,"dur":1},'
        b'{"ph":"X","cat":"kernel","name":"c","pid":0,"tid":7,"ts":9,"dur":1}]}' % (odd, odd)
    )
    rank = read_file(written(tmp_path / "t.json", text))
    assert rank.device is not None and rank.device.text("name").tolist() == ["a", "c"]
    assert note(rank, "untimed-events") is not None
    assert odd == b"1e999" or note(rank, "repaired-events") is not None  # that one is JSON, beyond any double
