"""All-reduces that count what they send, and the mean by one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import distributed

from trine.optim.runtime.exchange import Bucket, SumOver
from trine.optim.runtime.exchange.traffic import all_reduce_bytes

__all__ = ["AllReduce", "CountedSum", "backend_sum", "counted"]


class CountedSum(Protocol):
    """A ``SumOver`` that says how many bytes this rank has sent in it since the start."""

    @property
    def sent_bytes(self) -> float:
        """Bytes."""

    def __call__(self, flat: torch.Tensor) -> None:
        """Sum in place."""


class _Counted:
    """Any all-reduce, counted as nccl-tests would."""

    def __init__(self, sum_over: SumOver, ranks: int) -> None:
        self.sent_bytes = 0.0
        self._sum_over = sum_over
        self._ranks = ranks

    def __call__(self, flat: torch.Tensor) -> None:
        self._sum_over(flat)
        self.sent_bytes += all_reduce_bytes(flat.numel() * flat.element_size(), self._ranks)


def counted(sum_over: SumOver, ranks: int) -> CountedSum:
    """As it is, where it counts by itself; else counted as 2(n−1)/n of what is summed."""
    if hasattr(sum_over, "sent_bytes"):
        return cast(CountedSum, sum_over)
    return _Counted(sum_over, ranks)


def backend_sum(group: distributed.ProcessGroup | None) -> SumOver:
    """The backend's own all-reduce over ``group``, in the form that ring, tree and two-level have."""

    def sum_over(flat: torch.Tensor) -> None:
        distributed.all_reduce(flat, group=group)

    return sum_over


class AllReduce:
    """A ``Reduction``: the mean by any ``SumOver``, nothing compressed. Ring, tree and two-level are wrapped in it."""

    def __init__(self, sum_over: SumOver, ranks: int, name: str = "all-reduce") -> None:
        self.name = name
        self.sum_over = counted(sum_over, ranks)
        self._ranks = ranks
        self._sent_bytes = 0.0

    def mean(self, bucket: Bucket) -> None:
        """Divide, then sum, as DDP does: low precision does not overflow where the mean would not."""
        before = self.sum_over.sent_bytes
        bucket.flat.div_(self._ranks)
        self.sum_over(bucket.flat)
        self._sent_bytes += self.sum_over.sent_bytes - before

    def sent_bytes(self) -> int:
        """Since the start, by this reduction: others may share the sum."""
        return round(self._sent_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each step stands for itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
