"""Times of single operations on this machine: products by shape and dtype, work on memory by size and dtype.

What a change of precision, of rows a micro-batch or of fusion does to an operator follows from two such times: what it
takes on record, times the ratio of the measured ones. One mapping an operation:

    {"operation": "product", "dtype": "bf16", "shape": [batch, rows, columns, inner], "seconds": 1.2e-3, "quartiles": [...]}
    {"operation": "softmax", "dtype": "fp32", "shape": [elements], "seconds": 3.1e-4, "quartiles": [3.1e-4, 3.2e-4, 3.4e-4]}

``seconds`` are the fastest repetition's, ``quartiles`` of all: how far a prediction that rests on them is in doubt.

``product`` is C = A·B with A (batch, rows, inner); batch 1 is a plain matrix product, the mean over the three layouts that
a linear layer's forward and backward have. Everything else counts the elements of its output, and works as a training step
does: every call finds other tensors than the calls before it, more of them than caches hold, and its output is kept until
as many others have been made. ``masked_fill`` is causal attention's, ``transposed_copy`` that of heads. ``cast`` reads the
dtype that it says and writes the other one. A device's products are measured in TF32 and fp16 too, where it has them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch.nn import functional

from trine.record.hardware import quartiles_of

from .calibrate_ranks import timed

__all__ = ["measure_operations"]

#: Sides of products: a grid over rows, columns and inner length, and of attention's products by head.
SIDES = (64, 256, 1024)
#: Heads, tokens and head sizes of batched products; both orders, Q·Kᵀ and P·V.
HEADS, TOKENS, HEAD_SIZES = 8, (64, 256, 512), (32, 64, 128)
ELEMENTS = (2**12, 2**15, 2**18, 2**20, 2**22)
#: The same of a device, which smaller work leaves idle; products of at most so many multiplications.
DEVICE_SIDES, DEVICE_TOKENS, DEVICE_ELEMENTS = (
    (256, 1024, 4096, 8192),
    (256, 1024, 2048),
    (2**16, 2**20, 2**24, 2**26),
)
MOST_MULTIPLICATIONS = 2**36
#: Elements of a row, of what normalises rows; attention has it in heads of such a size.
ROW, HEADS_OF_A_ROW = 256, (8, 32)
#: Bytes that a call's inputs and outputs take turns in: beyond the last-level cache that a core is likely to have for
#: itself. No more tensors than these, since the smallest are bound by their dispatch.
COLD_BYTES, MOST_TENSORS = 48 * 2**20, 24
#: glibc keeps for itself what is as large as something that was freed before, up to 32 MiB (mallopt(3)): no call then
#: pays for new pages.
KEPT_BYTES = 31 * 2**20
#: Calls on a device are timed together for as long, so that their launches run ahead of it.
LAUNCHED_S = 1e-3
#: Of one operation all repetitions together, but at least five.
SECONDS, LEAST, MOST = 0.01, 5, 50
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Work = Callable[[], Any]
Rows = list[dict[str, Any]]


def measure_operations(device: torch.device, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Rows:
    """Every operation above, by dtype, in a few seconds. The best of a few repetitions, and their quartiles."""
    found: Rows = []
    torch.empty(KEPT_BYTES, dtype=torch.uint8)  # freed at once
    with torch.no_grad():
        for name in dtypes:
            with _rounding(name):
                for shape, works in _products(_DTYPES[name], device):
                    times = [_repeated(work, device) for work in works]
                    found.append(_row("product", name, list(shape), times))
            if name == "tf32":  # only of products
                continue
            for operation, elements, work in _memory_work(_DTYPES[name], device):
                found.append(_row(operation, name, [elements], [_repeated(work, device)]))
    return found


@contextmanager
def _rounding(dtype: str) -> Iterator[None]:
    """Inside products of fp32 are rounded to TF32 where ``dtype`` is that, and else are not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _row(operation: str, dtype: str, shape: list[int], works: Sequence[Sequence[float]]) -> dict[str, Any]:
    """``works``: of each of the works that the row is the mean of, the seconds of its repetitions."""
    quartiles = [sum(each) / len(works) for each in zip(*map(quartiles_of, works), strict=True)]
    seconds = sum(map(min, works)) / len(works)
    return {
        "operation": operation,
        "dtype": dtype,
        "shape": shape,
        "seconds": seconds,
        "quartiles": quartiles,
    }


