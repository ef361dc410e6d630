"""How gradients become their mean over the replicas, when it is not simply the backend's all-reduce.

Reduction    one way of doing it (compressed, ring, two-level), for a flat bucket of gradients
Bucket       what it works on
SumOver      an all-reduce: sums a flat tensor in place over a group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Bucket", "Piece", "Reduction", "SumOver"]

#: Sums a flat tensor in place over all replicas, blocking the calling thread (on CUDA: its stream). Ring, tree and
#: two-level all-reduce have this form, and so has the backend's own.
SumOver = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's gradient within a bucket. Error feedback is keyed by ``name``: buckets are rebuilt."""

    name: str
    start: int  # in elements
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat tensor of gradients, to be replaced by their mean over the replicas."""

    flat: torch.Tensor  # (elements,), contiguous
    pieces: tuple[Piece, ...]


class Reduction(Protocol):
    """One way to average buckets. Called on the communication thread alone, in the same order on every rank."""

    name: str

    def mean(self, bucket: Bucket) -> None:
        """Replace ``bucket.flat`` by its mean over the replicas, the same bits on each."""

    def sent_bytes(self) -> int:
        """Bytes that this rank has given away since the start, as the field counts them (payload, not wire)."""

    def state_dict(self) -> dict[str, Any]:
        """Error feedback and what else a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
