"""How well what ran used the device: operators, shapes against the roofline, chains, products that fit badly."""

from __future__ import annotations

import re

from trine.analyzers.reports._cells import left, right, share
from trine.analyzers.reports.document import Block, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies._gemm_waste import GemmIssue
from trine.analyzers.studies._grouped import NO_OPERATOR
from trine.analyzers.studies._kernel_rows import ShapeTime
from trine.analyzers.studies._roofline import Roofline
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.units import count, duration, percent, rate

__all__ = ["ORDER", "section"]

ORDER = 52

#: Rows of a table here: the JSON has fifty.
_MOST = 10
#: Chains that would save less than this share of the work are not drawn.
_LEAST_SHARE = 0.005
_LIBRARY = re.compile(r"^aten::(?:cudnn_|miopen_|native_|_)?")
_WHY = {"alignment": "rows not a multiple of 16 bytes", "tile": "edge tiles", "wave": "last wave"}


def section(result: KernelEfficiency, analysis: Analysis, most_rows: int) -> Section | None:
    """Short tables, each only where there is something to say."""
    rows = min(most_rows, _MOST)
    found = (
        _summary(result),
        _operators(result, rows),
        _shapes(result, rows),
        _gemms(result, rows),
        _chains(result, rows),
    )
    return Section(
        "kernel-efficiency",
        "How well kernels use the device" if result.basis == "device" else "Time by operator",
        tuple(block for block in found if block is not None),
    )


def _summary(result: KernelEfficiency) -> Paragraph:
    said = []
    if result.roofline_ns is not None:
        measured, least = result.roofline_ns
        said.append(
            f"operators whose work is known from their shapes take {duration(measured)} "
            f"({percent(measured / max(result.total_ns, 1))} of the work) and would take {duration(least)} at the roofline"
        )
    products = sum(result.products.values())
    if products:
        said.append(
            f"{percent(result.products.get('used', 0) / products)} of the products' time is on tensor cores"
        )
    precision = {name: of_products for name, (of_products, _) in result.precision.items() if of_products}
    if precision:
        total = sum(precision.values())
        parts = [f"{clean(name)} {percent(ns / total)}" for name, ns in list(precision.items())[:4]]
        said.append(f"products by precision: {', '.join(parts)}")
    calls, small_ns, gap_ns = result.small
    if calls:
        said.append(
            f"{count(calls)} of {count(result.calls)} kernels take less than 10 µs, {duration(small_ns)} in all, "
            f"after {duration(gap_ns)} of short gaps"
        )
    attention = result.attention
    if attention is not None:
        by_hand = attention.products_ns + attention.moving_ns
        said.append(f"attention by hand, its scores in memory, takes {share(by_hand, result.total_ns)}")
    if not said:
        said.append(f"{duration(result.total_ns)} in {count(result.calls)} calls")
    text = "; ".join(said)
    return Paragraph(f"{text[0].upper()}{text[1:]}.")


def _operators(result: KernelEfficiency, most: int) -> Table | None:
    if not result.operators or result.attributed_ns == 0:
        return None
    cells = tuple(
        (
            clean(row.name),
            "–" if row.name == NO_OPERATOR else row.kind,
            count(row.calls),
            count(row.kernels),
            share(row.ns, result.total_ns),
            percent(row.backward_ns / max(row.ns, 1)),
        )
        for row in result.operators[:most]
    )
    time = "device time" if result.basis == "device" else "self time"
    columns = (left("operator", flexible=True), left("kind"), *right("calls", "kernels", time, "backward"))
    note = ""
    if any(row.name == NO_OPERATOR for row in result.operators[:most]):
        note = f"{NO_OPERATOR}: work of all kinds whose launch, or the operator around it, the trace does not hold."
    return Table(
        columns, cells, "Operators by what they launched" if result.basis == "device" else "Operators", note
    )


