"""bf16 and fp16: half the bytes, over any all-reduce (the backend's, a ring, a tree, two levels)."""

from __future__ import annotations

import torch

from trine.optim.runtime.exchange import Bucket, SumOver
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.sums import counted

__all__ = ["HalfPrecision"]


class HalfPrecision(Lossy):
    """Divided by the number of ranks before the cast, so that no sum overflows where its terms did not.

    The sum itself is in half precision wherever the backend adds in it: its error grows with the number of ranks (each
    of n−1 additions rounds to 8 bits in bf16, to 11 in fp16). A gradient beyond fp16's 65504 · n becomes infinite, on
    all ranks, and never something smaller.
    """

    def __init__(self, dtype: torch.dtype, sum_over: SumOver, ranks: int) -> None:
        super().__init__()
        self.name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        self._dtype = dtype
        self._sum_over = counted(sum_over, ranks)
        self._ranks = ranks

    def mean(self, bucket: Bucket) -> None:
        """Cast, sum, cast back."""
        flat = bucket.flat
        small = (flat / self._ranks).to(self._dtype)
        before = self._sum_over.sent_bytes
        self._sum_over(small)
        sent = self._sum_over.sent_bytes - before
        flat.copy_(small)
        self.traffic.add(sent, sent * flat.element_size() / small.element_size())
