"""Means over the replicas by lossy codes, in two phases that load a link as a reduce-scatter and an all-gather do.

Each rank sends to each other one part of its bucket, encoded; decodes and averages the part that is its own; encodes
that mean and sends it to all. What a rank sends does not grow with the number of ranks, as it would if everyone's code
went to everyone. All ranks decode the same bytes, so replicas stay the same bits. Where a code is biased, both encodings
feed their error back (the two error-corrected phases of DoubleSqueeze, Tang et al. 2019, and of 1-bit Adam, Tang et al. 2021).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import distributed

from trine.optim.runtime.exchange import Bucket
from trine.optim.runtime.exchange.codecs import Codec, pad_rows
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.traffic import all_reduce_bytes, one_phase_bytes

__all__ = ["Alone", "Phases", "Ranks", "TwoPhase"]

#: PyTorch 2.13 renames it and deprecates the old name.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Phases(Protocol):
    """What an exchange asks of a process group."""

    ranks: int
    rank: int

    def exchanged(self, payload: torch.Tensor) -> torch.Tensor:
        """(ranks, bytes): row r of mine goes to rank r; row r of the result came from rank r."""

    def gathered(self, payload: torch.Tensor) -> torch.Tensor:
        """(1, bytes) of every rank as (ranks, bytes)."""

    def largest(self, values: torch.Tensor) -> None:
        """Replace each value by the largest of any rank."""


class Ranks:
    """The ranks of a process group."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.ranks, self.rank = group.size(), group.rank()
        self._group = group

    def exchanged(self, payload: torch.Tensor) -> torch.Tensor:
        """By all-to-all."""
        received = torch.empty_like(payload)
        distributed.all_to_all_single(received, payload, group=self._group)
        return received

    def gathered(self, payload: torch.Tensor) -> torch.Tensor:
        """By all-gather."""
        everyone = payload.new_empty((self.ranks, payload.shape[1]))
        _gather(everyone, payload, group=self._group)
        return everyone

    def largest(self, values: torch.Tensor) -> None:
        """By all-reduce."""
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self._group)


class Alone:
    """``ranks`` ranks that all have what this one has, without communication: to time a code, and to test it."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank = ranks, 0

    def exchanged(self, payload: torch.Tensor) -> torch.Tensor:
        """Everyone sent row 0, as this rank did to itself."""
        return payload[:1].repeat(self.ranks, 1)

    def gathered(self, payload: torch.Tensor) -> torch.Tensor:
        """Everyone answered what this rank did."""
        return payload.repeat(self.ranks, 1)

    def largest(self, values: torch.Tensor) -> None:
        """All have the same."""


class TwoPhase(Lossy):
    """int8, QSGD and one bit. ``residuals``: for codes that are biased."""

    def __init__(
        self,
        codec: Codec,
        phases: Phases,
        residuals: Residuals | None = None,
    ) -> None:
        super().__init__(residuals, getattr(codec, "generator", None))
        self.name = codec.name
        self._codec = codec
        self._phases = phases
        self._ranks = phases.ranks

    def mean(self, bucket: Bucket) -> None:
        """Both phases. A number that is not finite, on any rank, comes out as such on all."""
        codec, residuals = self._codec, self.residuals
        size = bucket.flat.numel()
        rows = pad_rows(bucket.flat, self._ranks, codec)
        length = rows.shape[1]
        old = None if residuals is None else residuals.own(bucket, rows.dtype)
        if old is not None:
            rows.view(-1)[:size] += old
        payload = codec.encode(rows)
        averaged = codec.decode(self._phases.exchanged(payload), length, rows.dtype).sum(0) / self._ranks
        old_averaged = None if residuals is None else residuals.averaged(bucket, length, rows.dtype)
        if old_averaged is not None:
            averaged += old_averaged
        answer = codec.encode(averaged.unsqueeze(0))
        everyone = codec.decode(self._phases.gathered(answer), length, rows.dtype)
        result = everyone.view(-1)[:size]
        if residuals is not None and old is not None and old_averaged is not None:
            finite = torch.isfinite(result).all()  # the same on every rank, since the bits are
            left = rows - codec.decode(payload, length, rows.dtype)
            residuals.keep_own(bucket, torch.where(finite, left.view(-1)[:size], old))
            left_averaged = averaged - codec.decode(answer, length, rows.dtype)[0]
            residuals.keep_averaged(bucket, torch.where(finite, left_averaged, old_averaged))
        bucket.flat.copy_(result)
        sent = one_phase_bytes(payload.numel() + answer.numel() * self._ranks, self._ranks)
        self.traffic.add(sent, all_reduce_bytes(size * bucket.flat.element_size(), self._ranks))
