"""How well the device is used by what runs on it: time by operator and shape, distance to the roofline, precision,
tensor cores, small kernels, chains that fusion could join, products that fit badly.

Work is attributed to the operator that launched it (:mod:`._attribution`); operations and bytes come from
shapes (:mod:`._operator_work`) or from the profiler where it counted them; peaks from the table of devices
or a calibration. Communication is left out: it has its own results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from trine.analyzers._tabular import Columns, Tabular
from trine.analyzers.results import Hardware
from trine.record.hardware import peaks_of
from trine.record.model import Rank

from ._attribution import attribute
from ._gemm_waste import GemmIssue, issues_of
from ._grouped import Grouped, group
from ._kernel_chains import chain_rows, score_attention, small_rows
from ._kernel_part import KEPT, operator_rows, precision_of, product_rows, shape_rows
from ._kernel_rows import (
    MOST_ROWS,
    NO_CHAINS,
    ChainTime,
    ChainTotals,
    OperatorTime,
    Part,
    ProductKernel,
    ShapeTime,
    joined,
)
from ._roofline import Roofline, roofline_of
from ._scope import Scope, Whole
from ._score_attention import ScoreAttention

__all__ = ["KEY", "KernelEfficiency", "join", "reduce", "to_json"]

KEY = "kernel_efficiency"


@dataclass(frozen=True, slots=True)
class KernelEfficiency(Tabular):
    """Sums over ranks and the selected steps, ns. ``classes`` is class → ns; ``products`` is whether products ran on
    tensor cores (used, unused, vector, unknown) → ns; ``precision`` dtype → (ns of products, ns of the rest).

    ``rooflines`` stand beside ``shapes`` one for one. Of ``chain_totals`` the last three are what fusing all chains
    would save: low, mid, high. ``roofline_ns`` is (time of the rows that have a roofline, their least time).
    """

    COLUMNS: ClassVar[Columns] = {
        "roofline_ns": ("with_roofline_ns", "at_roofline_ns"),
        "classes": "total_ns",
        "products": "total_ns",
        "precision": ("products_ns", "rest_ns"),
        "small": ("small_calls", "small_ns", "small_gaps_ns"),
        "small_operators": "total_ns",
        "chain_totals": (
            *("chain_count", "chain_kernels", "chains_ns"),
            *("chains_saved_low_ns", "chains_saved_mid_ns", "chains_saved_high_ns"),
        ),
    }

    basis: Literal["device", "host"]
    ranks: int
    device: str | None
    total_ns: int
    attributed_ns: int
    with_shapes_ns: int
    calls: int
    operators: tuple[OperatorTime, ...]
    outermost: tuple[OperatorTime, ...]
    shapes: tuple[ShapeTime, ...]
    rooflines: tuple[Roofline, ...]
    roofline_ns: tuple[int, int] | None
    classes: Mapping[str, int]
    products: Mapping[str, int]
    precision: Mapping[str, tuple[int, int]]
    product_kernels: tuple[ProductKernel, ...]
    small: tuple[int, int, int]
    small_operators: Mapping[str, int]
    chains: tuple[ChainTime, ...]
    chain_totals: ChainTotals
    attention: ScoreAttention | None
    gemms: tuple[GemmIssue, ...]


def reduce(scope: Scope) -> Part | None:
    """One rank's work, or None where nothing ran."""
    parts = []
    for rank, selected in scope.traced:
        work = attribute(rank, selected)
        if work is not None:
            parts.append(_part(group(work), _multiprocessors(rank)))
    return joined(parts, KEPT)


def _multiprocessors(rank: Rank) -> int | None:
    """As the source says, else as the device's datasheet does."""
    device = rank.devices[0] if rank.devices else None
    if device is None:
        return None
    if device.multiprocessors:
        return device.multiprocessors
    peaks = peaks_of(device.name)
    return peaks.multiprocessors if peaks is not None else None


