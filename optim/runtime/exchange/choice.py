"""From ``communication.compression`` to the reduction, or the codec, that does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from trine.optim.runtime.exchange.casts import HalfPrecision
from trine.optim.runtime.exchange.codecs import Cast, Codec, Int8, OneBit, Qsgd, Ternary
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.powersgd import PowerSGD
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.terngrad import TernGrad
from trine.optim.runtime.exchange.two_phase import Phases, TwoPhase

if TYPE_CHECKING:
    from trine.optim.config import Communication
    from trine.optim.runtime.exchange import SumOver

__all__ = [
    "DEFAULT_LEVELS",
    "DEFAULT_RANK",
    "generator_of",
    "reduction_of",
    "sharded_codec_of",
    "shared_seed",
]

#: Vogels et al. 2019 train language models with it; torch's own default, 1, lags far behind.
DEFAULT_RANK = 4
#: Fills eight bits with the sign.
DEFAULT_LEVELS = 127

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def reduction_of(
    communication: Communication, sum_over: SumOver, phases: Phases, device: torch.device, seed: int = 0
) -> Lossy:
    """For replicas. ``sum_over`` does the sums of codes that are linear: bf16, fp16 and PowerSGD.

    ``seed`` is the same on every rank (:func:`shared_seed`): PowerSGD's first factors are drawn from it.
    """
    name, ranks, rank = communication.compression, phases.ranks, phases.rank
    if name in _HALVES:
        return HalfPrecision(_HALVES[name], sum_over, ranks)
    if name == "powersgd":
        matrix_rank = communication.compression_rank or DEFAULT_RANK
        return PowerSGD(matrix_rank, sum_over, ranks, Residuals(ranks, rank), seed)
    if name == "terngrad":
        return TernGrad(generator_of(rank, device), phases)
    if name == "qsgd":
        levels = communication.compression_levels or DEFAULT_LEVELS
        return TwoPhase(Qsgd(generator_of(rank, device), levels), phases)
    codec: Codec = Int8() if name == "int8" else OneBit()
    return TwoPhase(codec, phases, Residuals(ranks, rank))


def shared_seed(group: distributed.ProcessGroup, device: torch.device) -> int:
    """Rank 0's seed of the program, on every rank. Collective over the group."""
    shared = torch.tensor([torch.initial_seed() % 2**31], device=device)
    distributed.broadcast(shared, group=group, group_src=0)
    return int(shared)


def sharded_codec_of(communication: Communication, rank: int, device: torch.device) -> Codec:
    """For FSDP2's reduce-scatter: each receiver decodes every sender apart and sums in full precision.

    int8 rounds stochastically here: unbiased, it needs no residual, which would be as large as the unsharded gradients.
    """
    name = communication.compression
    if name in _HALVES:
        return Cast(_HALVES[name])
    if name == "onebit":
        return OneBit()
    generator = generator_of(rank, device)
    if name == "int8":
        return Int8(generator=generator)
    if name == "qsgd":
        return Qsgd(generator, communication.compression_levels or DEFAULT_LEVELS)
    return Ternary(generator)


def generator_of(rank: int, device: torch.device) -> torch.Generator:
    """Other numbers on every rank, the same in every run of one seed; the program's own generator is not advanced."""
    generator = torch.Generator(device=device)
    generator.manual_seed((torch.initial_seed() * 0x9E3779B1 + rank + 1) % 2**63)
    return generator
