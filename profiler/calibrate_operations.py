"""Times of single operations on this machine: products by shape and dtype, work on memory by size and dtype.

What a change of precision, of rows a micro-batch or of fusion does to an operator follows from two such times: what it
takes on record, times the ratio of the measured ones. One mapping an operation:

    {"operation": "product", "dtype": "bf16", "shape": [batch, rows, columns, inner], "seconds": 1.2e-3}
    {"operation": "softmax", "dtype": "fp32", "shape": [elements], "seconds": 3.1e-4}

``product`` is C = A·B with A (batch, rows, inner); batch 1 is a plain matrix product, the mean over the three layouts that
a linear layer's forward and backward have. Everything else counts the elements of its output, which is allocated anew as
a training step does. ``cast`` reads the dtype that it says and writes the other one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

__all__ = ["measure_operations"]

#: Sides of products: a grid over rows, columns and inner length, and of attention's products by head.
SIDES = (64, 256, 1024)
#: Heads, tokens and head sizes of batched products; both orders, Q·Kᵀ and P·V.
HEADS, TOKENS, HEAD_SIZES = 8, (64, 256, 512), (32, 64, 128)
ELEMENTS = (2**12, 2**15, 2**18, 2**20, 2**22)
#: Elements of a row, of what normalises rows.
ROW = 256
#: Of one operation all repetitions together, but at least three.
SECONDS = 0.01
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Work = Callable[[], Any]
Rows = list[dict[str, Any]]


def measure_operations(device: torch.device, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Rows:
    """Every operation above, by dtype, in a few seconds. The best of a few repetitions."""
    found: Rows = []
    with torch.no_grad():
        for name in dtypes:
            for shape, works in _products(_DTYPES[name], device):
                seconds = sum(_best(work, device) for work in works) / len(works)
                found.append(_row("product", name, list(shape), seconds))
            for operation, elements, work in _memory_work(_DTYPES[name], device):
                found.append(_row(operation, name, [elements], _best(work, device)))
    return found


def _row(operation: str, dtype: str, shape: list[int], seconds: float) -> dict[str, Any]:
    return {"operation": operation, "dtype": dtype, "shape": shape, "seconds": seconds}


def _products(
    dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[tuple[int, int, int, int], tuple[Work, ...]]]:
    """((batch, rows, columns, inner), the products to be timed)."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for rows in SIDES:
        for columns in SIDES:
            for inner in SIDES:
                left, right = drawn(rows, inner), drawn(inner, columns)
                layouts = ((left, right), (left, drawn(columns, inner).t()), (drawn(inner, rows).t(), right))
                yield (1, rows, columns, inner), tuple(partial(torch.mm, *pair) for pair in layouts)
    for tokens in TOKENS:
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
    for elements in ELEMENTS:
        x = torch.randn(elements // ROW, ROW, device=device).to(dtype)
        y = torch.randn(elements // ROW, ROW, device=device).to(dtype)
        mask = x > 0
        square = torch.randn(4, 32, elements // 128, device=device).to(dtype)
        weight = torch.ones(ROW, device=device, dtype=dtype)
        normal, mean, deviation = torch.native_layer_norm(x, [ROW], weight, weight, 1e-5)
        soft = x.softmax(-1)
        aten = torch.ops.aten
        yield from (
            ("add", elements, partial(torch.add, x, y)),
            ("add_in_place", elements, partial(x.add_, y, alpha=0.0)),
            ("multiply", elements, partial(torch.mul, x, 0.5)),
            ("gelu", elements, partial(functional.gelu, x)),
            ("gelu_backward", elements, partial(aten.gelu_backward, y, x)),
            ("softmax", elements, partial(torch.softmax, x, -1)),
            ("softmax_backward", elements, partial(aten._softmax_backward_data, y, soft, -1, dtype)),
            ("layer_norm", elements, partial(functional.layer_norm, x, [ROW], weight, weight)),
            (
                "layer_norm_backward",
                elements,
                partial(
                    aten.native_layer_norm_backward,
                    normal, x, [ROW], mean, deviation, weight, weight, [True, True, True],
                ),
            ),
            ("masked_fill", elements, partial(x.masked_fill, mask, 0.0)),
            ("sum", elements, partial(torch.sum, x, 0)),
            ("copy", elements, x.clone),
            ("transposed_copy", elements, partial(square.transpose(1, 2).contiguous)),
            ("cast", elements, partial(x.to, other)),
        )  # fmt: skip


def _best(work: Work, device: torch.device) -> float:
    """Seconds of the fastest repetition, after one that warms up."""
    work()
    best, deadline, done = math.inf, time.perf_counter() + SECONDS, 0
    while done < 3 or (time.perf_counter() < deadline and done < 50):
        best = min(best, _timed(work, device))
        done += 1
    return best


def _timed(work: Work, device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
