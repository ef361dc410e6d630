"""Rows of the study of kernels: what a rank says, and how ranks and windows add up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

from trine.analyzers._tabular import Columns, Tabular

from ._gemm import Fit
from ._products import Product
from ._score_attention import ScoreAttention

__all__ = [
    "MOST_ROWS",
    "NO_CHAINS",
    "ChainTime",
    "ChainTotals",
    "OperatorTime",
    "Part",
    "ProductKernel",
    "ShapeTime",
    "joined",
]

#: Rows kept of each table, by time; a rank keeps twice as many, so that the job's are right.
MOST_ROWS = 50

Row = TypeVar("Row")

#: Chains, their kernels, their ns, and what fusing them would save: low, mid, high ns.
ChainTotals = tuple[int, int, int, int, int, int]
NO_CHAINS: ChainTotals = (0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator by name: how often it was called, the kernels it launched and their time. Without a device,
    ``kernels`` counts calls and ``ns`` is self time."""

    name: str
    kind: str
    calls: int
    kernels: int
    ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class ShapeTime:
    """An operator with its inputs' shapes and types. ``flops`` and ``bytes`` are sums over the calls, None where
    they cannot be said; ``counted`` tells that the profiler counted the operations, ``shortcut`` that its algorithm does fewer than were
    counted (Winograd, FFT). ``kernel`` is its longest."""

    operator: str
    shapes: str
    types: str
    kind: str
    calls: int
    kernels: int
    ns: int
    flops: float | None
    bytes: int | None
    dtype: str | None
    kernel: str
    tensor_cores: bool | None
    counted: bool
    shortcut: bool
    product: Product | None
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class ChainTime(Tabular):
    """Chains of the same operators: ``count`` of them, ``kernels`` in all. ``saved_ns`` is low, mid, high;
    ``known_share`` the part of their time whose shapes were known."""

    COLUMNS: ClassVar[Columns] = {"saved_ns": ("saved_low_ns", "saved_mid_ns", "saved_high_ns")}

    operators: str
    count: int
    kernels: int
    ns: int
    saved_ns: tuple[int, int, int]
    known_share: float


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A kernel of matrix products. ``state``: used, unused, vector (a product with a vector) or unknown."""

    kernel: str
    dtype: str | None
    state: str
    calls: int
    ns: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank says. ``classes`` is class → ns, ``products`` state → ns, ``precision`` dtype → (ns of products,
    ns of the rest); ``small`` counts calls, ns, gap ns, by which ``small_operators`` (name → calls)."""

    basis: Literal["device", "host"]
    total_ns: int
    attributed_ns: int
    calls: int
    with_shapes_ns: int
    operators: tuple[OperatorTime, ...]
    outermost: tuple[OperatorTime, ...]
    shapes: tuple[ShapeTime, ...]
    classes: Mapping[str, int]
    products: Mapping[str, int]
    precision: Mapping[str, tuple[int, int]]
    product_kernels: tuple[ProductKernel, ...] = ()
    small: tuple[int, int, int] = (0, 0, 0)
    small_operators: Mapping[str, int] = field(default_factory=dict)
    chains: tuple[ChainTime, ...] = ()
    chain_totals: ChainTotals = NO_CHAINS
    attention: ScoreAttention | None = None


