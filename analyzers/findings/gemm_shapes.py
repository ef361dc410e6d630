"""``gemm-shapes``: products whose shape fits the device badly: rows that are not aligned, edge tiles, a half-empty wave."""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies._gemm_waste import GemmIssue
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.units import duration, percent

from ._facts import Facts
from ._gain import predict, worth_it

__all__ = ["ID", "KIND", "find"]

ID = "gemm-shapes"
KIND: Literal["opportunity"] = "opportunity"

#: Issues that are named; a change mends one shape at a time. What counts as an issue, and what each would gain, is in
#: ``studies/_gemm_waste.py``.
MOST_NAMED = 3


def find(facts: Facts) -> Finding | None:
    """Products that would be faster in another shape, worth the opportunity's share of the step together."""
    result = result_of(facts.analysis, "kernel_efficiency", KernelEfficiency)
    busy = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if result is None or busy is None or not result.gemms or result.basis != "device":
        return None
    stake = sum(issue.ns for issue in result.gemms)
    # Of the compute that the window saw; work on several streams counts in proportion.
    stake_ns = facts.step_part_ns(busy.share * stake / max(result.total_ns, 1))
    low, mid, high = (sum(issue.waste_ns[column] for issue in result.gemms) / stake for column in range(3))
    prediction = predict(
        facts,
        stake_ns,
        (low, mid, high),
        "products that fit badly × what a shape that fits saves: to the rate of this run's aligned products, "
        "or the share of tiles and waves that nobody asked for",
        {"products": len(result.gemms), "saved_mid": round(mid, 3)},
    )
    if prediction is None or prediction.gain_ns is None or not worth_it(facts, prediction):
        return None
    worst = result.gemms[0]
    product = worst.product
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{len(result.gemms)} product shape{'s' if len(result.gemms) > 1 else ''} "
        f"({product.m}×{product.n}×{product.k} first) fit the device badly: {duration(stake_ns)} "
        f"({percent(stake_ns / (facts.step_ns or 1))}) of the {facts.unit}",
        evidence={
            "products_ns": stake_ns,
            "shapes": [_evidence(issue) for issue in result.gemms[:MOST_NAMED]],
        },
        recommendation=Recommendation(
            change={},
            why=" ".join(_advice(issue) for issue in result.gemms[:MOST_NAMED]),
            numerics="unchanged where what is padded is masked out; another size of layer or batch is another model or step",
            predicted=prediction,
        ),
        severity=prediction.gain_ns.mid / (facts.step_ns or 1),
    )


def _evidence(issue: GemmIssue) -> dict[str, Any]:
    product = issue.product
    return {
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "batch": product.batch,
        "dtype": issue.dtype,
        "why": list(issue.why),
        "calls": issue.calls,
        "tile_use": round(issue.fit.tile_use, 3),
        "wave_use": round(issue.fit.wave_use, 3),
        "kernel": issue.kernel[:80],
    }


def _advice(issue: GemmIssue) -> str:
    """What to change about one product, in a sentence."""
    product, fit = issue.product, issue.fit
    shape = f"{product.m}×{product.n}×{product.k}"
    if issue.pad:
        sizes = ", ".join(
            f"{name} from {getattr(product, name):,} to {size:,}" for name, size in issue.pad.items()
        )
        return f"Pad {sizes} in {shape} (a vocabulary or a hidden size), so that rows are whole vectors."
    if "tile" in issue.why and fit.tile is not None:
        return f"In {shape} only {percent(fit.tile_use)} of the {fit.tile[0]}×{fit.tile[1]} tiles is asked for: take sizes that are multiples."
    waves = f"{fit.waves:.2f}" if fit.waves is not None else "a part of a"
    return f"{shape} runs {waves} waves and leaves the last one half empty: another batch size fills it."
