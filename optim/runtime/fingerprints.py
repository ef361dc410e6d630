"""Small fingerprints of large tensors: enough to tell how far apart two of them are, and whether they are the same bits.

A gradient is kept as a count sketch (Charikar, Chen and Farach-Colton 2002): its elements, each with a fixed
random sign, are summed into a fixed number of buckets. The sketch is linear, so the sketch of a difference is the
difference of the sketches, and its norm is the tensor's within about 1/√buckets, unbiased in its square (Alon, Matias
and Szegedy 1996). Tensors that fit are kept whole.
"""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch

__all__ = ["BUCKETS", "bits_of", "shard_of", "sketch_of", "whole"]

#: Numbers kept of a tensor: norms of differences come out within about 1/√4096 = 1.6 %.
BUCKETS = 4096
#: Elements of a checksum's partial sums: what is held at once stays small beside a model.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a sharded one is a part of, as every rank must call it; others as they are. Detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@lru_cache(maxsize=64)
def _signs(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 2, (rows, BUCKETS), generator=generator, dtype=torch.int8).mul_(2).sub_(1)


def sketch_of(tensor: torch.Tensor) -> numpy.ndarray:
    """(BUCKETS,) float64, or all elements of a tensor that has no more than that, flattened."""
    flat = tensor.detach().reshape(-1).double().cpu()
    if flat.numel() <= BUCKETS:
        # A copy: doubles are the tensor's own memory, and gradients are zeroed in place.
        return numpy.array(flat.numpy())
    rows = -(-flat.numel() // BUCKETS)
    padded = torch.zeros(rows * BUCKETS, dtype=torch.float64)
    padded[: flat.numel()] = flat
    return numpy.asarray(padded.view(rows, BUCKETS).mul_(_signs(rows)).sum(0).numpy())


def bits_of(tensor: torch.Tensor) -> int:
    """A checksum of the tensor's bits, in order: equal tensors have equal ones, and no change of one element goes unseen."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = (
        flat.view(_INTEGERS[flat.element_size()])
        if flat.element_size() in _INTEGERS
        else flat.view(torch.uint8)
    )
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].cpu().to(torch.int64)
        # Odd weights are units modulo 2⁶⁴, so that a change of one element always changes the sum, which wraps around.
        weights = torch.arange(start, start + part.numel(), dtype=torch.int64).mul_(2 * 0x9E3779B1).add_(1)
        # Not the other way round: ``part`` may be the tensor itself, where that has 64 bits already.
        total += int(weights.mul_(part).sum())
    return total & (2**64 - 1)


def shard_of(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What lies on this rank, and which part of the whole that is: ranks that hold the same part are replicas."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor.detach(), "whole"
    mesh = tensor.device_mesh
    places = [
        f"{placement} {mesh.get_local_rank(dimension)} of {mesh.size(dimension)}"
        for dimension, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    ]
    return tensor.to_local().detach(), ", ".join(places) or "whole"
