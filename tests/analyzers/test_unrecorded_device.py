"""A device whose work was not recorded: the host's operators are no verdict on it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trine import analyze, load
from trine.analyzers.results import Analysis

A100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}


def _span(name: str, ts: float, dur: float, category: str, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, **more}


def _written(folder: Path, backward_by: int | None = 7, **facts: Any) -> Path:
    """Twelve steps of 20 ms, of which operators take 5 ms forward; backward lasts 12 ms, with operators of thread
    ``backward_by`` in it, or none."""
    events = []
    for step in range(12):
        at = 1000.0 + 20_000 * step
        events.append(_span(f"ProfilerStep#{step}", at, 19_990, "user_annotation"))
        events += [_span("aten::mm", at + 100 + 500 * k, 450, "cpu_op") for k in range(10)]
        events.append(_span("## backward ##", at + 6_000, 12_000, "user_annotation"))
        if backward_by is not None:
            events += [
                _span("MmBackward0", at + 6_100 + 1_200 * k, 600, "cpu_op") | {"tid": backward_by}
                for k in range(9)
            ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **facts, "traceEvents": events}))
    return path


def _says(analysis: Analysis) -> list[str]:
    return [finding.id for finding in analysis.findings]


def _is_unsaid(analysis: Analysis) -> bool:
    verdict = analysis.verdict
    return verdict.bound_by is None and "cannot be said" in verdict.sentence and verdict.confidence == "low"


@pytest.mark.parametrize(
    "facts",
    [A100, {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}}],
    ids=["device named", "nccl"],
)
def test_host_operators_are_no_verdict_where_a_device_is_named(tmp_path: Path, facts: dict[str, Any]) -> None:
    analysis = analyze(load(_written(tmp_path, **facts)))
    assert _is_unsaid(analysis) and "ProfilerActivity.CUDA" in analysis.verdict.sentence
    assert _says(analysis) == []
    assert not {"critical_path", "idle_gaps"} & set(analysis.studies)
    assert any(note.id == "device-not-recorded" for note in analysis.data_quality)


def test_a_processor_is_judged_by_its_operators(tmp_path: Path) -> None:
    analysis = analyze(load(_written(tmp_path)))
    assert not any(note.id == "device-not-recorded" for note in analysis.data_quality)
    assert "cannot be said" not in analysis.verdict.sentence
    idle = analysis.ranks[0].summary.breakdown
    assert idle is not None and idle.idle.other == 0 and idle.idle.host > 0


def test_backward_of_another_thread_is_no_time_of_pythons(tmp_path: Path) -> None:
    analysis = analyze(load(_written(tmp_path, backward_by=None)))
    breakdown = analysis.ranks[0].summary.breakdown
    assert breakdown is not None
    assert breakdown.idle.other == len(breakdown.steps) * 12_000_000
    assert _is_unsaid(analysis), "only a device has a thread of its own for backward"


@pytest.mark.parametrize("name", ["distributed_info_not_found", "rank_not_found", "rank_non_gpu"])
def test_traces_without_their_device(data: Path, name: str) -> None:
    analysis = analyze(load(data / "traces" / "kineto" / "odd" / f"{name}.json.gz"))
    assert _is_unsaid(analysis) and _says(analysis) == []


def test_a_file_cut_before_its_device_says_so_and_the_whole_one_is_sound(data: Path, tmp_path: Path) -> None:
    whole = data / "traces" / "kineto" / "single" / "mi300x_qwen1.5_0.5b.json.gz"
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole.read_bytes()[:100_000])
    analysis = analyze(load(cut))
    assert _is_unsaid(analysis) and "breaks off" in analysis.verdict.sentence and _says(analysis) == []
    sound = analyze(load(whole))
    assert sound.verdict.bound_by == "computation" and not any(f.kind == "fault" for f in sound.findings)


def test_a_file_cut_among_its_devices_work_says_so(data: Path, tmp_path: Path) -> None:
    """All calls are there and half of the kernels: a device that seems idle, and is not."""
    source = data / "traces" / "kineto" / "single" / "mi300x_qwen1.5_0.5b.json.gz"
    events = json.loads(gzip.decompress(source.read_bytes()))["traceEvents"]
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    works = [event for event in events if event.get("cat") in device]
    kept = [event for event in events if event.get("cat") not in device] + works[: len(works) // 2]
    text = json.dumps({"schemaVersion": 1, "traceEvents": kept})
    path = tmp_path / "cut.json"
    path.write_text(text[: -len("}]}") - 1])
    analysis = analyze(load(path))
    assert _is_unsaid(analysis) and "breaks off" in analysis.verdict.sentence
