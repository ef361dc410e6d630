"""Reading a loss without waiting for the device that computes it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .background import PendingLoss

__all__ = ["LossReader"]


#: Losses that may be on their way at a time; more are left out.
_MOST_PENDING = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LossReader:
    """Takes losses: at once from the host, by a copy to pinned memory from a device. Allocates nothing on a device."""

    def __init__(self) -> None:
        self._device_type = "cpu"
        self._free: dict[torch.dtype, deque[PendingLoss]] = {}

    def prepare(self, device_type: str) -> None:
        """Get pinned memory before the first step: getting it later could stop the device (cudaHostAlloc)."""
        self._device_type = device_type
        if device_type == "cpu":
            return
        for dtype in _DTYPES:
            free: deque[PendingLoss] = deque()
            for host in torch.empty(_MOST_PENDING, dtype=dtype, pin_memory=True).unbind():
                free.append(PendingLoss(torch.Event(device=device_type), host, free.append))
            self._free[dtype] = free

    def take(self, loss: Any) -> float | PendingLoss | None:
        """A number now, or one that is on its way; ``None`` for what cannot be had without waiting."""
        number = self.number(loss)
        if number is not None or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return number
        if type(loss).__name__ == "DTensor" or loss.device.type != self._device_type:
            return None  # reading it would be a collective, or a wait
        free = self._free.get(loss.dtype)
        if not free or (self._device_type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        pending = free.popleft()
        # Of the same dtype: a conversion would need room on the device.
        pending.host.copy_(loss.detach().reshape(()), non_blocking=True)
        pending.event.record()
        return pending

    def number(self, value: Any) -> float | None:
        """A number that lies on the host."""
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.numel() != 1 or type(value).__name__ == "DTensor":
                return None
            return float(value.detach().item())
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
