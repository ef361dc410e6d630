"""TernGrad (Wen et al. 2017): each element becomes −s, 0 or s, with a scaler s that a layer's replicas share.

Sharing the scaler (the largest of the replicas') makes sums of codes whole numbers between −n and n, so that the mean
itself needs log₂(2n+1) bits, as that paper says, and is exact: no error is added after the ternary rounding.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trine.optim.runtime.exchange import Bucket
from trine.optim.runtime.exchange.codecs import CLIP, pack, ternary, unpack
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.traffic import all_reduce_bytes, one_phase_bytes
from trine.optim.runtime.exchange.two_phase import Phases

__all__ = ["MOST_RANKS", "TernGrad", "scalers_of"]

#: Sums of more ternary codes do not fit a byte.
MOST_RANKS = 127


class TernGrad(Lossy):
    """Clipped at 2.5 standard deviations, rounded stochastically, summed exactly; unbiased but for the clipping."""

    name = "terngrad"

    def __init__(self, generator: torch.Generator, phases: Phases) -> None:
        super().__init__(generator=generator)
        self._phases = phases
        self._ranks = phases.ranks
        self._counts: dict[tuple[int, ...], torch.Tensor] = {}  # sizes of pieces → themselves, on the device
        self._sum_bits = 4 if 2 * self._ranks + 1 <= 16 else 8

    def mean(self, bucket: Bucket) -> None:
        """Three collectives: the scalers' maximum, codes to the rank that sums them, sums to all."""
        size, ranks = bucket.flat.numel(), self._ranks
        clipped, scalers = scalers_of(bucket)
        self._phases.largest(scalers)
        counts = self._counts_of(bucket)
        each = torch.repeat_interleave(scalers, counts, output_size=size)
        length = -(-size // (8 * ranks)) * 8
        codes = ternary(clipped, each.clamp_min(torch.finfo(torch.float32).tiny), self.generator)
        codes = functional.pad(codes, (0, ranks * length - size), value=1).view(ranks, length)
        payload = pack(codes, 2)
        sums = unpack(self._phases.exchanged(payload), 2).sum(0, dtype=torch.uint8)  # Σ(code) = Σ(value) + n
        answer = pack(sums.unsqueeze(0), self._sum_bits)
        everyone = unpack(self._phases.gathered(answer), self._sum_bits).view(-1)[:size]
        bucket.flat.copy_((everyone.to(each.dtype) - ranks) * (each / ranks))
        sent = one_phase_bytes(payload.numel() + answer.numel() * ranks, ranks)
        sent += all_reduce_bytes(scalers.numel() * 4, ranks)
        self.traffic.add(sent, all_reduce_bytes(size * bucket.flat.element_size(), ranks))

    def _counts_of(self, bucket: Bucket) -> torch.Tensor:
        sizes = tuple(int(torch.Size(piece.shape).numel()) for piece in bucket.pieces)
        if sizes not in self._counts:
            self._counts[sizes] = torch.tensor(sizes, device=bucket.flat.device)
        return self._counts[sizes]


def scalers_of(bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """The bucket clipped at 2.5 standard deviations of each piece, and each piece's largest magnitude in fp32.

    Where a piece is not finite its scaler is infinite, which a maximum over ranks keeps (it may drop NaN): decoded it
    makes every element of the piece NaN or infinite, on every rank.
    """
    dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
    clipped = bucket.flat.to(dtype, copy=True)
    largest = []
    for piece in bucket.pieces:
        part = clipped[piece.start : piece.start + torch.Size(piece.shape).numel()]
        if part.numel() > 1:
            limit = CLIP * part.std(correction=0)
            torch.clamp(part, -limit, limit, out=part)
        largest.append(part.abs().amax())
    scalers = torch.stack(largest).to(torch.float32)
    return clipped, torch.where(torch.isfinite(scalers), scalers, float("inf"))
