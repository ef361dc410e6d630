"""Checks of what lies on a device, without waiting for it: the answer is read a step later, when it has long come."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from trine.record.errors import UsageError

__all__ = ["LateChecks"]


class LateChecks:
    """Raises for flags that turn out to be true: on the CPU at once, else when asked again."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, Any, str]] = deque()  # flag on the host, event, what to say

    def expect(self, flag: torch.Tensor, otherwise: str) -> None:
        """``flag``, of no dimension, must be false; else a ``UsageError`` says ``otherwise``."""
        if flag.device.type == "cpu":
            if bool(flag):
                raise UsageError(otherwise)
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        event = torch.Event(flag.device)
        event.record()
        self._waiting.append((host, event, otherwise))

    def look(self) -> None:
        """Raise ``UsageError`` for a flag of a step before that was true; those that have not come wait on."""
        while self._waiting and self._waiting[0][1].query():
            flag, _, otherwise = self._waiting.popleft()
            if bool(flag):
                raise UsageError(f"in a step before: {otherwise}")
