"""Runs for the dashboard's tests: native records written as the profiler writes them, and a million spans."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from trine.analyzers.results import Analysis
from trine.dashboard.detail import make_lane
from trine.dashboard.lanes import KINDS, RankLanes
from trine.dashboard.tasks import analyse_run, rank_lanes
from trine.record.model import PHASES
from trine.record.store import RankWriter

MS = 1_000_000
#: Lanes and spans a lane of the synthetic run: 1.2 million spans.
MILLION_LANES, MILLION_SPANS = 16, 75_000


class Recorder:
    """One rank of a record, written step by step."""

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.writer = RankWriter(folder, rank, world_size)
        self.begin_ns = time.time_ns()
        self.index = 0
        if rank == 0:
            self.writer.describe_run({"name": folder.name, "world_size": world_size})

    def steps(self, count: int, step_ns: int = 50 * MS, *, complete: int = 1) -> None:
        """Append steps of one part each, half forward, half backward, with a loss that falls."""
        for _ in range(count):
            start = self.begin_ns + self.index * step_ns
            self.part(self.index, start, start + step_ns, loss=3.0 / (1 + self.index), complete=complete)
            self.index += complete

    def part(
        self, index: int, start: int, end: int, *, loss: float = float("nan"), complete: int = 1
    ) -> None:
        half = (end - start) // 2
        phases = {f"phase_{name}_ns": [0] for name in PHASES}
        phases |= {"phase_forward_ns": [half], "phase_backward_ns": [end - start - half]}
        self.writer.append(
            {
                "parts": {
                    "index": [index],
                    "start_ns": [start],
                    "end_ns": [end],
                    **phases,
                    "tokens": [1024],
                    "samples": [8],
                    "loss": [loss],
                    "complete": [complete],
                },
                "samples": {
                    "time_ns": [end],
                    "metric": ["memory/resident_bytes"],
                    "value": [float(300 * 2**20 + index)],
                },
            },
            boundary=complete == 1,
        )

    def close(self, state: str = "finished") -> None:
        self.writer.close({"state": state})


def write_record(folder: Path, steps: int = 30, *, state: str = "finished") -> Path:
    """A whole record of one rank."""
    recorder = Recorder(folder)
    recorder.steps(steps)
    recorder.close(state)
    return folder


def million(path: str = "million", rank: int = 0) -> RankLanes:
    """1.2 million kernels on 16 streams: log-normal lengths about half a microsecond, short gaps, Unix times."""
    random = np.random.default_rng(rank)
    origin = 1_700_000_000_000_000_000
    lanes = []
    for stream in range(MILLION_LANES):
        length = np.maximum(1, random.lognormal(6.2, 1.0, MILLION_SPANS)).astype(np.int64)
        gap = random.exponential(300, MILLION_SPANS).astype(np.int64)
        end = origin + np.cumsum(length + gap)
        kind = (random.random(MILLION_SPANS) < 0.1).astype(np.uint8)
        name = random.integers(0, 40, MILLION_SPANS).astype(np.uint32)
        lanes.append(make_lane(f"stream {stream}", "device", end - length, end, kind, name, origin))
    last = max(float(lane.reach[-1]) for lane in lanes)
    return RankLanes(
        rank, origin, "node-a", tuple(f"kernel_{n}" for n in range(40)), tuple(lanes), (), 0.0, last
    )


def is_million(path: str) -> bool:
    return Path(path).name.startswith("million")


def analyse(path: str, steps: str, size_bytes: int) -> Analysis:
    """The real analysis; of the synthetic run one made by hand."""
    if is_million(path):
        from analysis_builders import build

        return build()
    return analyse_run(path, steps, size_bytes)


def read(path: str, rank: int) -> RankLanes:
    """The real timeline; of the synthetic run a million spans."""
    return million(path, rank) if is_million(path) else rank_lanes(path, rank)


def write_million(folder: Path) -> Path:
    """A file that the list takes for a trace; what it stands for is made by :func:`million`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "million.json"
    path.write_text(json.dumps({"traceEvents": []}))
    return path


def decode(answer: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and columns of the timeline's binary answer, as the browser reads them."""
    length = int(np.frombuffer(answer, "<u4", 1)[0])
    head = json.loads(answer[4 : 4 + length])
    count = sum(lane["count"] for lane in head["lanes"])
    at, columns = 4 + length, {}
    for name, kind in (
        ("start", "<f8"),
        ("duration", "<f8"),
        ("name", "<u4"),
        ("kind", "u1"),
        ("fill", "u1"),
    ):
        columns[name] = np.frombuffer(answer, kind, count, at)
        at += columns[name].nbytes
    assert at == len(answer)
    assert all(kind < len(KINDS) for kind in columns["kind"])
    return head, columns


def write_evil(folder: Path) -> Path:
    """A trace whose names are markup and script."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    events: list[dict[str, Any]] = []
    for step in range(4):
        at = 1_000_000 + step * 10_000
        host = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**host, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 9_900},
            {**host, "cat": "cpu_op", "name": name, "ts": at + 10, "dur": 2_000},
            {
                **host,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": at + 20,
                "dur": 5,
                "args": {"correlation": step + 1},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": at + 100,
                "dur": 6_000,
                "args": {"device": 0, "stream": 7, "correlation": step + 1},
            },
        ]
    path = folder / "evil.json"
    path.write_text(
        json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": name}], "traceEvents": events})
    )
    return path