def _part(grouped: Grouped, multiprocessors: int | None) -> Part:
    work = grouped.work
    on_device = work.basis == "device"
    products = product_rows(grouped) if on_device else ()
    states: dict[str, int] = {}
    for row in products:
        states[row.state] = states.get(row.state, 0) + row.ns
    chains, totals = chain_rows(grouped) if on_device else ((), NO_CHAINS)
    small, small_operators = small_rows(grouped) if on_device else ((0, 0, 0), {})
    labels = grouped.classes
    return Part(
        basis=work.basis,
        total_ns=int(work.ns.sum()),
        attributed_ns=int(work.ns[work.operator >= 0].sum()),
        calls=len(work.rows),
        with_shapes_ns=int(grouped.ns[grouped.shapes >= 0].sum()),
        operators=operator_rows(grouped, outermost=False),
        outermost=operator_rows(grouped, outermost=True),
        shapes=shape_rows(grouped, multiprocessors),
        classes={str(label): int(work.ns[labels == label].sum()) for label in set(labels.tolist())},
        products=states,
        precision=precision_of(grouped),
        product_kernels=products[:KEPT],
        small=small,
        small_operators=small_operators,
        chains=chains,
        chain_totals=totals,
        attention=score_attention(grouped) if on_device else None,
    )


def join(parts: Mapping[int, Part], whole: Whole) -> KernelEfficiency | str:
    """All ranks together, against the peaks of the device."""
    total = joined(parts.values())
    if total is None:
        return "no kernel and no operator was recorded; record with torch.profiler or take a deep window"
    hardware = whole.hardware
    flops_per_s, memory_bytes_per_s = _peaks_for(total, hardware)
    rooflines = tuple(roofline_of(row, flops_per_s, memory_bytes_per_s) for row in total.shapes)
    known = [
        (row.ns, one.least_ns)
        for row, one in zip(total.shapes, rooflines, strict=True)
        if one.least_ns is not None
    ]
    _say_what_is_missing(total, rooflines, whole)
    return KernelEfficiency(
        basis=total.basis,
        ranks=len(parts),
        device=hardware.name,
        total_ns=total.total_ns,
        attributed_ns=total.attributed_ns,
        with_shapes_ns=total.with_shapes_ns,
        calls=total.calls,
        operators=total.operators,
        outermost=total.outermost,
        shapes=total.shapes,
        rooflines=rooflines,
        roofline_ns=(sum(ns for ns, _ in known), sum(least for _, least in known)) if known else None,
        classes=total.classes,
        products=total.products,
        precision=total.precision,
        product_kernels=total.product_kernels,
        small=total.small,
        small_operators=total.small_operators,
        chains=total.chains,
        chain_totals=total.chain_totals,
        attention=total.attention,
        gemms=issues_of(tuple(zip(total.shapes, rooflines, strict=True)))[:MOST_ROWS],
    )


def _peaks_for(total: Part, hardware: Hardware) -> tuple[Mapping[str, float], float | None]:
    """Peaks of what the work ran on: operators timed on the host say nothing of an accelerator that they only fed."""
    if total.basis == "host" and hardware.name is not None and peaks_of(hardware.name) is not None:
        return {}, None
    return hardware.peak_flops_per_s, hardware.memory_bytes_per_s


def _say_what_is_missing(total: Part, rooflines: tuple[Roofline, ...], whole: Whole) -> None:
    if total.attributed_ns == 0 and total.basis == "device":
        whole.note(
            "kernels-without-operators",
            "info",
            "no kernel can be given to an operator: the trace has no operators, or kernels without launches",
        )
    elif not total.shapes:
        whole.note(
            "no-shapes",
            "info",
            "no operator's input shapes were recorded, so there is no roofline; profile with record_shapes=True",
        )
    above = [
        row
        for row, one in zip(total.shapes, rooflines, strict=True)
        if one.efficiency is not None and one.efficiency > 1
    ]
    if above:
        row = max(above, key=lambda row: row.ns)
        whole.note(
            "above-peak",
            "info",
            f"{len(above)} rows of shapes ran faster than the device's peak by direct counting, {row.operator} {row.shapes} "
            "first: a mask that skips work, a faster algorithm, or another device than was named",
        )