def joined(parts: Iterable[Part], most: int = MOST_ROWS) -> Part | None:
    """Parts of windows or ranks added up; those of a device win over those of a host. None of nothing."""
    found = list(parts)
    basis: Literal["device", "host"] = "device" if any(part.basis == "device" for part in found) else "host"
    found = [part for part in found if part.basis == basis]
    if not found:
        return None
    return Part(
        basis=basis,
        total_ns=sum(part.total_ns for part in found),
        attributed_ns=sum(part.attributed_ns for part in found),
        calls=sum(part.calls for part in found),
        with_shapes_ns=sum(part.with_shapes_ns for part in found),
        operators=_merge((row for part in found for row in part.operators), _name, _add_operators, most),
        outermost=_merge((row for part in found for row in part.outermost), _name, _add_operators, most),
        shapes=_merge((row for part in found for row in part.shapes), _shape, _add_shapes, most),
        classes=_sums(part.classes for part in found),
        products=_sums(part.products for part in found),
        precision=_pairs(part.precision for part in found),
        product_kernels=_merge(
            (row for part in found for row in part.product_kernels), _kernel, _add_kernels, most
        ),
        small=_three(part.small for part in found),
        small_operators=_sums(part.small_operators for part in found),
        chains=_merge((row for part in found for row in part.chains), _chain, _add_chains, most),
        chain_totals=tuple(
            sum(column) for column in zip(*(part.chain_totals for part in found), strict=True)
        ),
        attention=_attention(found),
    )


def _attention(parts: Iterable[Part]) -> ScoreAttention | None:
    found = [part.attention for part in parts if part.attention is not None]
    if not found:
        return None
    largest = max(found, key=lambda one: one.score[0] * one.score[1] * one.score[2])
    return replace(
        largest,
        forward=sum(one.forward for one in found),
        backward=sum(one.backward for one in found),
        products_ns=sum(one.products_ns for one in found),
        moving_ns=sum(one.moving_ns for one in found),
        flops=sum(one.flops for one in found),
    )


def _merge(
    rows: Iterable[Row], key: Callable[[Row], Hashable], add: Callable[[Row, Row], Row], most: int
) -> tuple[Row, ...]:
    sums: dict[Hashable, Row] = {}
    for row in rows:
        own = key(row)
        sums[own] = add(sums[own], row) if own in sums else row
    return tuple(sorted(sums.values(), key=lambda row: -row.ns)[:most])  # type: ignore[attr-defined]


def _name(row: OperatorTime) -> Hashable:
    return row.name


def _add_operators(one: OperatorTime, other: OperatorTime) -> OperatorTime:
    return replace(
        one,
        calls=one.calls + other.calls,
        kernels=one.kernels + other.kernels,
        ns=one.ns + other.ns,
        backward_ns=one.backward_ns + other.backward_ns,
    )


def _shape(row: ShapeTime) -> Hashable:
    return row.operator, row.shapes, row.types


def _add_shapes(one: ShapeTime, other: ShapeTime) -> ShapeTime:
    return replace(
        one if one.ns >= other.ns else other,
        calls=one.calls + other.calls,
        kernels=one.kernels + other.kernels,
        ns=one.ns + other.ns,
        flops=None if one.flops is None or other.flops is None else one.flops + other.flops,
        bytes=None if one.bytes is None or other.bytes is None else one.bytes + other.bytes,
    )


def _kernel(row: ProductKernel) -> Hashable:
    return row.kernel, row.dtype


def _add_kernels(one: ProductKernel, other: ProductKernel) -> ProductKernel:
    return replace(one, calls=one.calls + other.calls, ns=one.ns + other.ns)


def _chain(row: ChainTime) -> Hashable:
    return row.operators


def _add_chains(one: ChainTime, other: ChainTime) -> ChainTime:
    ns = one.ns + other.ns
    low, mid, high = (a + b for a, b in zip(one.saved_ns, other.saved_ns, strict=True))
    return ChainTime(
        one.operators,
        one.count + other.count,
        one.kernels + other.kernels,
        ns,
        (low, mid, high),
        (one.known_share * one.ns + other.known_share * other.ns) / max(ns, 1),
    )


def _sums(mappings: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for mapping in mappings:
        for name, amount in mapping.items():
            total[name] = total.get(name, 0) + amount
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _pairs(mappings: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for mapping in mappings:
        for name, (products, rest) in mapping.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + products, before[1] + rest
    return dict(sorted(total.items(), key=lambda item: -sum(item[1])))


def _three(triples: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    calls, ns, gap = (sum(column) for column in zip(*triples, strict=True))
    return calls, ns, gap
