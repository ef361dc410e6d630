"""Single collectives between ranks, and what computing loses while one is in flight.

    {"operation": "all_gather", "dtype": "fp32", "bytes": 1048576, "seconds": 9e-4}     bytes as nccl-tests counts them
    {"operation": "overlap", "bytes": 16777216, "slowdown": 0.6}       seconds of computing lost a second of all-reduce

Ranks that compute on the cores that also move the bytes lose time to a transfer that hides behind them: on a machine whose
cores are all taken, nearly all of it. Every rank calls :func:`measure_collectives` alike, in the calibration's own group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import distributed

__all__ = ["measure_collectives"]

SIZES_BYTES = (2**10, 2**16, 2**20, 2**23)
REPEATS = 7
#: What reduces adds elements up, so it has a time by dtype; what only moves bytes has one.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REDUCING = ("all_reduce", "reduce_scatter")
#: An all-reduce that is long enough to compute beside, and the products beside it.
OVERLAPPED_BYTES = 2**24
SIDE = 256

Rows = list[dict[str, Any]]


def measure_collectives(device: torch.device) -> Rows:
    """Medians of collectives by size, of reductions by dtype too, and the overlap's slow-down. A few seconds."""
    found: Rows = []
    for operation, prepare in (
        ("all_reduce", _all_reduce),
        ("all_gather", _all_gather),
        ("reduce_scatter", _reduce_scatter),
        ("broadcast", _broadcast),
    ):
        for name in _DTYPES if operation in _REDUCING else ("fp32",):
            for size in SIZES_BYTES if name == "fp32" else SIZES_BYTES[1::2]:  # two tell α and β
                run = prepare(size, device, _DTYPES[name])
                run()
                seconds = median(_timed(run, device) for _ in range(REPEATS))
                found.append({"operation": operation, "dtype": name, "bytes": size, "seconds": seconds})
    found.append({"operation": "overlap", "bytes": OVERLAPPED_BYTES, "slowdown": _slowdown(device)})
    return found


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


def _slowdown(device: torch.device) -> float:
    """Of one rank: products alone and beside an all-reduce, by what a second of the all-reduce costs them; 0 to 1.

    Both take as long as the all-reduce alone, so that they overlap nearly all of it.
    """
    buffer, factor = _elements(OVERLAPPED_BYTES, device), torch.randn(SIDE, SIDE, device=device)
    transfer = median(_timed(lambda: distributed.all_reduce(buffer), device) for _ in range(REPEATS))
    one = median(_timed(lambda: torch.mm(factor, factor), device) for _ in range(REPEATS))
    count = max(1, round(transfer / one))

    def compute() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    def both() -> None:
        work = distributed.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    alone = median(_timed(compute, device) for _ in range(REPEATS))
    together = median(_timed(both, device) for _ in range(REPEATS))
    hidden = min(alone, transfer)
    return min(max((together - max(alone, transfer)) / hidden, 0.0), 1.0) if hidden > 0 else 0.0
