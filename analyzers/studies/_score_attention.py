"""Attention by hand: its scores written to memory and read back, several times over.

    product (queries × keys) → scale, mask, softmax, dropout → product (with the values)

A fused kernel (FlashAttention, Dao et al. 2022) never stores the scores. The pattern is found in the order in which
the device ran: two batched products whose shapes fit, and between them nothing but memory-bound kernels, a softmax
among them. All work on tensors of the scores' shape is counted then, backward and saving included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._grouped import Grouped
from ._products import Product, Work, plain_name
from ._shapes import tensors_of

__all__ = ["ScoreAttention", "attention_by_hand"]

Array = npt.NDArray[Any]

#: Memory-bound operators between the two products at most.
_MOST_BETWEEN = 12


@dataclass(frozen=True, slots=True)
class ScoreAttention:
    """Attention that stores its scores. ``forward`` and ``backward`` count it, ``products_ns`` and ``moving_ns`` are the
    time of products and of memory-bound work on scores; ``flops`` are those of its products with the backward's
    2.5-fold. ``score`` is (batch × heads, queries, keys) of the largest."""

    score: tuple[int, int, int]
    dtype: str | None
    forward: int
    backward: int
    products_ns: int
    moving_ns: int
    flops: float


def attention_by_hand(grouped: Grouped, first: Array, moves: Array) -> ScoreAttention | None:
    """What attention by hand takes; None where there is none. ``first`` is the first row of each unit (an operator's
    kernels in a row), ``moves`` whether a unit is memory-bound work."""
    works = grouped.works
    product = np.array([one is not None and one.product is not None for one in works])
    if not product.any() or not len(first):
        return None
    key = grouped.key[first]
    softmax = np.array([_is_softmax(grouped, place) for place in range(len(works))])
    places = np.flatnonzero(product[key])
    left, right = places[:-1], places[1:]
    between = right - left - 1
    other = np.concatenate(([0], np.cumsum(~moves & ~product[key])))
    soft = np.concatenate(([0], np.cumsum(softmax[key])))
    fits = (between >= 1) & (between <= _MOST_BETWEEN)
    fits &= (other[right] == other[left]) & (soft[right] > soft[left + 1])
    pairs, counts = np.unique(
        np.stack((key[left[fits]], key[right[fits]]), axis=1), axis=0, return_counts=True
    )
    scores: dict[tuple[int, int, int], list[float]] = {}
    for (one, two), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        shape = _score_of(works[one], works[two])
        if shape is not None:
            entry = scores.setdefault(shape[0], [0, 0.0])
            entry[0] += count
            entry[1] = shape[1]
    return _measured(grouped, scores) if scores else None


def _is_softmax(grouped: Grouped, place: int) -> bool:
    name = (grouped.strings.text(int(grouped.names[place])) or "").lower()
    return "softmax" in name and "log_softmax" not in name


def _score_of(one: Work | None, two: Work | None) -> tuple[tuple[int, int, int], float] | None:
    """(scores' shape, operations of a forward call) of two products that are attention's, else None."""
    first = one.product if one is not None else None
    second = two.product if two is not None else None
    if first is None or second is None or first.batch < 2 or first.batch != second.batch:
        return None
    if first.m != second.m or first.n != second.k or first.k > first.n:
        return None
    return (first.batch, first.m, first.n), 2.0 * first.batch * first.m * first.n * (first.k + second.n)


def _measured(grouped: Grouped, scores: dict[tuple[int, int, int], list[float]]) -> ScoreAttention:
    ns, calls = grouped.ns, grouped.calls
    moving = products = backward = 0
    flops = 0.0
    backward_of = dict.fromkeys(scores, 0)
    for place, work in enumerate(grouped.works):
        shape = _scores_in(grouped, place, work, scores)
        if shape is None:
            continue
        if work is not None and work.product is not None:
            products += int(ns[place])
            continue
        moving += int(ns[place])
        name = plain_name(grouped.strings.text(int(grouped.names[place])) or "").lower()
        if "softmax" in name and "backward" in name:
            backward_of[shape] += int(calls[place])
    for shape, (count, each) in scores.items():
        flops += each * (count + 2.5 * backward_of[shape])
        backward += backward_of[shape]
    largest = max(scores, key=lambda shape: shape[0] * shape[1] * shape[2])
    dtype = next(
        (work.dtype for work in grouped.works if work is not None and _is(work.product, largest)), None
    )
    return ScoreAttention(
        largest, dtype, int(sum(entry[0] for entry in scores.values())), backward, products, moving, flops
    )


def _is(product: Product | None, score: tuple[int, int, int]) -> bool:
    return product is not None and (product.batch, product.m, product.n) == score


def _scores_in(
    grouped: Grouped, place: int, work: Work | None, scores: dict[tuple[int, int, int], list[float]]
) -> tuple[int, int, int] | None:
    """The scores that a group works on: one of a product's three matrices, or an elementwise operator's first input."""
    product = work.product if work is not None else None
    if product is not None:
        sides = (product.m, product.n, product.k)
        for batch, queries, keys in scores:
            if product.batch == batch and any(
                {queries, keys} == set(pair) or (queries, keys) == pair
                for pair in ((sides[0], sides[1]), (sides[0], sides[2]), (sides[2], sides[1]))
            ):
                return batch, queries, keys
        return None
    tensors = tensors_of(grouped.strings.text(int(grouped.shapes[place])), None)
    if not tensors:
        return None
    dims = tensors[0].dims
    for batch, queries, keys in scores:
        if len(dims) >= 3 and dims[-2:] == (queries, keys) and tensors[0].elements == batch * queries * keys:
            return batch, queries, keys
    return None
