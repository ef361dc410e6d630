"""Small Kineto traces of a job with a GPU a rank, written as torch.profiler writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_job(
    folder: Path,
    step_us: float = 10_000,
    *,
    ranks: int = 2,
    steps: int = 12,
    seed: int = 0,
    device: str = "NVIDIA A100-SXM4-80GB",
) -> Path:
    """A trace a rank: a forward and a backward kernel and an all-reduce a step; steps scatter by 1 %.

    The backward kernel takes what the others leave, so a longer step is a longer backward.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = step_us * np.exp(0.01 * np.random.default_rng(seed).standard_normal(steps + 1))
    for rank in range(ranks):
        trace = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": rank, "name": device, "totalGlobalMem": 85_000_000_000}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "traceEvents": list(_events(rank, ranks, lengths)),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


def _events(rank: int, ranks: int, lengths: Any) -> Any:
    start, correlation = 1_000_000.0, 0
    for step, length in enumerate(lengths):
        host = {"ph": "X", "pid": 100, "tid": 100}
        yield {
            **host,
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step}",
            "ts": start,
            "dur": length - 1,
        }
        at = start + 50
        kernels = (
            ("ampere_fp16_gemm_forward", 2_500.0, {}),
            ("ampere_fp16_gemm_backward", length - 4_000, {}),
            (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                1_000.0,
                {
                    "Collective name": "allreduce",
                    "In msg nelems": 1_000_000,
                    "Out msg nelems": 1_000_000,
                    "dtype": "Float",
                    "Group size": ranks,
                    "Process Group Name": "0",
                },
            ),
        )
        for name, duration, more in kernels:
            correlation += 1
            link = {"correlation": correlation}
            yield {**host, "cat": "cpu_op", "name": "aten::mm", "ts": at - 8, "dur": 20}
            yield {
                **host,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": at - 5,
                "dur": 5,
                "args": link,
            }
            yield {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": rank,
                "tid": 7,
                "ts": at + 5,
                "dur": duration,
                "args": {**link, **more, "device": rank, "stream": 7},
            }
            at += duration + 20
        start += length
