"""Kineto traces of operators and their kernels, written for tests: each operator launches its kernels one after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trine
from trine.analyzers.results import Analysis

MM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
SGEMM = "ampere_sgemm_128x64_tn"
MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, MulFunctor<float> > >"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"
BF16, FP32 = "c10::BFloat16", "float"


@dataclass(slots=True)
class Call:
    """An operator and its kernels (name, µs). ``inside`` are operators that it calls, which then launch."""

    name: str
    dims: Sequence[Any] = ()
    types: Sequence[str] = ()
    kernels: Sequence[tuple[str, float]] = ()
    grid: int = 1000
    inside: Sequence[Call] = ()
    module: str | None = None
    sequence: int | None = None
    backward: bool = False
    category: str = "kernel"
    extra: dict[str, Any] = field(default_factory=dict)


def mm(m: int, n: int, k: int, us: float, kernel: str = MM, dtype: str = BF16, **changes: Any) -> Call:
    """``aten::mm`` of m×k and k×n."""
    return Call("aten::mm", [[m, k], [k, n]], [dtype, dtype], [(kernel, us)], **changes)


def pointwise(elements: int, us: float, name: str = "aten::mul", kernel: str = MUL, inputs: int = 2) -> Call:
    """An elementwise operator in fp32."""
    return Call(name, [[elements]] * inputs, [FP32] * inputs, [(kernel, us)])


def trace(
    calls: Sequence[Call], *, steps: int = 3, device: str = "NVIDIA A100-SXM4-80GB", sms: int | None = 108
) -> dict[str, Any]:
    """A trace of ``steps`` equal steps; the device runs without gaps, launches take 1 µs each and lie before."""
    writer = _Writer()
    for step in range(steps):
        begin = writer.host
        for call in calls:
            writer.call(call)
        writer.device += 1.0  # the next step's work starts after a breath
        writer.host = max(writer.host, writer.device - 1.0)
        writer.events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "pid": 1,
                "tid": 1,
                "ts": begin,
                "dur": writer.host - begin,
            }
        )
    properties = {"id": 0, "name": device, "totalGlobalMem": 80 * 2**30}
    if sms is not None:
        properties["numSms"] = sms
    return {
        "schemaVersion": 1,
        "deviceProperties": [properties],
        "record_shapes": 1,
        "traceEvents": writer.events,
    }


class _Writer:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.host, self.device = 1000.0, 1010.0
        self.correlation = 0

    def call(self, call: Call) -> None:
        start = self.host
        event: dict[str, Any] = {
            "ph": "X",
            "cat": "cpu_op",
            "name": call.name,
            "pid": 1,
            "tid": 2 if call.backward else 1,
            "ts": start,
        }
        self.events.append(event)
        for inner in call.inside:
            self.call(inner)
        for name, us in call.kernels:
            self._launch(call, name, us)
        self.host += 0.5
        arguments: dict[str, Any] = {
            "Input Dims": list(call.dims),
            "Input type": list(call.types),
            **call.extra,
        }
        if call.sequence is not None:
            arguments |= {"Sequence number": call.sequence, "Fwd thread id": int(call.backward)}
        if call.module is not None:
            arguments["Module Hierarchy"] = call.module
        event |= {"dur": self.host - start, "args": arguments}

    def _launch(self, call: Call, name: str, us: float) -> None:
        self.correlation += 1
        thread = 2 if call.backward else 1
        self.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "ts": self.host, "dur": 1.0,
             "args": {"correlation": self.correlation}}
        )  # fmt: skip
        self.host += 1.0
        self.device = max(self.device, self.host)
        self.events.append(
            {"ph": "X", "cat": call.category, "name": name, "pid": 0, "tid": 7, "ts": self.device, "dur": us,
             "args": {"correlation": self.correlation, "stream": 7, "device": 0, "grid": [call.grid, 1, 1], "block": [256, 1, 1]}}
        )  # fmt: skip
        self.device += us


def analyzed(folder: Path, calls: Sequence[Call], **options: Any) -> Analysis:
    """The analysis of such a trace."""
    path = folder / "rank0.json"
    path.write_text(json.dumps(trace(calls, **options)), encoding="utf-8")
    return trine.analyze(trine.load(path))
