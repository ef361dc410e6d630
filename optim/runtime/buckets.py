"""Which bucket size leaves the least communication exposed: buckets leaving one by one while backward goes on. No torch.

DDP fills a bucket in the order in which gradients become ready and sends it once it holds ``cap`` bytes or more; buckets
go one after another. With the times at which gradients were ready, as measured, and the cost of an all-reduce by size,
what sticks out behind backward follows by walking through the buckets (the model of Li et al., VLDB 2020, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Gradient", "Prediction", "best_cap", "predict"]

#: No smaller bucket is tried: below it the latency is all there is.
LEAST_CAP_BYTES = 16 * 2**10
#: Of the exposed time; a smaller gain is within the prediction's error, and fewer buckets win.
WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient: when it is ready, after the first one, and its size."""

    ready_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a bucket size comes to."""

    cap_bytes: int
    buckets: int
    exposed_s: float  # from the last gradient to the end of the last bucket


def predict(
    gradients: Sequence[Gradient],
    cap_bytes: int,
    seconds: Callable[[float], float],
    first_cap_bytes: int | None = None,
) -> Prediction:
    """Walk through the buckets of ``cap_bytes``; ``seconds(size)`` is the all-reduce's time, in order of readiness."""
    free_s = 0.0  # when the communication before has ended
    filled, buckets = 0, 0
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)
    for position, gradient in enumerate(ordered):
        filled += gradient.size_bytes
        cap = first_cap_bytes if first_cap_bytes is not None and buckets == 0 else cap_bytes
        if filled >= cap or position == len(ordered) - 1:
            free_s = max(free_s, gradient.ready_s) + seconds(filled)
            filled = 0
            buckets += 1
    last_s = ordered[-1].ready_s if ordered else 0.0
    return Prediction(cap_bytes, buckets, free_s - last_s)


def best_cap(
    gradients: Sequence[Gradient],
    seconds: Callable[[float], float],
    least_bytes: int = LEAST_CAP_BYTES,
    first_cap_bytes: int | None = None,
) -> Prediction:
    """The cap with the least exposed time among powers of √2; where several are as good, the one of fewest buckets."""
    total = sum(gradient.size_bytes for gradient in gradients)
    tried = [predict(gradients, max(total, least_bytes), seconds, first_cap_bytes)]
    cap = float(tried[0].cap_bytes)
    while cap / 2**0.5 >= least_bytes:
        cap /= 2**0.5
        tried.append(predict(gradients, int(cap), seconds, first_cap_bytes))
    least = min(each.exposed_s for each in tried)
    return min(
        (each for each in tried if each.exposed_s <= least * (1 + WORTH)),
        key=lambda each: (each.buckets, each.exposed_s),
    )
