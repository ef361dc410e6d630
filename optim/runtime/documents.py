"""Where documents begin and end in packed rows: what a model gets as ``documents=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Documents"]


class Documents(NamedTuple):
    """The borders of the documents in ``rows`` of ``length`` tokens; padding at a row's end counts as a document.

    ``numbers``: which document of its row a token belongs to, (rows, length), int32. ``cu_seqlens``: where each begins
    when rows lie end to end, and the end of all, (documents + 1,), int32, as FlashAttention's variable-length kernels
    take it. ``longest``: at least the longest one's tokens; a power of two or the row's length, so that compiled code
    meets few values.
    """

    numbers: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], length: int) -> Documents:
        """From the documents' lengths, row by row. Raises ``ValueError`` where a row overflows or one is empty."""
        numbers = torch.empty(len(lengths), length, dtype=torch.int32)
        borders = [0]
        for row, within in enumerate(lengths):
            left = length - sum(within)
            if left < 0 or any(each < 1 for each in within):
                raise ValueError(f"documents of {list(within)} tokens do not fit a row of {length}")
            spans = torch.tensor([*within, left])
            numbers[row] = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), spans)
            for each in (*within, *([left] if left else ())):
                borders.append(borders[-1] + each)
        longest = max((each for within in lengths for each in within), default=1)
        return cls(
            numbers, torch.tensor(borders, dtype=torch.int32), min(length, 1 << (longest - 1).bit_length())
        )

    def mask(self) -> torch.Tensor:
        """True where a token sees another: the same document, not behind it. (rows, 1, length, length)."""
        length = self.numbers.shape[1]
        same = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        order = torch.arange(length, device=self.numbers.device)
        return same & (order[:, None] >= order)
