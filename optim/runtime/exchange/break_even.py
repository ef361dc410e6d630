"""Does compression pay here? Transfer saved, by the measured link, against the measured time to encode and decode.

    gain = S/β · (1 − sent/plain) − extra latencies − codec

S is the gradients' bytes, α and β the all-reduce's measured latency and bandwidth. It is the gain of a step whose
communication is exposed; what hides behind backward anyway cannot be saved. The codec's time is measured on a sample of
this model's own gradients' shapes, on this device, without communication, and scaled to all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trine.optim.config import CODECS
from trine.optim.runtime.exchange import Bucket, Piece
from trine.optim.runtime.exchange.choice import reduction_of
from trine.optim.runtime.exchange.two_phase import Alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trine.optim.config import Communication
    from trine.optim.runtime.links import Link
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Estimate", "estimate_of", "measure_codec", "predicted_gain_s"]

#: Enough to leave caches, little enough for the set-up.
SAMPLE_ELEMENTS = 2**20
REPEATS = 3
#: DDP's default bucket.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step would gain and pay, in seconds."""

    name: str
    ratio: float  # plain bytes / sent bytes, on the sample
    saved_s: float  # transfer
    codec_s: float
    bytes_per_s: float

    @property
    def gain_s(self) -> float:
        """Below zero where it costs more than it saves."""
        return self.saved_s - self.codec_s

    def __str__(self) -> str:
        moved = f"saves {_spelled(self.saved_s)} of transfer"
        if self.saved_s < 0:
            moved = f"its further latencies cost {_spelled(-self.saved_s)} more than its transfer saves"
        said = (
            f"{self.ratio:.3g} times fewer bytes; {moved} and costs {_spelled(self.codec_s)} to encode "
            f"at {self.bytes_per_s / 1e9:.2g} GB/s"
        )
        if self.gain_s >= 0:
            return f"{said}, where communication is exposed"
        return (
            f"{said}: it does NOT pay here; drop the key, unless other links are slower than the measured one"
        )


def predicted_gain_s(
    gradient_bytes: float, ratio: float, link: Link, codec_s: float, extra_collectives: float = 0.0
) -> float:
    """Seconds that a step with exposed communication gains; below zero where it loses.

    ``gradient_bytes`` is S; ``ratio`` how many times fewer bytes are sent; ``link`` the all-reduce's α and β;
    ``codec_s`` the time to encode and decode all of it; ``extra_collectives`` how many more there are in a step.
    """
    saved = gradient_bytes / link.bytes_per_s * (1 - 1 / ratio) - extra_collectives * link.alpha_s
    return saved - codec_s


def estimate_of(assembly: Assembly, share: float = 1.0) -> Estimate:
    """For this model and device, by the measured link. Collective over all ranks, once, in the set-up (under a second).

    ``share``: a half where there is a reduce-scatter in place of an all-reduce, which moves, and encodes, half as much.
    """
    from trine.optim.runtime.links import link_of

    communication, facts = assembly.config.communication, assembly.facts
    shapes = {name: p for name, p in assembly.model.named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in shapes.values())
    size = sum(p.numel() * p.element_size() for p in shapes.values())
    link = link_of("all_reduce", facts.device)
    ratio, seconds, elements = measure_codec(communication, shapes, facts.ranks, facts.device)
    sample_s = min(seconds)
    codec_s = sample_s * total / elements * share
    buckets = max(1.0, size / BUCKET_BYTES)
    extra = (CODECS[communication.compression] - 1) * buckets
    saved = predicted_gain_s(size * share, ratio, link, 0.0, extra)
    return Estimate(communication.compression, ratio, saved, codec_s, link.bytes_per_s)


def measure_codec(
    communication: Communication,
    parameters: Mapping[str, torch.Tensor],
    ranks: int,
    device: torch.device,
    repeats: int = REPEATS,
) -> tuple[float, list[float], int]:
    """Ratio of bytes, seconds of each repetition, and elements of a sample of these parameters' gradients, drawn at random.

    The sample takes parameters in their order until it holds about a million elements, the last one cut to rows.
    """
    pieces: list[Piece] = []
    start = 0
    for name, parameter in parameters.items():
        shape = _fitting(tuple(parameter.shape), SAMPLE_ELEMENTS - start)
        pieces.append(Piece(name, start, shape))
        start += torch.Size(shape).numel()
        if start >= SAMPLE_ELEMENTS:
            break
    dtype = next(iter(parameters.values())).dtype
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(start, generator=generator, device=device, dtype=torch.float32).to(dtype)
    reduction = reduction_of(communication, lambda flat: None, Alone(ranks), device)
    seconds: list[float] = []
    for _ in range(repeats):
        bucket = Bucket(drawn.clone(), tuple(pieces))
        _wait(device)
        began = time.perf_counter()
        with torch.no_grad():
            reduction.mean(bucket)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return reduction.traffic.plain / reduction.traffic.sent, seconds, start


def _fitting(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    if not shape or torch.Size(shape).numel() <= elements:
        return shape
    row = int(torch.Size(shape[1:]).numel())
    return (max(1, elements // row), *shape[1:])


def _wait(device: torch.device) -> None:
    """This is the set-up, not a step: a device may be waited for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _spelled(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
