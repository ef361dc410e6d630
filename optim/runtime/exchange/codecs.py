"""Lossy codes for rows of gradients, as pure functions of tensors: no process group, no state but a random generator.

A codec turns ``(rows, length)`` into ``(rows, payload bytes)`` of uint8 and back; one row is what goes to one rank. Codes
and scales travel in one payload, so that each phase of an exchange costs one collective. ``length`` is what
:meth:`Codec.padded` returns. A chunk that holds a non-finite number decodes to non-finite numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

__all__ = ["Cast", "Codec", "Exact", "Int8", "OneBit", "Qsgd", "Ternary", "pack", "ternary", "unpack"]

#: Bits of codes that share a scale of 16: a thirty-second more is sent. Smaller chunks follow local magnitudes better,
#: which tells: an optimizer such as Adam gives the smallest gradients as much weight as the largest.
CHUNK_BITS = 512


class Codec(Protocol):
    """One way to write rows of floats in fewer bytes."""

    name: str

    @property
    def bits(self) -> float:
        """Of an element, scales included, at lengths much larger than a chunk."""

    def padded(self, length: int) -> int:
        """The least length of at least ``length`` that it can encode."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, length) floats to (rows, bytes) of uint8."""

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """(rows, bytes) of uint8 to (rows, length) of ``dtype``, the same bits wherever it is decoded."""


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes below 2**bits, (rows, n) of uint8, to (rows, n·bits/8) bytes; ``bits`` 1, 2, 4 or 8."""
    if bits == 8:
        return codes
    each = 8 // bits
    grouped = codes.view(codes.shape[0], -1, each)
    packed = grouped[..., 0].clone()
    for place in range(1, each):
        packed |= grouped[..., place] << (bits * place)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    if bits == 8:
        return packed
    each = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: torch.Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.view(packed.shape[0], packed.shape[1] * each)


class _Chunked:
    """Shared by codecs whose codes have ``code_bits`` and whose chunks have one scale each, in bf16: fp32's range."""

    code_bits: int

    @property
    def chunk(self) -> int:
        """Elements that share a scale."""
        return CHUNK_BITS // self.code_bits

    @property
    def bits(self) -> float:
        """Of an element, with its share of the scale."""
        return self.code_bits + 16 / self.chunk

    def padded(self, length: int) -> int:
        """A multiple of the chunk; short rows are one chunk, in whole bytes."""
        unit = self.chunk if length >= self.chunk else 8
        return -(-length // unit) * unit

    def chunks_of(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, length) to (rows, chunks, chunk)."""
        return rows.view(rows.shape[0], -1, min(self.chunk, rows.shape[1]))

    def join(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Codes (rows, chunks, chunk) and scales (rows, chunks) as one payload."""
        packed = pack(codes.flatten(1), self.code_bits)
        return torch.cat([packed, scales.view(torch.uint8)], 1)

    def split(self, payload: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`join`: codes and scales (rows, chunks, 1)."""
        codes_bytes = length * self.code_bits // 8
        codes = unpack(payload[:, :codes_bytes].contiguous(), self.code_bits)
        # A copy, since bytes that do not begin where a float may cannot be seen as one.
        scales = payload[:, codes_bytes:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        return self.chunks_of(codes), scales.unsqueeze(-1)


class Int8(_Chunked):
    """Rounded to the nearest of 255 levels of each chunk's largest magnitude (Dettmers 2016; ZeRO++'s block scales).

    Deterministic: the error is at most half a level and is meant to be fed back. With ``generator`` it rounds
    stochastically, unbiased, for where nothing can be fed back.
    """

    name = "int8"
    code_bits = 8

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale = largest magnitude / 127."""
        chunks = self.chunks_of(rows)
        scales = _rounded_up(chunks.abs().amax(-1) / 127)
        levels = chunks / _divisor(scales).to(chunks.dtype)
        levels = levels.round_() if self.generator is None else _round_stochastically(levels, self.generator)
        codes = levels.clamp_(-127, 127).to(torch.int8).view(torch.uint8)
        return self.join(codes, scales)

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Code × scale."""
        codes, scales = self.split(payload, length)
        return (codes.view(torch.int8).to(dtype) * scales.to(dtype)).flatten(1)


class Qsgd(_Chunked):
    """Stochastic rounding to ``levels`` levels of each chunk's largest magnitude (Alistarh et al. 2017).

    Unbiased: an element at a fraction f between two levels becomes the upper one with probability f. Scaled by the
    largest magnitude, not by the 2-norm of the paper's theorem, whose levels are about √n/3 times coarser on a chunk of
    n normal numbers. ``levels`` of 1, 7 and 127 fill 2, 4 and 8 bits with the sign; what is between takes the next
    larger code. Elias coding is left out: its sizes vary, and collectives want to know them.
    """

    name = "qsgd"

    def __init__(self, generator: torch.Generator, levels: int = 127) -> None:
        self.generator = generator
        self.levels = levels
        self.code_bits = next(bits for bits in (2, 4, 8) if 2 * levels + 1 <= 2**bits)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes are levels plus ``self.levels``: unsigned."""
        chunks = self.chunks_of(rows)
        scales = _rounded_up(chunks.abs().amax(-1) / self.levels)
        levels = _round_stochastically(chunks / _divisor(scales).to(chunks.dtype), self.generator)
        codes = levels.clamp_(-self.levels, self.levels).add_(self.levels).to(torch.uint8)
        return self.join(codes, scales)

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """(Code − levels) × scale."""
        codes, scales = self.split(payload, length)
        return ((codes.to(dtype) - self.levels) * scales.to(dtype)).flatten(1)


class OneBit(_Chunked):
    """The sign, times each chunk's mean magnitude (Seide et al. 2014; scaled as Karimireddy et al. 2019).

    With this scale ‖x − C(x)‖² = ‖x‖² − ‖x‖₁²/n: it never sends more error than the gradient itself, which is what
    error feedback needs to converge. Of no use without error feedback.
    """

    name = "onebit"
    code_bits = 1

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Zero counts as positive."""
        chunks = self.chunks_of(rows)
        return self.join((chunks >= 0).to(torch.uint8), chunks.abs().mean(-1).to(torch.bfloat16))

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """± scale."""
        codes, scales = self.split(payload, length)
        return ((codes.to(dtype) * 2 - 1) * scales.to(dtype)).flatten(1)


class Ternary(_Chunked):
    """−s, 0 or s, with the scaler s of each chunk (Wen et al. 2017), for receivers that decode each sender apart."""

    name = "terngrad"
    code_bits = 2

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Clipped at 2.5 standard deviations of the row, as there."""
        limits = CLIP * rows.std(-1, correction=0, keepdim=True)
        chunks = self.chunks_of(torch.clamp(rows, -limits, limits))
        scales = _rounded_up(chunks.abs().amax(-1))
        codes = ternary(chunks, _divisor(scales), self.generator)
        return self.join(codes, scales)

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """(Code − 1) × scaler."""
        codes, scales = self.split(payload, length)
        return ((codes.to(dtype) - 1) * scales.to(dtype)).flatten(1)


#: Standard deviations at which TernGrad clips: the paper's c.
CLIP = 2.5


def ternary(values: torch.Tensor, scalers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """0, 1 or 2 for −s, 0, s: each value's sign with probability |value| / s, as uint8 of the same shape.

    ``scalers`` broadcast against ``values``, at least as large as their magnitudes, none zero. The expectation of
    (code − 1) · s is the value.
    """
    drawn = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float32)
    kept = drawn.to(values.dtype) * scalers.to(values.dtype) < values.abs()
    return (kept * values.sign() + 1).nan_to_num_(0.0).to(torch.uint8)


class Cast:
    """bf16 or fp16: each receiver sums in full precision what arrives in half."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        self.bits = 16.0

    def padded(self, length: int) -> int:
        """Any length will do."""
        return length

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounded to nearest even."""
        return rows.to(self.dtype).view(torch.uint8)

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Exact."""
        return payload.view(self.dtype).to(dtype)


class Exact:
    """Loses nothing and saves nothing: shows in tests that an exchange itself scales and orders rightly."""

    name = "exact"

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.bits = 8.0 * dtype.itemsize

    def padded(self, length: int) -> int:
        """Any length will do."""
        return length

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes themselves."""
        return rows.to(self.dtype).view(torch.uint8)

    def decode(self, payload: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that those bytes are."""
        return payload.view(self.dtype).to(dtype)


def pad_rows(flat: torch.Tensor, rows: int, codec: Codec) -> torch.Tensor:
    """A flat tensor as (rows, padded length), zeros behind its end; always a copy, at least fp32."""
    length = codec.padded(-(-flat.numel() // rows))
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return functional.pad(flat.to(dtype), (0, rows * length - flat.numel())).clone().view(rows, length)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """In bf16 and never smaller, so that no element is more than the largest level. As sent: the sender divides by it."""
    nearest = scales.to(torch.bfloat16)
    return torch.where(nearest.to(scales.dtype) < scales, nearest * (1 + 2**-7), nearest)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """(…, chunks) to (…, chunks, 1), never zero: a chunk of zeros has codes of zero. NaN stays NaN."""
    return scales.clamp_min(torch.finfo(torch.bfloat16).tiny).unsqueeze(-1)


def _round_stochastically(levels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Down or up with the probability that keeps the expectation."""
    drawn = torch.rand(levels.shape, generator=generator, device=levels.device, dtype=torch.float32)
    return levels.add_(drawn.to(levels.dtype)).floor_()
