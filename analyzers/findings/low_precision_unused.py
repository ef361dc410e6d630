"""``low-precision-unused``: matrix products run in fp32 on hardware that is faster in bf16."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts, Part, RankFacts
from ._gain import faster, predict, worth_it
from ._kinds import by_class, classify, work

__all__ = ["ID", "KIND", "find"]

ID = "low-precision-unused"
KIND: Literal["opportunity"] = "opportunity"

#: Share of the matrix products' time that must be in fp32 before this speaks.
FP32_SHARE = 0.5
#: Of the compiler's or datasheet's ratio of peaks, what real products reach: low, mid, high. Large
#: products reach 80 % of peak on H100 and 87 % on A100 (measured maximum matmul), small ones far less.
REACHED = (0.2, 0.35, 0.7)
#: Where the device's bf16 rate is unknown. A CPU without bf16 units gains nothing, one with AMX 6.4
#: times on a 1024³ product; accelerators: mixed precision is quoted at 1.5 to 3 times.
UNKNOWN_CPU = (1.0, 1.4, 3.0)
UNKNOWN_ACCELERATOR = (1.5, 2.0, 3.0)
#: Share of forward and backward that products take where no operator was seen: 35 % after the change
#: to bf16 in the sample GPT, so well above half before it.
ASSUMED_MATMUL_SHARE = 0.5

#: Of the elementwise time between products, what half the bytes save: low, mid, high. Autocast runs part of it
#: in fp32 all the same; memory-bound work on half the bytes takes half the time at best.
ELEMENTWISE_SAVED = (0.0, 0.15, 0.5)

#: On a CPU, products shorter than this on average are calls rather than arithmetic: autocast's casts cost more
#: calls than bf16 saves.
SHORT_PRODUCT_NS = 50_000

_FULL = ("float32", "torch.float32", "fp32", "Float", "float", "f32")


def _fp32_share(facts: Facts, rank: RankFacts) -> float | None:
    """Share of the products' time in fp32 on this rank; None when nothing tells."""
    dtypes = rank.result.summary.dtypes
    if (total := sum(dtypes.values())) > 0:
        return sum(ns for dtype, ns in dtypes.items() if dtype in _FULL) / total
    precision = rank.metadata.get("precision")
    if not isinstance(precision, dict) or precision.get("parameter_dtype") is None:
        return None
    full = precision["parameter_dtype"] in _FULL and precision.get("autocast_dtype") in (None, *_FULL)
    return 1.0 if full else 0.0


def _matmul_part(rank: RankFacts) -> Part | None:
    """Share of the step in matrix products: as seen in a trace, else assumed of forward and backward."""
    breakdown = rank.breakdown
    rows = work(rank.result.summary)
    if breakdown is not None and rows:
        seen = sum(row.total_ns for row in rows)
        products = by_class(rows).get("matmul", 0)
        if seen > 0:
            # Of compute, not of the window: names overlap when streams do.
            return Part(products / seen * breakdown.compute_ns / breakdown.window_ns, "breakdown", rank.rank)
    forward, backward = rank.phase("forward"), rank.phase("backward")
    if forward is None or backward is None:
        return None
    return Part(ASSUMED_MATMUL_SHARE * (forward.share + backward.share), "assumed", rank.rank)


def _elementwise_part(rank: RankFacts) -> Part | None:
    """Share of the step in elementwise work, where operators or kernels were seen."""
    breakdown = rank.breakdown
    rows = work(rank.result.summary)
    seen = sum(row.total_ns for row in rows)
    if breakdown is None or seen <= 0:
        return None
    elementwise = by_class(rows).get("elementwise", 0)
    return Part(elementwise / seen * breakdown.compute_ns / breakdown.window_ns, "breakdown", rank.rank)


def _products_are_short(facts: Facts) -> bool:
    """Whether a CPU's products are too short for their precision to matter; False where none was seen."""
    products = [
        row for rank in facts.ranks for row in work(rank.result.summary) if classify(row.name) == "matmul"
    ]
    calls = sum(row.calls for row in products)
    return (
        not facts.on_accelerator
        and calls > 0
        and sum(row.total_ns for row in products) < SHORT_PRODUCT_NS * calls
    )


