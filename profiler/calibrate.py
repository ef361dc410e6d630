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
import multiprocessing
import os
import platform
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from trine.record.errors import TrineError
from trine.record.hardware import Peaks, fit_latency_bandwidth, processor_name

from .calibrate_links import measure_collectives
from .calibrate_operations import measure_operations

__all__ = [
    "calibrate_all",
    "calibrate_cpu",
    "calibrate_device",
    "fit_latency_bandwidth",
    "measure_all_reduce",
    "measure_links",
]

#: Seconds that one matrix product by one dtype may take, all repetitions together.
MATMUL_SECONDS = 0.6
LARGEST_PRODUCT = 16384
#: A copy of this many bytes; larger than any last-level cache a process is likely to have for itself.
COPY_BYTES = 256 * 2**20
ALL_REDUCE_BYTES = tuple(2**exponent for exponent in (3, 10, 14, 17, 20, 22, 24))
ALL_REDUCE_SECONDS = 90.0


def calibrate_all(
    ranks: int | None = None, tell: Callable[[str], None] = lambda message: None
) -> list[Peaks]:
    """Everything this machine has: the CPU at one thread and at all of its cores, and each kind of device.

    ``ranks`` of the all-reduce: by default as many as there are devices of one kind, at least two and at most
    eight; two on a CPU. ``tell`` gets a line before each part. A part that fails is told and left out.
    """
    found: list[Peaks] = []
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell("all-reduce between local ranks")
    between = _try(lambda: measure_links(ranks or max(2, min(devices, 8))), tell)
    collective: dict[str, float | int | str] = between[0] if between else {}
    links: list[dict[str, Any]] = between[1] if between else []
    on_device = collective.get("backend") == "nccl"
    for threads in sorted({1, usable_cores()}):
        tell(f"matrix products and copies on the CPU, {threads} thread{'s' if threads > 1 else ''}")
        measured = calibrate_cpu(threads, {} if on_device else collective)
        with _threads(threads):
            operations = measure_operations(torch.device("cpu"))
        measured = replace(measured, operations=[*operations, *([] if on_device else links)])
        found.append(_at_least(measured, found[0].flops_per_s) if found else measured)
    names: set[str] = set()
    for index in range(devices):
        name = torch.cuda.get_device_name(index)
        if name not in names:
            names.add(name)
            tell(f"matrix products and copies on {name}")
            used = collective if on_device else {}
            device_peaks = _try(partial(calibrate_device, index, used), tell)
            if device_peaks is not None:
                dtypes = tuple(dtype for dtype in ("fp32", "bf16") if dtype in device_peaks.flops_per_s)
                operations = (
                    _try(partial(measure_operations, torch.device("cuda", index), dtypes), tell) or []
                )
                links_of_it = links if on_device else []
                found.append(replace(device_peaks, operations=[*operations, *links_of_it]))
    return found


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def calibrate_cpu(threads: int, collective: Mapping[str, float | int | str] | None = None) -> Peaks:
    """What the CPU reaches with this many threads of PyTorch's."""
    with _threads(threads):
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
    link = collective.get("bytes_per_s") if collective else None
    ranks = int(collective["ranks"]) if collective else 1
    return Peaks(
        name=properties.name,
        flops_per_s=flops,
        memory_bytes=properties.total_memory,
        memory_bytes_per_s=_copy_bytes_per_s(device),
        # Bus bandwidth of the all-reduce (nccl-tests): what each link carries one way.
        link_bytes_per_s=float(link) * 2 * (ranks - 1) / ranks if link else None,
        source=_source(),
        measured=True,
        threads=None,
        collective=dict(collective or {}),
    )


def measure_all_reduce(ranks: int = 2, seconds: float = ALL_REDUCE_SECONDS) -> dict[str, float | int | str]:
    """α (``alpha_s``) and β (``bytes_per_s``) of an all-reduce between ``ranks`` processes of this machine.

    NCCL with a device a rank where there are enough, else gloo with one thread a rank. Raises ``TrineError`` when the
    ranks fail or take longer than ``seconds``; no process outlives the call.
    """
    return measure_links(ranks, seconds)[0]


def measure_links(
    ranks: int = 2, seconds: float = ALL_REDUCE_SECONDS
) -> tuple[dict[str, float | int | str], list[dict[str, Any]]]:
    """:func:`measure_all_reduce`, and single times of other collectives (:mod:`trine.profiler.calibrate_links`)."""
    backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "gloo"
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = _free_port()
    workers = [
        context.Process(target=_all_reduce_rank, args=(rank, ranks, backend, port, results), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for worker in workers:
            worker.start()
        times, others = _first_result(results, workers, seconds)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.join(2)
                if worker.is_alive():
                    worker.kill()
                    worker.join(5)
    alpha, beta = fit_latency_bandwidth(ALL_REDUCE_BYTES, times)
    collective: dict[str, float | int | str] = {
        "operation": "all_reduce",
        "backend": backend,
        "ranks": ranks,
        "alpha_s": alpha,
        "bytes_per_s": beta,
    }
    return collective, [{"backend": backend, "ranks": ranks, **row} for row in others]


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
            took = min(took, _timed(product, device))
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
    took = min(_timed(lambda: target.copy_(source), device) for _ in range(6))
    return 2 * size / took


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds; a device is waited for, which is fine where nobody trains."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        begin.record()
        work()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _all_reduce_rank(rank: int, ranks: int, backend: str, port: int, results: Any) -> None:
    """One of the spawned ranks: rank 0 reports the median seconds by size, or what went wrong."""
    from torch import distributed

    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=ALL_REDUCE_SECONDS)
        )
        distributed.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=ALL_REDUCE_SECONDS),
            device_id=device if backend == "nccl" else None,
        )
        times = [_all_reduce_seconds(size, device) for size in ALL_REDUCE_BYTES]
        others = measure_collectives(device)
        if rank == 0:
            results.put(((times, others), None))
        distributed.barrier()
        distributed.destroy_process_group()
    except (RuntimeError, OSError, ValueError) as error:  # of anything else the exit code tells
        results.put((None, f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"))
        raise SystemExit(1) from None


def _all_reduce_seconds(size: int, device: torch.device) -> float:
    from torch import distributed

    buffer = torch.zeros(max(1, size // 4), device=device)
    repeats = 20 if size <= 2**17 else 7
    times = []
    for _ in range(repeats + 2):
        distributed.barrier()
        times.append(_timed(lambda: distributed.all_reduce(buffer), device))
    return sorted(times[2:])[len(times[2:]) // 2]


def _first_result(
    results: Any, workers: Sequence[Any], seconds: float
) -> tuple[list[float], list[dict[str, Any]]]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            times, failure = results.get(timeout=0.5)
        except queue.Empty:
            dead = [worker for worker in workers if worker.exitcode not in (None, 0)]
            if dead and results.empty():
                raise TrineError(
                    f"the all-reduce was not measured: a rank ended with code {dead[0].exitcode}"
                ) from None
            continue
        if failure:
            raise TrineError(f"the all-reduce was not measured: {failure}")
        return times[0], times[1]
    raise TrineError(
        f"the all-reduce was not measured: {len(workers)} ranks took longer than {seconds:.0f} s"
    )


def _try(measure: Callable[[], Any], tell: Callable[[str], None]) -> Any:
    try:
        return measure()
    except (TrineError, RuntimeError, OSError) as error:
        tell(f"left out: {' '.join(str(error).split())}")
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _source() -> str:
    when = time.strftime("%Y-%m-%d", time.gmtime())
    return f"measured on {platform.node() or 'this machine'} on {when} with torch {torch.__version__} (trine hardware --calibrate)"
