"""Reading a loss without waiting for the device that computes it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .background import PendingLoss

__all__ = ["LossReader"]


class LossReader:
    """Takes losses: at once from the host, by a pinned copy from a device. Allocates nothing on a device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._free: dict[torch.dtype, deque[PendingLoss]] = {}

    def take(self, loss: Any) -> float | PendingLoss | None:
        """A number now, or one that is on its way; ``None`` for what is no single number."""
        number = self.number(loss)
        if number is not None or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return number
        if type(loss).__name__ == "DTensor" or loss.device.type != self._device_type:
            return None  # reading it would be a collective, or a wait
        return self._copy(loss.detach())

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

    def _copy(self, loss: torch.Tensor) -> PendingLoss:
        free = self._free.setdefault(loss.dtype, deque())
        if free:
            pending = free.popleft()
        else:
            # The same dtype: a conversion would need room on the device.
            host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            pending = PendingLoss(torch.Event(device=self._device_type), host, free.append)
        pending.host.copy_(loss.reshape(()), non_blocking=True)
        pending.event.record()
        return pending
