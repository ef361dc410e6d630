"""``pipeline-bubble``: stages have nothing to compute, because the pipeline fills and drains, or for more than that."""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies.pipeline import Pipeline
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
#: Bubble beyond the schedule's own and the stages' unevenness from which on it is told by itself, and what of it
#: may be got back.
EXCESS = 0.15
GOT_BACK = (0.2, 0.5, 0.8)
#: A mean bubble below this is not worth a word either way.
SMALL_BUBBLE = 0.10

_FILLING = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def find(facts: Facts) -> Finding | None:
    """More micro-batches, or nothing in the way between them, would save at least 5 % of the step; the larger wins."""
    result = evident_pipeline(facts)
    if result is None or result.ideal_ratio is None:
        return None
    found = [one for one in (_filling(facts, result), _beyond(facts, result)) if one is not None]
    return max(found, key=lambda one: one.severity, default=None)


def _evidence(result: Pipeline) -> dict[str, Any]:
    return {
        "schedule": result.schedule,
        "stages": len(result.stages),
        "microbatches": result.microbatches,
        "bubble_share": round(result.bubble_ratio, 4),
        "ideal_share": None if result.ideal_ratio is None else round(result.ideal_ratio, 4),
        "slowest_rank": result.slowest,
    }


def _share(facts: Facts, prediction: Prediction | None) -> float | None:
    """The mid gain as a share of the step, when it is worth it."""
    if (
        prediction is None
        or prediction.gain_ns is None
        or not facts.step_ns
        or not worth_it(facts, prediction)
    ):
        return None
    return prediction.gain_ns.mid / facts.step_ns


def _lead(result: Pipeline) -> str:
    return (
        f"Stages of the pipeline have nothing to compute for {percent(result.bubble_ratio)} of an iteration"
    )


def _filling(facts: Facts, result: Pipeline) -> Finding | None:
    if result.schedule not in _FILLING:
        return None
    p, m, v = len(result.stages), result.microbatches, result.chunks
    computes = sorted(stage.compute_ns for stage in result.stages)
    compute = computes[len(computes) // 2]
    filling = compute * (p - 1) / (v * m)  # what the formula says an iteration loses to filling and draining
    saved = 1 - 1 / TIMES
    prediction = predict(
        facts,
        per_step(facts, result, filling),
        (saved * KEPT[0], saved * KEPT[1], saved * KEPT[2]),
        "compute × (p − 1) ÷ (chunks × micro-batches) × (1 − 1 ÷ times as many), at the same batch",
        {"stages": p, "microbatches": m, "chunks": v, "compute_ns": compute, "times": TIMES},
        change={"parallel.microbatches": TIMES * m},
    )
    share = _share(facts, prediction)
    if share is None:
        return None
    lower = (p - 1) / (TIMES * v * m + p - 1)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{_lead(result)} ({result.schedule}, {p} stages, {m} micro-batches); {TIMES * m} micro-batches would lower the "
        f"schedule's ideal to {percent(lower)}",
        evidence={**_evidence(result), "ideal_share_with_twice_the_microbatches": round(lower, 4)},
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


def _beyond(facts: Facts, result: Pipeline) -> Finding | None:
    assert result.ideal_ratio is not None
    computes = [stage.compute_ns for stage in result.stages]
    uneven = (max(computes) - sum(computes) / len(computes)) / result.iteration_ns
    excess = result.bubble_ratio - result.ideal_ratio - uneven
    if excess < EXCESS:
        return None
    prediction = predict(
        facts,
        per_step(facts, result, excess * result.iteration_ns),
        GOT_BACK,
        "(bubble − the schedule's ideal − what uneven stages explain) × share that may be got back",
        {"bubble_share": round(result.bubble_ratio, 4), "ideal_share": round(result.ideal_ratio, 4)},
    )
    share = _share(facts, prediction)
    if share is None:
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{_lead(result)}, where {result.schedule} itself leaves {percent(result.ideal_ratio) if result.ideal_ratio else 'none'}: messages between stages, or the "
        "hosts, hold up the rest",
        evidence={**_evidence(result), "beyond_the_ideal_share": round(excess, 4)},
        recommendation=Recommendation(
            change={},
            why="Look at what lies between two micro-batches: post receives ahead and let sends run beside computing "
            "(batch_isend_irecv, Megatron's overlap_p2p_communication), put neighbouring stages on the faster links, and make "
            "micro-batches larger where the host launches more slowly than the device computes.",
            numerics="unchanged",
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
