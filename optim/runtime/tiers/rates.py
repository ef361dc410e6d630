"""How fast bytes travel here: measured in a hundredth of a second, for the plan that is shown."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trine.optim.runtime.tiers.files import checksum_of

__all__ = ["copy_bytes_per_s", "disk_bytes_per_s"]

_BYTES = 8 * 2**20
_TIMES = 3


def copy_bytes_per_s(device: torch.device) -> float:
    """Between the host's pinned memory and the device; on a CPU within memory. Waits for the device, at the start alone."""
    is_cuda = device.type == "cuda"
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.zeros(_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        there.copy_(host)
        if is_cuda:
            torch.cuda.synchronize(device)

    return _fastest(copy)


def disk_bytes_per_s(folder: Path) -> float | None:
    """Written, read and compared, through the system's cache of pages as a run does: bytes a second of either way.

    ``None`` where the disk has no room for the few bytes that it takes, or fails: the run itself will say so.
    """
    data = torch.ones(_BYTES, dtype=torch.uint8)
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="trine-rate-", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)

            def both() -> None:
                checksum_of(data)
                os.pwrite(file.fileno(), view, 0)
                os.preadv(file.fileno(), [view], 0)
                checksum_of(data)

            return 2 * _fastest(both)
    except OSError:
        return None


def _fastest(act: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        before = time.perf_counter_ns()
        act()
        times.append(time.perf_counter_ns() - before)
    return _BYTES / (min(times) / 1e9)
