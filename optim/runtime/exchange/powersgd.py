"""PowerSGD (Vogels et al. 2019): gradients as matrices of low rank, by one step of subspace iteration a training step.

A matrix M (rows × columns) is sent as P = MQ, orthogonalised once it is averaged, and Q = MᵀP: r(rows + columns) numbers
in place of rows · columns. Q of one step is where the next begins; what PQᵀ leaves out is fed back. Both averages are
linear in M, so an all-reduce does them, and any all-reduce will do.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trine.optim.runtime.exchange import Bucket, Piece, SumOver
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.sums import counted
from trine.optim.runtime.exchange.traffic import all_reduce_bytes

__all__ = ["PowerSGD", "matrix_shape"]

#: A matrix is compressed where that saves at least this factor.
LEAST_SAVING = 2.0


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """(rows, columns) of a parameter as a matrix, its first dimension against the others; ``None``: sent as it is.

    That is for vectors, and for matrices of which rank-``rank`` factors are not half as large.
    """
    if len(shape) < 2:
        return None
    rows = shape[0]
    columns = int(torch.Size(shape[1:]).numel())
    small = rank * (rows + columns) * LEAST_SAVING > rows * columns
    return None if small else (rows, columns)


class PowerSGD(Lossy):
    """Three all-reduces a bucket at most: what is not compressed together with all P, then all Q."""

    def __init__(self, rank: int, sum_over: SumOver, ranks: int, residuals: Residuals, seed: int = 0) -> None:
        """``seed`` must be the same on every rank: their first Q are drawn from it."""
        super().__init__(residuals)
        self.name = "powersgd"
        self._residuals = residuals
        self._rank = rank
        self._sum_over = counted(sum_over, ranks)
        self._ranks = ranks
        self._seed = seed
        self._q: dict[str, torch.Tensor] = {}  # name → (columns, rank)
        self._pending: dict[str, torch.Tensor] = {}

    def mean(self, bucket: Bucket) -> None:
        """Two rounds: P with what is sent whole, then Q. Not finite on one rank, not finite on all, and nothing kept."""
        dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
        old = self._residuals.own(bucket, dtype)
        flat = bucket.flat.to(dtype) + old
        result, left = torch.empty_like(flat), torch.zeros_like(flat)
        low_rank, whole = self._divided(bucket, flat)
        starts = [self._start(piece, matrix) for piece, matrix in low_rank]
        products = [matrix @ start for (_, matrix), start in zip(low_rank, starts, strict=True)]
        averaged = self._averaged([*(values for _, values in whole), *products])
        for (piece, _), mean in zip(whole, averaged, strict=False):
            _part(result, piece).copy_(mean)
        bases = [torch.linalg.qr(product)[0] for product in averaged[len(whole) :]]
        own = [matrix.t() @ base for (_, matrix), base in zip(low_rank, bases, strict=True)]
        factors = self._averaged(own)
        for (piece, matrix), base, mine, mean in zip(low_rank, bases, own, factors, strict=True):
            _part(result, piece).copy_((base @ mean.t()).view(-1))
            _part(left, piece).copy_((matrix - base @ mine.t()).view(-1))
        finite = torch.isfinite(result).all()  # the same on every rank, since the bits are
        self._residuals.keep_own(bucket, torch.where(finite, left, old))
        for (piece, _), start, factor in zip(low_rank, starts, factors, strict=True):
            self._pending[piece.name] = torch.where(finite, factor, start)
        if not self._residuals.staged:
            self._keep_factors(True)
        bucket.flat.copy_(result)
        self.traffic.plain += all_reduce_bytes(bucket.flat.numel() * bucket.flat.element_size(), self._ranks)

    def settle(self, stepped: bool) -> None:
        """The step was taken, or skipped and its gradients dropped."""
        super().settle(stepped)
        self._keep_factors(stepped)

    def state_dict(self) -> dict[str, Any]:
        """Residuals and Q, by parameter."""
        return {**super().state_dict(), "q": {name: q.clone() for name, q in self._q.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        super().load_state_dict(state)
        self._q = {name: q.clone() for name, q in state["q"].items()}

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take over what other ranks had; Q is the same on all."""
        super().load_resharded(states, rank, ranks)
        self._q = {name: q.clone() for name, q in states[0]["q"].items()}

    # --- parts -----------------------------------------------------------------------------------

    def _keep_factors(self, stepped: bool) -> None:
        if stepped:
            self._q.update(self._pending)
        self._pending.clear()

    def _divided(
        self, bucket: Bucket, flat: torch.Tensor
    ) -> tuple[list[tuple[Piece, torch.Tensor]], list[tuple[Piece, torch.Tensor]]]:
        """Pieces to compress, as matrices, and pieces to send whole."""
        low_rank, whole = [], []
        for piece in bucket.pieces:
            shape = matrix_shape(piece.shape, self._rank)
            values = _part(flat, piece)
            if shape is None:
                whole.append((piece, values))
            else:
                low_rank.append((piece, values.view(shape)))
        return low_rank, whole

    def _start(self, piece: Piece, matrix: torch.Tensor) -> torch.Tensor:
        """Q of the step before; at first random, the same on every rank, by the parameter's name."""
        found = self._q.get(piece.name)
        if found is None:
            generator = torch.Generator().manual_seed(_seed_of(piece.name, self._seed))
            found = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        return found.to(device=matrix.device, dtype=matrix.dtype)

    def _averaged(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Means over the replicas of several tensors, by one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self._ranks)
        before = self._sum_over.sent_bytes
        self._sum_over(flat)
        self.traffic.sent += self._sum_over.sent_bytes - before
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _part(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat[piece.start : piece.start + torch.Size(piece.shape).numel()]


def _seed_of(name: str, seed: int) -> int:
    """The same in every process, unlike ``hash``."""
    return zlib.crc32(name.encode(), seed & 0xFFFFFFFF)