def _products(
    dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[tuple[int, int, int, int], tuple[Work, ...]]]:
    """((batch, rows, columns, inner), the products to be timed)."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    on_host = device.type == "cpu"
    sides = SIDES if on_host else DEVICE_SIDES
    for rows, columns, inner in product(sides, sides, sides):
        if rows * columns * inner <= MOST_MULTIPLICATIONS:
            left, right = drawn(rows, inner), drawn(inner, columns)
            layouts = ((left, right), (left, drawn(columns, inner).t()), (drawn(inner, rows).t(), right))
            yield (1, rows, columns, inner), tuple(partial(torch.mm, *pair) for pair in layouts)
    for tokens in TOKENS if on_host else DEVICE_TOKENS:
        for size in HEAD_SIZES:
            query, key, scores = (
                drawn(HEADS, tokens, size),
                drawn(HEADS, tokens, size),
                drawn(HEADS, tokens, tokens),
            )
            yield (HEADS, tokens, tokens, size), (partial(torch.bmm, query, key.transpose(1, 2)),)
            yield (
                (HEADS, tokens, size, tokens),
                (partial(torch.bmm, scores, key), partial(torch.bmm, scores.transpose(1, 2), key)),
            )


def _memory_work(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, int, Work]]:
    """(operation, elements of its output, what is timed)."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    aten = torch.ops.aten
    for elements in ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS:
        rows = elements // ROW
        drawn = torch.randn(rows, ROW, device=device).to(dtype)
        count = max(2, min(MOST_TENSORS, COLD_BYTES // (elements * dtype.itemsize)))
        pool = [drawn.clone() for _ in range(count)]
        weight = torch.ones(ROW, device=device, dtype=dtype)
        _, mean, deviation = torch.native_layer_norm(drawn, [ROW], weight, weight, 1e-5)
        future = torch.ones(min(rows, ROW), ROW, dtype=torch.bool, device=device).triu(1)
        one: dict[str, Callable[[torch.Tensor], Any]] = {
            "multiply": lambda x: torch.mul(x, 0.5),
            "gelu": functional.gelu,
            "softmax": lambda x: torch.softmax(x, -1),
            "layer_norm": lambda x, w=weight: functional.layer_norm(x, [ROW], w, w),  # type: ignore[misc]
            "masked_fill": lambda x, m=future: x.view(-1, len(m), ROW).masked_fill(m, -math.inf),  # type: ignore[misc]
            "sum": lambda x: torch.sum(x, 0),
            "copy": torch.clone,
            "transposed_copy": lambda x: x.view(4, -1, *HEADS_OF_A_ROW).transpose(1, 2).contiguous(),
            "cast": lambda x: x.to(other),
        }
        two: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
            "add": torch.add,
            "add_in_place": lambda x, y: x.add_(y, alpha=0.0),
            "gelu_backward": aten.gelu_backward,
            "softmax_backward": lambda x, y: aten._softmax_backward_data(x, y, -1, dtype),
            "layer_norm_backward": lambda x, y, m=mean, d=deviation, w=weight: (
                aten.native_layer_norm_backward(  # type: ignore[misc]
                    x, y, [ROW], m, d, w, w, [True, True, True]
                )
            ),
        }
        half = count // 2
        pairs = [(x, pool[at - half]) for at, x in enumerate(pool)]
        yield from ((name, elements, _cold(unary, [(x,) for x in pool])) for name, unary in one.items())
        yield from ((name, elements, _cold(binary, pairs)) for name, binary in two.items())


def _cold(work: Callable[..., Any], inputs: Sequence[tuple[torch.Tensor, ...]]) -> Work:
    """``work`` on other inputs at every call, and with an output whose memory was last used as many calls ago."""
    turns = cycle(inputs)
    kept: deque[Any] = deque(maxlen=len(inputs))

    def call() -> None:
        kept.append(work(*next(turns)))

    return call


def _repeated(work: Work, device: torch.device) -> list[float]:
    """Seconds of each repetition, after one that warms up."""
    work()
    count = 1 if device.type == "cpu" else min(max(1, int(LAUNCHED_S / _timed(work, device))), MOST_TENSORS)
    found: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(found) < LEAST or (time.perf_counter() < deadline and len(found) < MOST):
        found.append(_timed(work, device, count))
    return found


def _timed(work: Work, device: torch.device, count: int = 1) -> float:
    """Seconds of one of ``count`` calls. Of a single thread those that it had a core for, so that neighbours do not count; of
    a device its own, from event to event."""

    def calls() -> None:
        for _ in range(count):
            work()

    if device.type != "cpu" or torch.get_num_threads() > 1:
        return timed(calls, device) / count
    began = time.thread_time()
    calls()
    return (time.thread_time() - began) / count
