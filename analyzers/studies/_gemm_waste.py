"""What shapes that fit the hardware badly cost, from this run's own products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trine.analyzers._tabular import Columns, Tabular

from ._gemm import Fit, padded
from ._kernel_rows import ShapeTime
from ._products import Product
from ._roofline import Roofline

__all__ = ["GemmIssue", "issues_of"]

#: Calls shorter than this are launches rather than arithmetic: their shape is not what makes them slow.
SHORTEST_CALL_NS = 10_000
#: Operations a byte from which on a product counts as bound by arithmetic where the device's peaks are unknown.
INTENSITY = 50
#: Useful shares below which tiles and waves are worth a line.
TILE_USE = 0.85
WAVE_USE = 0.80
#: Of the time that quantisation wastes, what another shape or batch regains: low, mid, high.
REGAINED = (0.2, 0.5, 1.0)
#: A product counts as a peer from this share of the operations a call on, or from so many operations: small ones are
#: slow for other reasons, and would only make the comparison kinder.
PEER_SIZE = 0.25
PEER_FLOPS = 1e10
#: A peer must be this much faster before alignment is blamed.
PEER_FASTER = 1.1
#: Of the rate of aligned products of this run, what padding reaches: low, mid, high.
PEER_REACHED = (0.4, 0.7, 1.0)
#: Speed-up by padding where the run has no aligned product to compare with. nanoGPT's vocabulary padded from 50,257
#: to 50,304 made a whole step 1.25 times as fast (Karpathy, 2023-02); its output layer is a part of that step.
UNKNOWN_FASTER = (1.05, 1.25, 1.8)


@dataclass(frozen=True, slots=True)
class GemmIssue(Tabular):
    """A product whose shape fits badly. ``pad`` is dimension → size that would fit; ``waste_ns`` is low, mid, high
    over the calls; ``peers_flops_per_s`` the rate of this run's aligned products, None where there are none."""

    COLUMNS: ClassVar[Columns] = {"waste_ns": ("waste_low_ns", "waste_mid_ns", "waste_high_ns")}

    operator: str
    shapes: str
    product: Product
    dtype: str | None
    kernel: str
    calls: int
    ns: int
    fit: Fit
    pad: dict[str, int]
    waste_ns: tuple[int, int, int]
    flops_per_s: float | None
    peers_flops_per_s: float | None
    why: tuple[str, ...]  # of alignment, tile, wave


def issues_of(rows: Sequence[tuple[ShapeTime, Roofline]]) -> tuple[GemmIssue, ...]:
    """Products that are bound by arithmetic and fit badly, the most wasteful first."""
    products = [(row, roofline) for row, roofline in rows if row.product is not None and row.fit is not None]
    found = [issue for row, roofline in products if (issue := _issue(row, roofline, products)) is not None]
    return tuple(sorted(found, key=lambda issue: -issue.waste_ns[1]))


def _issue(
    row: ShapeTime, roofline: Roofline, products: Sequence[tuple[ShapeTime, Roofline]]
) -> GemmIssue | None:
    fit, product = row.fit, row.product
    assert fit is not None and product is not None
    if row.ns < SHORTEST_CALL_NS * row.calls or not _arithmetic(row, roofline):
        return None
    rate = roofline.flops_per_s
    peers = _peers(row, products)
    misaligned = bool(fit.misaligned) and (peers is None or rate is None or peers >= PEER_FASTER * rate)
    quantised = tuple(
        name
        for name, use, least in (("tile", fit.tile_use, TILE_USE), ("wave", fit.wave_use, WAVE_USE))
        if use < least
    )
    if not misaligned and not quantised:
        return None
    if misaligned:
        faster = (peers / rate,) * 3 if peers and rate else UNKNOWN_FASTER
        reached = PEER_REACHED if peers and rate else (1.0, 1.0, 1.0)
        waste = tuple(round(row.ns * (1 - 1 / k) * part) for k, part in zip(faster, reached, strict=True))
    else:
        waste = tuple(round(row.ns * (1 - fit.use) * part) for part in REGAINED)
    return GemmIssue(
        operator=row.operator,
        shapes=row.shapes,
        product=product,
        dtype=row.dtype,
        kernel=row.kernel,
        calls=row.calls,
        ns=row.ns,
        fit=fit,
        pad={name: padded(getattr(product, name)) for name in fit.misaligned} if misaligned else {},
        waste_ns=(waste[0], waste[1], waste[2]),
        flops_per_s=rate,
        peers_flops_per_s=peers,
        why=(("alignment",) if misaligned else ()) + quantised,
    )


def _arithmetic(row: ShapeTime, roofline: Roofline) -> bool:
    """Whether arithmetic bounds the product: a shape that fits better would not move fewer bytes."""
    if roofline.bound is not None:
        return roofline.bound == "compute"
    return bool(row.flops and row.bytes and row.flops >= INTENSITY * row.bytes)


def _peers(row: ShapeTime, products: Sequence[tuple[ShapeTime, Roofline]]) -> float | None:
    """Rate of this run's aligned products of the type that are large enough to compare: operations over time."""
    size = (row.flops or 0.0) / max(row.calls, 1)
    flops, ns = 0.0, 0
    for other, _ in products:
        fit = other.fit
        if fit is None or fit.misaligned or other.dtype != row.dtype or not other.flops:
            continue
        if other.flops / max(other.calls, 1) >= min(PEER_SIZE * size, PEER_FLOPS):
            flops, ns = flops + other.flops, ns + other.ns
    return flops / (ns / 1e9) if ns > 0 else None
