"""Small traces made by hand, one oddity each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def operator(name: str, ts: Any, dur: Any, tid: Any = 1, **args: Any) -> Json:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def annotation(name: str, ts: Any, dur: Any, tid: Any = 1, **args: Any) -> Json:
    return {**operator(name, ts, dur, tid, **args), "cat": "user_annotation"}


def call(name: str, ts: Any, dur: Any, correlation: int, tid: Any = 1) -> Json:
    return {**operator(name, ts, dur, tid, correlation=correlation), "cat": "cuda_runtime"}


def kernel(
    name: str, ts: Any, dur: Any, correlation: int | None = None, stream: int = 7, **args: Any
) -> Json:
    arguments = {"device": 0, "stream": stream, **args}
    if correlation is not None:
        arguments["correlation"] = correlation
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def step(number: int, ts: Any, dur: Any) -> Json:
    return annotation(f"ProfilerStep#{number}", ts, dur)


def trace(*events: Json, rank: int | None = None, world_size: int | None = None, **facts: Any) -> Json:
    """A trace; ``rank`` and ``world_size`` make its ``distributedInfo``."""
    if rank is not None or world_size is not None:
        info = {"backend": "nccl", "rank": rank, "world_size": world_size}
        facts["distributedInfo"] = {key: value for key, value in info.items() if value is not None}
    return {"schemaVersion": 1, **facts, "traceEvents": list(events)}


def small(rank: int | None = None, world_size: int | None = None, at: float = 100.0) -> Json:
    """One step with one launched kernel, from ``at`` microseconds on."""
    return trace(
        step(1, at, 50),
        call("cudaLaunchKernel", at + 10, 2, 5),
        kernel("gemm", at + 15, 20, 5),
        rank=rank,
        world_size=world_size,
    )


def written(path: Path, content: Any) -> Path:
    """``content`` (bytes, text or JSON) at ``path``, gzipped when the name ends in .gz."""
    if isinstance(content, str):
        content = content.encode()
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path
