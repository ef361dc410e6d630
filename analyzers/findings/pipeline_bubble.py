"""``pipeline-bubble``: stages wait for the pipeline to fill and to drain, and another schedule would wait less."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import percent

from ._facts import Facts
from ._gain import predict, worth_it
from ._pipelines import evident_pipeline, per_step

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "pipeline-bubble"
KIND: Literal["opportunity"] = "opportunity"

#: How many times the micro-batches, or the chunks, the advice is for.
TIMES = 2
#: Of the gain by formula: smaller micro-batches compute less efficiently and send more often.
KEPT = (0.4, 0.75, 1.0)
#: A mean bubble below this is not worth a word either way.
SMALL_BUBBLE = 0.10

_FILLING = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def find(facts: Facts) -> Finding | None:
    """More micro-batches would save at least 5 % of the step, by the schedule's own formula."""
    result = evident_pipeline(facts)
    if result is None or result.schedule not in _FILLING:
        return None
    p, m, v = len(result.stages), result.microbatches, result.chunks
    computes = sorted(stage.compute_ns for stage in result.stages)
    compute = computes[len(computes) // 2]
    filling = compute * (p - 1) / (v * m)  # what the formula says an iteration loses to filling and draining
    stake = per_step(facts, result, filling)
    saved = 1 - 1 / TIMES
    prediction = predict(
        facts,
        stake,
        (saved * KEPT[0], saved * KEPT[1], saved * KEPT[2]),
        "compute × (p − 1) ÷ (chunks × micro-batches) × (1 − 1 ÷ times as many), at the same batch",
        {"stages": p, "microbatches": m, "chunks": v, "compute_ns": compute, "times": TIMES},
    )
    if (
        prediction is None
        or not worth_it(facts, prediction)
        or prediction.gain_ns is None
        or not facts.step_ns
    ):
        return None
    share = prediction.gain_ns.mid / facts.step_ns
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Stages of the pipeline have nothing to compute for {percent(result.bubble_ratio)} of an iteration "
        f"({result.schedule}, {p} stages, {m} micro-batches); {TIMES * m} micro-batches would lower the schedule's "
        f"ideal to {percent((p - 1) / (TIMES * v * m + p - 1))}",
        evidence={
            "schedule": result.schedule,
            "stages": p,
            "microbatches": m,
            "bubble_share": round(result.bubble_ratio, 4),
            "ideal_share": None if result.ideal_ratio is None else round(result.ideal_ratio, 4),
            "ideal_share_with_twice_the_microbatches": round((p - 1) / (TIMES * v * m + p - 1), 4),
            "slowest_rank": result.slowest,
        },
        recommendation=Recommendation(
            change={"parallel.microbatches": TIMES * m},
            why=f"Cut the same batch into {TIMES * m} micro-batches of half the size. Where they are too small for that already, "
            f'{2 * v} chunks a rank save as much by the formula (parallel.schedule = "Interleaved1F1B", parallel.chunks = {2 * v}; '
            "twice the messages), and a schedule that fills the bubble with weight gradients saves up to all of it "
            '(parallel.schedule = "ZBVZeroBubble", parallel.chunks = 2).',
            numerics="unchanged but for the order of sums",
            predicted=prediction,
        ),
        severity=share,
    )


def healthy(facts: Facts) -> str | None:
    """The bubble, when it is small."""
    result = evident_pipeline(facts)
    if result is None or result.bubble_ratio >= SMALL_BUBBLE:
        return None
    return f"Pipeline: stages have nothing to compute for {percent(result.bubble_ratio)} of an iteration"
