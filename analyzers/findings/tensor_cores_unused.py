"""``tensor-cores-unused``: products run on ordinary arithmetic units although the device has tensor cores.

The border to ``low-precision-unused``: that one says that a run in fp32 should be in bf16. This one speaks of
products that are in half precision already and yet miss the tensor cores, and of fp32 products that TF32 would
put there where the other one is silent (inference, or fp32 in a smaller part of the run).
"""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.units import duration, percent

from . import low_precision_unused
from ._facts import Facts
from ._gain import faster, predict, worth_it

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "tensor-cores-unused"
KIND: Literal["opportunity"] = "opportunity"

#: Share of the products' time off the tensor cores from which on this speaks.
UNUSED_SHARE = 0.1
#: Share on the tensor cores from which on the run is said not to be bound by this.
USED_SHARE = 0.9
#: Half-precision products on tensor cores are this much faster than off them: low, mid, high. The peaks differ eight-
#: to sixteenfold (A100: 312 against 39 TFLOP/s in bf16), of which shapes that missed them reach little.
HALF_FASTER = (1.5, 2.5, 5.0)
_HALF = ("bf16", "fp16", "fp8")


def _study(facts: Facts) -> KernelEfficiency | None:
    result = result_of(facts.analysis, "kernel_efficiency", KernelEfficiency)
    peaks = facts.analysis.hardware.peak_flops_per_s
    has_tensor_cores = any(name in peaks for name in ("bf16", "fp16", "tf32"))
    return result if result is not None and result.products and has_tensor_cores else None


def _tf32_faster(facts: Facts) -> tuple[float, float, float] | None:
    """Speed-up of fp32 products in TF32 on this device; None where it has none or another rule offers more."""
    peaks = facts.analysis.hardware.peak_flops_per_s
    before, after = peaks.get("fp32"), peaks.get("tf32")
    if not before or not after or after <= before or low_precision_unused.find(facts) is not None:
        return None
    low, mid, high = (max(after / before * part, 1.0) for part in low_precision_unused.REACHED)
    return low, mid, high


def find(facts: Facts) -> Finding | None:
    """Enough of the products' time is off the tensor cores, and being on them would pay."""
    result = _study(facts)
    busy = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if result is None or busy is None:
        return None
    unused = [row for row in result.product_kernels if row.state == "unused"]
    half = sum(row.ns for row in unused if row.dtype in _HALF)
    tf32 = _tf32_faster(facts)
    full = sum(row.ns for row in unused if row.dtype == "fp32") if tf32 is not None else 0
    total = sum(result.products.values())
    if total <= 0 or half + full < UNUSED_SHARE * total:
        return None
    scale = busy.share / max(result.total_ns, 1)
    stake_ns = facts.step_part_ns(scale * (half + full))
    saved = [
        (half * of_half + full * of_full) / (half + full)
        for of_half, of_full in zip(faster(*HALF_FASTER), faster(*(tf32 or (1.0, 1.0, 1.0))), strict=True)
    ]
    prediction = predict(
        facts,
        stake_ns,
        (saved[0], saved[1], saved[2]),
        "products off the tensor cores × (1 − 1 ÷ speed-up); fp32 by the device's TF32 peak, of which products reach a part",
        {"half_precision_ns": half, "fp32_ns": full, "saved_mid": round(saved[1], 3)},
    )
    if prediction is None or prediction.gain_ns is None or not worth_it(facts, prediction):
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{percent((half + full) / total)} of the products' time is off the tensor cores: "
        f"{duration(stake_ns)} ({percent(stake_ns / (facts.step_ns or 1))}) of the {facts.unit}",
        evidence={
            "products": {f"{state}_ns": ns for state, ns in result.products.items()},
            "half_precision_unused_ns": half,
            "fp32_unused_ns": full,
            "kernels": [row.kernel[:80] for row in unused if row.dtype in _HALF or full][:3],
        },
        recommendation=_recommendation(half, full, prediction),
        severity=prediction.gain_ns.mid / (facts.step_ns or 1),
    )


def _recommendation(half: int, full: int, prediction: Prediction) -> Recommendation:
    """What to do about products in half precision, and in fp32, of which either may be none."""
    advice = []
    if full:
        advice.append("Let fp32 products run in TF32 on the tensor cores.")
    if half:
        advice.append(
            "Half-precision products miss the tensor cores: make inner sizes multiples of 8, use channels-last "
            "convolutions, and let the library search (torch.backends.cudnn.benchmark)."
        )
    return Recommendation(
        change={"precision.tf32": True} if full else {},
        why=" ".join(advice),
        numerics="TF32 rounds inputs of products to 10 bits of mantissa; sums stay in fp32"
        if full
        else "unchanged",
        predicted=prediction,
    )


def healthy(facts: Facts) -> str | None:
    """The share on tensor cores, where it is high."""
    result = _study(facts)
    if result is None:
        return None
    total = sum(result.products.values())
    share = result.products.get("used", 0) / total if total else 0.0
    return f"Tensor cores: {percent(share)} of the products' time uses them" if share >= USED_SHARE else None