def _shapes(result: KernelEfficiency, most: int) -> Table | None:
    rows = [
        (row, one) for row, one in zip(result.shapes, result.rooflines, strict=True) if row.flops or row.bytes
    ]
    if not rows:
        return None
    cells = tuple(
        (
            _shape_words(row),
            row.dtype or "–",
            share(row.ns, result.total_ns),
            _rate(row, one),
            one.bound or "–",
            percent(one.efficiency) if one.efficiency is not None else "–",
            duration(one.gain_ns) if one.gain_ns is not None else "–",
        )
        for row, one in rows[:most]
    )
    columns = (
        left("operator and shapes", flexible=True),
        left("type"),
        *right("time", "rate"),
        left("bound by"),
        *right("of roofline", "above it"),
    )
    counted = "counted by the profiler" if any(row.counted for row, _ in rows) else "from shapes"
    note = (
        f"Operations {counted}; bytes: every input and the output once. Nothing reaches the roofline: the best matrix "
        "products there are, elsewhere, get to 80 % of it on an H100 and to 87 % on an A100."
    )
    return Table(columns, cells, "Shapes against the roofline", note)


def _shape_words(row: ShapeTime) -> str:
    """A product by m×n×k, anything else by its first input's shape."""
    name, product = clean(_LIBRARY.sub("", row.operator)), row.product
    if product is not None:
        batch = f"{product.batch}×" if product.batch > 1 else ""
        return f"{name} {batch}({product.m}×{product.n}×{product.k})"
    first = clean(row.shapes.split(" × ")[0]).replace(", ", "×").replace("[", "").replace("]", "")
    return f"{name} ({first})"


def _rate(row: ShapeTime, one: Roofline) -> str:
    """What bounds the operator, a second; arithmetic where that is open and known."""
    if one.flops_per_s is not None and one.bound != "memory":
        return f"{count(one.flops_per_s)}FLOP/s"
    return rate(one.bytes_per_s) if one.bytes_per_s is not None else "–"


def _gemms(result: KernelEfficiency, most: int) -> Table | None:
    if not result.gemms:
        return None
    cells = tuple(
        (
            f"{row.product.m} × {row.product.n} × {row.product.k}"
            + (f", {row.product.batch} times" if row.product.batch > 1 else ""),
            row.dtype or "–",
            share(row.ns, result.total_ns),
            "; ".join(_WHY[name] for name in row.why),
            _advice(row),
            f"{duration(row.waste_ns[0])} – {duration(row.waste_ns[2])}",
        )
        for row in result.gemms[:most]
    )
    columns = (
        left("m × n × k"),
        left("type"),
        *right("time"),
        left("what does not fit"),
        left("what would"),
        *right("costs"),
    )
    return Table(columns, cells, "Products whose shape fits the device badly")


def _advice(row: GemmIssue) -> str:
    if row.pad:
        return ", ".join(f"{name} = {size}" for name, size in row.pad.items())
    fit = row.fit
    if "wave" in row.why and fit.waves is not None:
        return f"{fit.waves:.2f} waves: use {percent(fit.wave_use)}"
    tile = f"{fit.tile[0]}×{fit.tile[1]}" if fit.tile is not None else "tile"
    return f"multiples of {tile}: use {percent(fit.tile_use)}"


def _chains(result: KernelEfficiency, most: int) -> Block | None:
    number, kernels, ns, low, mid, high = result.chain_totals
    if mid < _LEAST_SHARE * result.total_ns:
        return None
    cells = tuple(
        (
            clean(row.operators),
            count(row.count),
            share(row.ns, result.total_ns),
            f"{duration(row.saved_ns[0])} – {duration(row.saved_ns[2])}",
        )
        for row in result.chains[:most]
    )
    columns = (
        left("operators in a row", flexible=True),
        *right("chains", "time", "fused saves"),
    )
    note = (
        f"{count(number)} chains of {count(kernels)} kernels take {duration(ns)}; fusing all would save "
        f"{duration(low)} – {duration(mid)} – {duration(high)}."
    )
    return Table(columns, cells, "Chains of memory-bound kernels that one kernel could do", note)
