"""Measure what this machine reaches: matrix products by dtype, memory copies, all-reduce.

Short and repeatable, not a benchmark suite: the best of a few seconds' repetitions, so that a busy
neighbour lowers a figure little. What comes out is kept by device name and, on a CPU, by thread
count (:func:`trine.record.hardware.store_calibration`), and stands wherever no datasheet can.

    matmul      2n³ FLOPs over the best time of C = AB, n from 256 up to what fits the time
    copy        bytes read plus bytes written over the best time of a copy that no cache holds
    all-reduce  T(S) = α + S/β over sizes from 8 B to 16 MiB, least squares of relative errors
    operations  single products, work on memory and other collectives (calibrate_operations, calibrate_links)
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trine.record.errors import TrineError
from trine.record.hardware import Peaks, fit_latency_bandwidth, processor_name, usable_cores

from .calibrate_operations import measure_operations
from .calibrate_ranks import Rows, Tell, measure_all_reduce, measure_links, timed

__all__ = [
    "calibrate_all",
    "calibrate_cpu",
    "calibrate_device",
    "fit_latency_bandwidth",
    "measure_all_reduce",
    "measure_links",
    "torch_threads",
    "with_collective",
]

#: Seconds that one matrix product by one dtype may take, all repetitions together.
MATMUL_SECONDS = 0.6
LARGEST_PRODUCT = 16384
#: A copy of this many bytes; larger than any last-level cache a process is likely to have for itself.
COPY_BYTES = 256 * 2**20


def calibrate_all(
    ranks: int | None = None, tell: Tell = lambda message: None
) -> Iterator[tuple[torch.device, Peaks]]:
    """Everything this machine has: the CPU at one thread and at all of its cores, and each kind of device.

    ``ranks`` of the all-reduce: by default as many as there are devices of one kind, at least two and at most
    eight; two on a CPU. ``tell`` gets a line before each part. A part that fails is told and left out; what is
    measured is given at once, so that it can be kept whatever becomes of the rest.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell("measuring all-reduce between local ranks")
    collective: Mapping[str, float | int | str] = {}
    links: Rows = []
    between = _try(lambda: measure_links(ranks or max(2, min(devices, 8)), tell=tell), tell)
    if between is not None:
        collective, links = between
    on_device = collective.get("backend") == "nccl"
    yield from _processors({} if on_device else collective, [] if on_device else links, tell)
    yield from _accelerators(devices, collective if on_device else {}, links if on_device else [], tell)


def _processors(
    collective: Mapping[str, float | int | str], links: Rows, tell: Tell
) -> Iterator[tuple[torch.device, Peaks]]:
    device = torch.device("cpu")
    single: Mapping[str, float] = {}
    for threads in sorted({1, usable_cores()}):
        tell(f"measuring matrix products and copies on the CPU, {threads} thread{'s' if threads > 1 else ''}")
        measured = _try(partial(calibrate_cpu, threads, collective), tell)
        if measured is None:
            continue
        with torch_threads(threads):
            operations = _try(partial(measure_operations, device), tell, "single operations: ") or []
        single = single or measured.flops_per_s
        yield device, replace(_at_least(measured, single), operations=[*operations, *links])


def _accelerators(
    devices: int, collective: Mapping[str, float | int | str], links: Rows, tell: Tell
) -> Iterator[tuple[torch.device, Peaks]]:
    """One device of each kind."""
    names: set[str] = set()
    for index in range(devices):
        name = torch.cuda.get_device_name(index)
        if name in names:
            continue
        names.add(name)
        tell(f"measuring matrix products and copies on {name}")
        measured = _try(partial(calibrate_device, index, collective), tell)
        if measured is None:
            continue
        device = torch.device("cuda", index)
        dtypes = tuple(dtype for dtype in ("fp32", "bf16", "fp16", "tf32") if dtype in measured.flops_per_s)
        operations = _try(partial(measure_operations, device, dtypes), tell, "single operations: ") or []
        yield device, replace(measured, operations=[*operations, *links])


