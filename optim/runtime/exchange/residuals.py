"""Error feedback: what a lossy code left out is kept and sent with the next step's gradient.

Nothing is lost for good then, only late, which is what keeps biased codes (rounding, signs, low rank) converging
(Seide et al. 2014; Karimireddy et al. 2019). A residual belongs to a parameter, by name: DDP makes its buckets anew after
the first step. Where a step is skipped, or a bucket holds a number that is not finite, residuals stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trine.optim.runtime.exchange import Bucket, Piece

__all__ = ["Residuals"]


class Residuals:
    """This rank's residuals, and those of the part of each bucket that it averages for the others.

    ``staged``: changes count only once :meth:`settle` says that the step was taken (loss scaling skips steps), at the
    cost of a second copy.
    """

    def __init__(self, ranks: int, rank: int, *, staged: bool = False) -> None:
        self.staged = staged
        self._ranks = ranks
        self._rank = rank
        self._own: dict[str, torch.Tensor] = {}  # name → (elements,)
        #: Names of a bucket's pieces → the pieces, and the residual of this rank's part of their mean.
        self._averaged: dict[tuple[str, ...], tuple[tuple[Piece, ...], torch.Tensor]] = {}
        self._pending: list[Callable[[], None]] = []

    @property
    def bytes(self) -> int:
        """Held on this rank."""
        held = [*self._own.values(), *(part for _, part in self._averaged.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def own(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """This rank's residual of a bucket, flat and of ``dtype``; a copy. Zeros at first."""
        self._follow(bucket)
        return torch.cat([self._piece(piece, bucket.flat.device, dtype) for piece in bucket.pieces])

    def keep_own(self, bucket: Bucket, residual: torch.Tensor) -> None:
        """Take a flat residual over; views of it are kept."""

        def commit() -> None:
            for piece in bucket.pieces:
                self._own[piece.name] = residual[piece.start : piece.start + _elements(piece)]

        self._commit(commit)

    def averaged(self, bucket: Bucket, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The residual of the mean of this rank's part of the bucket, (length,). Zeros at first."""
        found = self._averaged.get(_names(bucket.pieces))
        if found is None:
            return torch.zeros(length, dtype=dtype, device=bucket.flat.device)
        return found[1]

    def keep_averaged(self, bucket: Bucket, residual: torch.Tensor) -> None:
        """Take it over."""

        def commit() -> None:
            self._averaged[_names(bucket.pieces)] = (bucket.pieces, residual)

        self._commit(commit)

    def settle(self, stepped: bool) -> None:
        """The step was taken, or skipped and its gradients dropped."""
        if stepped:
            for commit in self._pending:
                commit()
        self._pending.clear()

    def rescale(self, factor: float) -> None:
        """Gradients come in other units from now on: the loss scale has changed by ``factor``."""
        for residual in self._own.values():
            residual.mul_(factor)
        for _, part in self._averaged.values():
            part.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Name → residual. What is kept of means is in it, on the rank that averages, so that nothing depends on buckets."""
        folded = {name: residual.clone() for name, residual in self._own.items()}
        for pieces, part in self._averaged.values():
            self._fold(pieces, part, folded)
        return folded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back, on the same rank."""
        self._own = {name: residual.clone() for name, residual in state.items()}
        self._averaged.clear()
        self._pending.clear()

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take over those of other ranks, so that what all ranks leave out together stays the same.

        With e_o of R ranks that saved, rank r of R' takes R'/R · Σ e_o over o ≡ r (mod R'): the mean over ranks, which is
        what is added to the next mean gradient, is unchanged.
        """
        summed: dict[str, torch.Tensor] = {}
        for state in states[rank::ranks]:
            for name, residual in state.items():
                summed[name] = summed[name] + residual if name in summed else residual.clone()
        factor = ranks / len(states)
        self.load_state_dict({name: residual.mul_(factor) for name, residual in summed.items()})

    # --- parts -----------------------------------------------------------------------------------

    def _piece(self, piece: Piece, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        found = self._own.get(piece.name)
        if found is None:
            return torch.zeros(_elements(piece), dtype=dtype, device=device)
        return found.to(device=device, dtype=dtype)

    def _commit(self, commit: Callable[[], None]) -> None:
        if self.staged:
            self._pending.append(commit)
        else:
            commit()

    def _follow(self, bucket: Bucket) -> None:
        """Buckets were made anew: residuals of the old ones' means go to the rank that held them."""
        if not self._averaged or _names(bucket.pieces) in self._averaged:
            return
        present = {piece.name for piece in bucket.pieces}
        for names in [names for names in self._averaged if present.intersection(names)]:
            self._fold(*self._averaged.pop(names), self._own)

    def _fold(self, pieces: Sequence[Piece], part: torch.Tensor, residuals: dict[str, torch.Tensor]) -> None:
        """An error of the mean is that error times the ranks, of one of its terms."""
        start = self._rank * part.numel()
        for piece in pieces:
            first, last = max(piece.start, start), min(piece.start + _elements(piece), start + part.numel())
            if first < last:
                whole = residuals.get(piece.name)
                whole = part.new_zeros(_elements(piece)) if whole is None else whole.clone()
                whole[first - piece.start : last - piece.start] += (
                    part[first - start : last - start] * self._ranks
                )
                residuals[piece.name] = whole


def _names(pieces: Sequence[Piece]) -> tuple[str, ...]:
    return tuple(piece.name for piece in pieces)


def _elements(piece: Piece) -> int:
    return int(torch.Size(piece.shape).numel())
