"""Single collectives between ranks, and what computing loses while one is in flight.

    {"operation": "all_gather", "dtype": "fp32", "bytes": 1048576, "seconds": 9e-4, "quartiles": [8.8e-4, 9e-4, 9.5e-4]}
    {"operation": "overlap", "bytes": 16777216, "slowdown": 0.6, "covered": 1.0}

``bytes`` are as nccl-tests counts them, ``seconds`` the median. ``slowdown`` is seconds of computing lost a second of all-reduce beside it, ``covered`` how long the computing took alone,
as a share of the all-reduce alone: near 1, or the slow-down is of less than it says.

Ranks that compute on the cores that also move the bytes lose time to a transfer that hides behind them: on a machine whose
cores are all taken, nearly all of it. Every rank calls these functions alike, in the calibration's own group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

from trine.record.hardware import quartiles_of

__all__ = ["COLLECTIVES", "measure_collective", "measure_overlap"]

SIZES_BYTES = (2**10, 2**16, 2**20, 2**23)
REPEATS = 7
#: To find how many products last as long as the all-reduce.
_PASSES = 4
#: What reduces adds elements up, so it has a time by dtype; what only moves bytes has one.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REDUCING = ("all_reduce", "reduce_scatter")
#: An all-reduce that is long enough to compute beside, and the products beside it.
OVERLAPPED_BYTES = 2**24
SIDE = 256
#: On a device a product is to take far longer than its launch.
DEVICE_SIDE = 1024

Rows = list[dict[str, Any]]


def measure_collective(operation: str, device: torch.device) -> Rows:
    """Medians of one of :data:`COLLECTIVES` by size, and by dtype too where it reduces. About a second."""
    found: Rows = []
    for name in _DTYPES if operation in _REDUCING else ("fp32",):
        for size in SIZES_BYTES if name == "fp32" else SIZES_BYTES[1::2]:  # two tell α and β
            run = COLLECTIVES[operation](size, device, _DTYPES[name])
            run()
            quartiles = quartiles_of([_timed(run, device) for _ in range(REPEATS)])
            row = {"dtype": name, "bytes": size, "seconds": quartiles[1], "quartiles": quartiles}
            found.append({"operation": operation, **row})
    return found


def measure_overlap(device: torch.device) -> Rows:
    """What computing loses to an all-reduce beside it."""
    return [{"operation": "overlap", "bytes": OVERLAPPED_BYTES, **_overlap(device)}]


def _elements(size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(max(1, size // dtype.itemsize), device=device, dtype=dtype)


def _all_reduce(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    buffer = _elements(size, device, dtype)
    return lambda: distributed.all_reduce(buffer)


def _broadcast(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    buffer = _elements(size, device, dtype)
    return lambda: distributed.broadcast(buffer, 0)


def _all_gather(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    part = _elements(size // distributed.get_world_size(), device, dtype)
    whole = part.repeat(distributed.get_world_size())
    gather = _named("all_gather_single", "all_gather_into_tensor")
    return lambda: gather(whole, part)


def _reduce_scatter(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    part = _elements(size // distributed.get_world_size(), device, dtype)
    whole = part.repeat(distributed.get_world_size())
    scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: scatter(part, whole)


#: Those that every backend has come first: whatever a backend refuses takes along what comes after it.
COLLECTIVES: Mapping[str, Callable[[int, torch.device, torch.dtype], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _named(name: str, before: str) -> Callable[..., Any]:
    """The collective by its present name, or the one that releases before 2.13 know."""
    found: Callable[..., Any] = getattr(distributed, name, None) or getattr(distributed, before)
    return found


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    distributed.barrier()
    began = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def _overlap(device: torch.device) -> dict[str, float]:
    """Of one rank: products alone and beside an all-reduce, by what a second of the all-reduce costs them; 0 to 1.

    The products take as long as the all-reduce alone, so that they overlap nearly all of it.
    """
    side = SIDE if device.type == "cpu" else DEVICE_SIDE
    buffer, factor = _elements(OVERLAPPED_BYTES, device), torch.randn(side, side, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    def seconds(run: Callable[[], Any]) -> float:
        return median(_timed(run, device) for _ in range(REPEATS))

    transfer = seconds(lambda: distributed.all_reduce(buffer))
    # One alone is timed with a launch and a wait for the device, which many share. Ranks must make as many passes as each other.
    count, alone = 1, seconds(partial(products, 1))
    for _ in range(_PASSES):
        count = max(1, round(count * transfer / alone))
        alone = seconds(partial(products, count))

    def both() -> None:
        work = distributed.all_reduce(buffer, async_op=True)
        products(count)
        work.wait()

    together = seconds(both)
    slowdown = (together - max(alone, transfer)) / min(alone, transfer)
    return {"slowdown": min(max(slowdown, 0.0), 1.0), "covered": alone / transfer}