def calibrate_cpu(threads: int, collective: Mapping[str, float | int | str] | None = None) -> Peaks:
    """What the CPU reaches with this many threads of PyTorch's."""
    with torch_threads(threads):
        flops = {
            name: _matmul_flops_per_s(dtype, torch.device("cpu"))
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
        }
        copied = _copy_bytes_per_s(torch.device("cpu"))
    return Peaks(
        name=processor_name(),
        flops_per_s=flops,
        memory_bytes=_host_memory_bytes(),
        memory_bytes_per_s=copied,
        link_bytes_per_s=None,
        source=_source(),
        measured=True,
        threads=threads,
        collective=dict(collective or {}),
    )


def calibrate_device(index: int, collective: Mapping[str, float | int | str] | None = None) -> Peaks:
    """What one CUDA or ROCm device reaches."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(index)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes["bf16"] = torch.bfloat16
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        flops = {name: _matmul_flops_per_s(dtype, device) for name, dtype in dtypes.items()}
        if properties.major >= 8 and torch.version.hip is None:
            torch.set_float32_matmul_precision("high")
            flops["tf32"] = _matmul_flops_per_s(torch.float32, device)
    finally:
        torch.set_float32_matmul_precision(before)
    peaks = Peaks(
        name=properties.name,
        flops_per_s=flops,
        memory_bytes=properties.total_memory,
        memory_bytes_per_s=_copy_bytes_per_s(device),
        link_bytes_per_s=None,
        source=_source(),
        measured=True,
        threads=None,
    )
    return with_collective(peaks, collective or {})


def with_collective(peaks: Peaks, collective: Mapping[str, float | int | str]) -> Peaks:
    """A calibration with this all-reduce in it; all else as it was measured. Of a device only between devices."""
    if peaks.threads is not None or not collective:
        return replace(peaks, collective=dict(collective))
    if collective["backend"] != "nccl":  # between processors, and no link of the device
        return peaks
    ranks = int(collective["ranks"])
    # Bus bandwidth of the all-reduce (nccl-tests): what each link carries one way.
    link = float(collective["bytes_per_s"]) * 2 * (ranks - 1) / ranks
    return replace(peaks, collective=dict(collective), link_bytes_per_s=link)


def _at_least(peaks: Peaks, single: Mapping[str, float]) -> Peaks:
    """All cores reach no less than one does; where they seemed to, other programs had the rest."""
    flops = {name: max(value, single.get(name, 0.0)) for name, value in peaks.flops_per_s.items()}
    return replace(peaks, flops_per_s=flops)


# --- parts -------------------------------------------------------------------------------------


def _matmul_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Best rate over square products that double until one takes a twelfth of the time, then repeated."""
    best, size = 0.0, 256
    deadline = time.perf_counter() + MATMUL_SECONDS
    while True:
        factors = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        product = partial(torch.matmul, *factors)
        product()  # warms up
        took = math.inf
        while True:
            took = min(took, timed(product, device))
            large = took > MATMUL_SECONDS / 12 or size >= LARGEST_PRODUCT
            if not large or time.perf_counter() > deadline:
                break
        best = max(best, 2 * size**3 / took)
        if large or time.perf_counter() > deadline:
            return best
        size *= 2


def _copy_bytes_per_s(device: torch.device) -> float:
    size = COPY_BYTES if device.type == "cpu" else 4 * COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    took = min(timed(lambda: target.copy_(source), device) for _ in range(6))
    return 2 * size / took


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside PyTorch has so many threads on the CPU; ``None`` leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _try(measure: Callable[[], Any], tell: Tell, part: str = "") -> Any:
    try:
        return measure()
    except (TrineError, RuntimeError, OSError) as error:
        tell(f"left out: {part}{' '.join(str(error).split())}")
        return None


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _source() -> str:
    when = time.strftime("%Y-%m-%d", time.gmtime())
    return f"measured on {platform.node() or 'this machine'} on {when} with torch {torch.__version__} (trine hardware --calibrate)"
