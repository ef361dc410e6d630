"""``memory-headroom``: memory lies idle that could buy speed."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.units import duration, percent, size

from ._facts import Facts
from ._gain import predict, worth_it
from ._memory import Fill, fullest
from .accumulation import micro_batches_of

__all__ = ["ID", "KIND", "find"]

ID = "memory-headroom"
KIND: Literal["opportunity"] = "opportunity"

#: Peak over capacity below which there is headroom.
SHARE = 0.60
#: What a bigger batch may fill.
TARGET_SHARE = 0.85


def find(facts: Facts) -> Finding | None:
    """A device far from full, and something slow that memory can pay off."""
    fill = fullest(facts)
    if fill is None or fill.kind != "device" or fill.share > SHARE or fill.retries or facts.trains is False:
        return None
    recommendation = _keep_activations(facts) or _bigger_micro_batch(facts, fill)
    if recommendation is None or not worth_it(facts, recommendation.predicted):
        return None
    prediction = recommendation.predicted
    assert prediction is not None and prediction.gain_ns is not None and facts.step_ns
    free = fill.capacity_bytes - fill.used_bytes
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{size(free)} of device memory ({percent(1 - fill.share)}) never used could buy {duration(prediction.gain_ns.mid)} a {facts.unit}",
        evidence={
            "rank": fill.rank,
            "peak_bytes": fill.used_bytes,
            "capacity_bytes": fill.capacity_bytes,
            "free_bytes": free,
            **prediction.inputs,
        },
        recommendation=recommendation,
        severity=prediction.gain_ns.mid / facts.step_ns,
    )


def _keep_activations(facts: Facts) -> Recommendation | None:
    """Recomputation was on: what it cost is executed less counted FLOPs, exactly."""
    counted, executed = facts.about("flops", "counted"), facts.about("flops", "executed")
    mode = facts.about("configuration", "checkpointing", "mode")
    if not counted or not executed or mode in (None, "none") or executed <= counted:
        return None
    forward = facts.part(lambda rank: rank.phase("forward"))
    backward = facts.part(lambda rank: rank.phase("backward"))
    if forward is None or backward is None:
        return None
    compute_ns = facts.step_part_ns(forward.share + backward.share)
    again = 1 - counted / executed
    return Recommendation(
        change={"checkpointing.mode": "none"},
        why="Activations are recomputed though they would fit: keep them.",
        numerics="unchanged, dropout included",
        predicted=predict(
            facts,
            compute_ns,
            (again * 0.7, again, again * 1.1),
            "(forward + backward) × (1 − model FLOPs ÷ executed FLOPs)",
            {"counted_flops": float(counted), "executed_flops": float(executed)},
        ),
    )


def _bigger_micro_batch(facts: Facts, fill: Fill) -> Recommendation | None:
    """Fewer, larger micro-batches: what every micro-batch pays again is the host's idle time."""
    steps = micro_batches_of(facts)
    if steps is None or steps < 2:
        return None
    idle = facts.part(lambda rank: rank.window(lambda b: b.idle.host + b.idle.dependency))
    if idle is None:
        return None
    times = min(steps, max(int(TARGET_SHARE / max(fill.share, 0.01)), 1))
    while times > 1 and steps % times:
        times -= 1
    if times < 2:
        return None
    prediction: Prediction | None = predict(
        facts,
        facts.step_part_ns(idle.share),
        tuple((1 - 1 / times) * share for share in (0.5, 0.8, 1.0)),  # type: ignore[arg-type]
        "idle time between launches × (1 − micro-batches after ÷ before)",
        {"micro_batches": steps, "times_larger": times},
    )
    # The key cuts a batch of the loader; where the loop gathers several batches, the loop is what to change.
    cut = facts.about("configuration", "accumulation", "steps") == steps
    return Recommendation(
        change={"accumulation.steps": steps // times} if cut else {},
        why=f"Make the micro-batch {times} times larger and accumulate as much less: the global batch stays."
        if cut
        else f"Let the loader give {times} times the batch and accumulate {steps // times} instead of {steps} of them: "
        "the global batch stays.",
        numerics="the same samples in each update; sums are reordered",
        predicted=prediction,
    )
