"""``attention-unfused``: attention by hand, which writes its scores to memory and reads them back."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies._score_attention import ScoreAttention
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.units import duration, percent, size

from ._facts import Facts
from ._gain import predict, worth_it

__all__ = ["ID", "KIND", "find"]

ID = "attention-unfused"
KIND: Literal["opportunity"] = "opportunity"

#: Of the device's dense peak, what fused attention reaches: low, mid, high. FlashAttention-2 reaches 50 to 73 % on an
#: A100 (Dao 2023) and 35 to 40 % of an H100's, FlashAttention-3 up to 75 % there (Shah et al. 2024); short sequences less.
REACHED = (0.2, 0.4, 0.6)
#: Of the memory-bound work on scores, what goes away where the device's peak is unknown.
UNKNOWN_SAVED = (0.3, 0.6, 0.9)


def _predict(facts: Facts, attention: ScoreAttention, per_ns: float) -> Prediction | None:
    """Gain per step; ``per_ns`` turns the study's time into the step's."""
    now = attention.products_ns + attention.moving_ns
    peak = facts.analysis.hardware.peak_flops_per_s.get(attention.dtype or "")
    if peak:
        fused = [attention.flops / (peak * part) * 1e9 for part in REACHED]
        low, mid, high = (max(1 - ns / now, 0.0) for ns in fused)
        formula = "attention now − its operations ÷ (peak × what fused kernels reach)"
    else:
        low, mid, high = (attention.moving_ns / now * part for part in UNKNOWN_SAVED)
        formula = "memory-bound work on scores × what goes away"
    inputs = {
        "forward_calls": attention.forward,
        "backward_calls": attention.backward,
        "saved_mid": round(mid, 3),
    }
    return predict(facts, now * per_ns, (low, mid, high), formula, inputs)


def find(facts: Facts) -> Finding | None:
    """Scores pass through memory, and a fused kernel would be worth the opportunity's share of the step."""
    result = result_of(facts.analysis, "kernel_efficiency", KernelEfficiency)
    busy = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if result is None or busy is None or result.attention is None or not facts.step_ns:
        return None
    attention = result.attention
    # Of the compute that the window saw; work on several streams counts in proportion.
    per_ns = busy.share * facts.step_ns / max(result.total_ns, 1)
    prediction = _predict(facts, attention, per_ns)
    if prediction is None or prediction.gain_ns is None or not worth_it(facts, prediction):
        return None
    stake_ns = round((attention.products_ns + attention.moving_ns) * per_ns)
    batch, queries, keys = attention.score
    stored = batch * queries * keys * (2 if attention.dtype in ("bf16", "fp16") else 4)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Attention by hand takes {duration(stake_ns)} ({percent(stake_ns / facts.step_ns)}) of the {facts.unit}: "
        f"its scores ({batch}×{queries}×{keys}, {size(stored)}) pass through memory",
        evidence={
            "scores": list(attention.score),
            "scores_bytes": stored,
            "products_ns": round(attention.products_ns * per_ns),
            "memory_bound_ns": round(attention.moving_ns * per_ns),
            "forward_calls": attention.forward,
            "backward_calls": attention.backward,
        },
        recommendation=Recommendation(
            change={"compute.attention": "sdpa"},
            why="A fused kernel never stores the scores: torch.nn.functional.scaled_dot_product_attention picks one "
            "(is_causal=True instead of a mask where that is what the mask says). It also frees what the backward pass keeps of them.",
            numerics="reordered floating-point operations: losses agree to rounding; dropout masks differ",
            predicted=prediction,
        ),
        severity=prediction.gain_ns.mid / facts.step_ns,
    )