def to_json(result: KernelEfficiency) -> dict[str, Any]:
    """The contract's form; shares are of ``total_ns``."""
    calls, small_ns, gap_ns = result.small
    count, kernels, chain_ns, low, mid, high = result.chain_totals
    return {
        "basis": result.basis,
        "ranks": result.ranks,
        "device": result.device,
        "total_ns": result.total_ns,
        "attributed_ns": result.attributed_ns,
        "with_shapes_ns": result.with_shapes_ns,
        "calls": result.calls,
        "classes_ns": result.classes,
        "operators": [_operator(row) for row in result.operators],
        "outermost_operators": [_operator(row) for row in result.outermost],
        "shapes": [_shape(row, one) for row, one in zip(result.shapes, result.rooflines, strict=True)],
        "roofline_ns": None
        if result.roofline_ns is None
        else {"measured": result.roofline_ns[0], "least": result.roofline_ns[1]},
        "precision_ns": {
            name: {"products": products, "other": other}
            for name, (products, other) in result.precision.items()
        },
        "tensor_cores_ns": result.products,
        "product_kernels": [
            {
                "kernel": row.kernel,
                "dtype": row.dtype,
                "tensor_cores": row.state,
                "calls": row.calls,
                "total_ns": row.ns,
            }
            for row in result.product_kernels
        ],
        "small_kernels": {
            "calls": calls,
            "total_ns": small_ns,
            "gap_ns": gap_ns,
            "by_operator": result.small_operators,
        },
        "chains": {
            "count": count,
            "kernels": kernels,
            "total_ns": chain_ns,
            "saved_ns": {"low": low, "mid": mid, "high": high},
            "rows": [_chain(row) for row in result.chains],
        },
        "attention_by_hand": None if result.attention is None else _attention(result.attention),
        "gemm_issues": [_issue(row) for row in result.gemms],
    }


def _operator(row: OperatorTime) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "calls": row.calls,
        "kernels": row.kernels,
        "total_ns": row.ns,
        "backward_ns": row.backward_ns,
    }


def _shape(row: ShapeTime, one: Roofline) -> dict[str, Any]:
    return {
        "operator": row.operator,
        "shapes": row.shapes,
        "types": row.types,
        "kind": row.kind,
        "calls": row.calls,
        "kernels": row.kernels,
        "total_ns": row.ns,
        "flops": row.flops,
        "flops_from": None if row.flops is None else "profiler" if row.counted else "shapes",
        "bytes": row.bytes,
        "dtype": row.dtype,
        "tensor_cores": row.tensor_cores,
        "kernel": row.kernel,
        "flops_per_s": one.flops_per_s,
        "bytes_per_s": one.bytes_per_s,
        "bound": one.bound,
        "efficiency": one.efficiency,
        "gain_ns": one.gain_ns,
    }


def _attention(one: ScoreAttention) -> dict[str, Any]:
    return {
        "scores": one.score,
        "dtype": one.dtype,
        "forward_calls": one.forward,
        "backward_calls": one.backward,
        "products_ns": one.products_ns,
        "memory_bound_ns": one.moving_ns,
        "flops": one.flops,
    }


def _chain(row: ChainTime) -> dict[str, Any]:
    low, mid, high = row.saved_ns
    return {
        "operators": row.operators,
        "count": row.count,
        "kernels": row.kernels,
        "total_ns": row.ns,
        "saved_ns": {"low": low, "mid": mid, "high": high},
        "known_share": row.known_share,
    }


def _issue(row: GemmIssue) -> dict[str, Any]:
    low, mid, high = row.waste_ns
    return {
        "operator": row.operator,
        "shapes": row.shapes,
        **asdict(row.product),
        "dtype": row.dtype,
        "kernel": row.kernel,
        "calls": row.calls,
        "total_ns": row.ns,
        "why": row.why,
        "misaligned": row.fit.misaligned,
        "pad_to": row.pad,
        "tile": row.fit.tile,
        "tile_use": row.fit.tile_use,
        "waves": row.fit.waves,
        "wave_use": row.fit.wave_use,
        "waste_ns": {"low": low, "mid": mid, "high": high},
        "flops_per_s": row.flops_per_s,
        "peers_flops_per_s": row.peers_flops_per_s,
    }