def _low(facts: Facts) -> str:
    """The low precision to use: bf16, or fp16 where only that is fast (V100, T4)."""
    peaks = facts.analysis.hardware.peak_flops_per_s
    return "fp16" if "fp16" in peaks and "bf16" not in peaks else "bf16"


def _speed_up(facts: Facts) -> tuple[tuple[float, float, float], str]:
    peaks = facts.analysis.hardware.peak_flops_per_s
    name = _low(facts)
    tf32 = facts.about("precision", "float32_matmul") in ("high", "medium") and "tf32" in peaks
    before, after = peaks.get("tf32" if tf32 else "fp32"), peaks.get(name)
    if before and after:
        provenance = facts.analysis.hardware.provenance
        measured = any("measured" in str(source) for source in provenance.values())
        # A calibrated peak is a product that really ran: most of its ratio is within reach.
        reached = (0.5, 0.7, 1.0) if measured else REACHED
        low, mid, high = (max(after / before * share, 1.0) for share in reached)
        return (
            low,
            mid,
            high,
        ), f"{name} peak ÷ {'tf32' if tf32 else 'fp32'} peak, as far as products reach it"
    if facts.on_accelerator:
        return UNKNOWN_ACCELERATOR, "mixed precision as published, 1.5 to 3 times"
    return UNKNOWN_CPU, "unmeasured CPU, 1 to 3 times: trine hardware --calibrate makes this sure"


def _recommendation(name: str, prediction: Prediction | None) -> Recommendation:
    half = name == "fp16"
    return Recommendation(
        change={"precision.dtype": name, **({"precision.loss_scale": "auto"} if half else {})},
        why=f"Run products in {name} under autocast; parameters and the optimizer stay in fp32."
        + (" This device has no fast bf16." if half else ""),
        numerics="losses stay within 6e-4 of fp32 over 20 steps; the loss is scaled, and steps that overflow are skipped"
        if half
        else "losses stay within 2e-3 of fp32 over 20 steps; no loss scaling is needed",
        predicted=prediction,
    )


def find(facts: Facts) -> Finding | None:
    """Products are mostly fp32 and bf16 would save at least the opportunity's share of the step."""
    if facts.trains is False:
        return None
    fp32 = [share for rank in facts.ranks if (share := _fp32_share(facts, rank)) is not None]
    part = facts.part(_matmul_part)
    if not fp32 or sorted(fp32)[(len(fp32) - 1) // 2] < FP32_SHARE or part is None:
        return None
    share = sorted(fp32)[(len(fp32) - 1) // 2]
    if _products_are_short(facts):
        return None
    speed_up, source = _speed_up(facts)
    stake_ns = facts.step_part_ns(part.share * share)
    elementwise = facts.part(_elementwise_part)
    moved_ns = facts.step_part_ns(elementwise.share * share) if elementwise is not None else 0
    saved = [
        (stake_ns * of_products + moved_ns * of_elementwise) / ((stake_ns + moved_ns) or 1)
        for of_products, of_elementwise in zip(faster(*speed_up), ELEMENTWISE_SAVED, strict=True)
    ]
    prediction = predict(
        facts,
        stake_ns + moved_ns,
        (saved[0], saved[1], saved[2]),
        f"matrix products × (1 − 1 ÷ speed-up) + elementwise work × what half the bytes save; speed-up: {source}",
        {
            "matmul_share": round(part.share, 4),
            "elementwise_share": round(elementwise.share, 4) if elementwise is not None else 0.0,
            "fp32_share": round(share, 4),
            "speed_up_mid": speed_up[1],
            "elementwise_saved_mid": ELEMENTWISE_SAVED[1],
        },
        change={"precision.dtype": _low(facts)},
    )
    if not worth_it(facts, prediction):
        return None
    assumed = part.basis == "assumed"
    about = "about " if assumed else ""
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Matrix products run in fp32: {about}{duration(stake_ns)} ({percent(part.share * share)}) of the {facts.unit} that {_low(facts)} shortens",
        evidence={
            "fp32_share_of_products": round(share, 4),
            "matmul_share_of_step": round(part.share, 4),
            "matmul_share_is": "assumed" if assumed else "measured",
            "precision": facts.about("precision"),
            "speed_up": list(speed_up),
        },
        recommendation=_recommendation(_low(facts), prediction),
        severity=(prediction.gain_ns.mid / facts.step_ns)
        if prediction and prediction.gain_ns and facts.step_ns
        else 0.0,
    )
