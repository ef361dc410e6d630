"""All-reduces between spawned ranks of this machine, and what else is measured in their group.

A part that fails takes nothing along that was measured before it: whatever becomes of the other collectives, of the rank
that measures them or of the time that they may take, the all-reduce is kept.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from trine.record.errors import TrineError
from trine.record.hardware import fit_latency_bandwidth

from .calibrate_links import COLLECTIVES, measure_collective, measure_overlap
from .calibrate_sharding import measure_sharding

__all__ = ["ALL_REDUCE_BYTES", "Rows", "Tell", "measure_all_reduce", "measure_links", "timed"]

ALL_REDUCE_BYTES = tuple(2**exponent for exponent in (3, 10, 14, 17, 20, 22, 24))
ALL_REDUCE_SECONDS = 90.0
#: For what ranks have sent already, once one of them has failed.
_UNDER_WAY_S = 1.0
#: What a backend raises for what it cannot do, or where another rank is lost, and a release without FSDP2. Anything else is
#: a defect of our own, whose trace is to be seen.
_FAILURES = (RuntimeError, OSError, ValueError, ImportError)

Tell = Callable[[str], None]
Rows = list[dict[str, Any]]
#: What else is measured in the group; every rank calls it alike.
Others = Callable[[torch.device], Rows]


def measure_all_reduce(ranks: int = 2, seconds: float = ALL_REDUCE_SECONDS) -> dict[str, float | int | str]:
    """α (``alpha_s``) and β (``bytes_per_s``) of an all-reduce between ``ranks`` processes of this machine.

    NCCL with a device a rank where there are enough, else gloo with one thread a rank. Raises ``TrineError`` when the
    ranks fail or take longer than ``seconds``; no process outlives the call.
    """
    return _between_ranks(ranks, seconds, ())[0]


def measure_links(
    ranks: int = 2, seconds: float = ALL_REDUCE_SECONDS, tell: Tell = lambda message: None
) -> tuple[dict[str, float | int | str], Rows]:
    """:func:`measure_all_reduce`, single times of other collectives (:mod:`trine.profiler.calibrate_links`), and what shards
    cost their hosts (:mod:`trine.profiler.calibrate_sharding`).

    Where one of these fails, ``tell`` gets the reason, and what was measured before it is given.
    """
    each = (partial(measure_collective, name) for name in COLLECTIVES)
    parts: tuple[Others, ...] = (measure_overlap, *each, measure_sharding)
    collective, rows, complaint = _between_ranks(ranks, seconds, parts)
    if complaint is not None:
        tell(f"left out: collectives or shards between ranks: {complaint}")
    return collective, rows


def _between_ranks(
    ranks: int, seconds: float, others: Sequence[Others]
) -> tuple[dict[str, float | int | str], Rows, str | None]:
    """The all-reduce, then what ``others`` measure in the same group, and why any of that was left out."""
    if not distributed.is_available():
        raise TrineError("the all-reduce was not measured: this PyTorch was built without torch.distributed")
    backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "gloo"
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    # It listens from here on: a port that is only found free can be lost before a rank has imported PyTorch.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    workers = [
        context.Process(
            target=_all_reduce_rank, args=(rank, ranks, backend, store.port, results, others), daemon=True
        )
        for rank in range(ranks)
    ]
    try:
        for worker in workers:
            worker.start()
        times, rows, complaint = _results(results, workers, seconds, len(others))
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
    return collective, [{"backend": backend, "ranks": ranks, **row} for row in rows], complaint


def _results(
    results: Any, workers: Sequence[Any], seconds: float, parts: int
) -> tuple[list[float], Rows, str | None]:
    """Seconds of the all-reduce by size, rows of so many other ``parts``, and why some of these were left out."""
    times: list[float] | None = None
    rows: Rows = []
    measured, reason = 0, ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (times is None or measured < parts):
        try:
            kind, value = results.get(timeout=0.1)
        except queue.Empty:
            dead = [worker for worker in workers if worker.exitcode not in (None, 0)]
            if dead and results.empty():
                reason = reason or f"a rank ended with code {dead[0].exitcode}"
                break
            continue
        if kind == "times":
            times = value
        elif kind == "rows":
            rows += value
            measured += 1
        else:
            reason = reason or value
            deadline = min(deadline, time.monotonic() + _UNDER_WAY_S)
    reason = reason or f"{len(workers)} ranks took longer than {seconds:.0f} s"
    if times is None:
        raise TrineError(f"the all-reduce was not measured: {reason}")
    return times, rows, reason if measured < parts else None


# --- in the ranks -------------------------------------------------------------------------------


def _all_reduce_rank(
    rank: int, ranks: int, backend: str, port: int, results: Any, others: Sequence[Others]
) -> None:
    """One of the spawned ranks: rank 0 reports the median seconds by size, each of them what went wrong."""
    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)  # FSDP2 shards on whichever is current
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=ALL_REDUCE_SECONDS)
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
        if rank == 0:
            results.put(("times", times))
        _measure_others(rank, device, results, others)
        distributed.barrier()
        distributed.destroy_process_group()
    except _FAILURES as error:
        results.put(("failed", _said(rank, error)))
        raise SystemExit(1) from None


def _measure_others(rank: int, device: torch.device, results: Any, others: Sequence[Others]) -> None:
    """Until one fails: a collective that a backend refuses, or a release without FSDP2, takes nothing along."""
    try:
        for measure in others:
            rows = measure(device)
            if rank == 0:
                results.put(("rows", rows))
    except _FAILURES as error:
        results.put(("left out", _said(rank, error)))


def _said(rank: int, error: Exception) -> str:
    return f"rank {rank}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _all_reduce_seconds(size: int, device: torch.device) -> float:
    buffer = torch.zeros(max(1, size // 4), device=device)
    repeats = 20 if size <= 2**17 else 7
    times = []
    for _ in range(repeats + 2):
        distributed.barrier()
        times.append(timed(lambda: distributed.all_reduce(buffer), device))
    return sorted(times[2:])[len(times[2:]) // 2]


def timed(work: Callable[[], Any], device: torch.device) -> float:
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
