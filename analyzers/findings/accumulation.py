"""``accumulation``: gradients are averaged over ranks more often than updates need.

``accumulation.steps`` alone does not mend it: it cuts the batch that the loader gives, and one batch sends
its gradients once either way. What saves is fewer sendings for the same samples: a larger batch from
the loader, cut, or ``no_sync`` in a loop that takes several batches. So the change is said in words.
"""

from __future__ import annotations

import math
from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.units import duration, percent

from . import exposed_communication
from ._facts import Facts
from ._gain import predict, worth_it
from ._waits import split_exposed

__all__ = ["ID", "KIND", "find", "micro_batches_of"]

ID = "accumulation"
KIND: Literal["opportunity"] = "opportunity"

#: Gradient bytes on the wire per step over gradient bytes, from which on every micro-batch synchronises.
TIMES_SENT = 1.5
#: Micro-batches suggested where there is one now.
SUGGESTED = 4


def micro_batches_of(facts: Facts) -> int | None:
    """Forward and backward passes of a step: batches that the loop took, times the parts the engine cut each into."""
    taken = facts.about("accumulation")
    cut = facts.about("configuration", "accumulation", "steps")
    known = [value for value in (taken, cut) if isinstance(value, int) and value >= 1]
    return math.prod(known) if known else None


def times_sent(facts: Facts) -> float | None:
    """How often a step sends the gradients: all-reduced bytes per step over gradient bytes."""
    gradients = facts.about("model", "gradient_bytes")
    rows = [row for row in facts.analysis.collectives if "reduce" in row.op and row.bytes is not None]
    steps = facts.analysis.source.steps
    if not isinstance(gradients, int) or gradients <= 0 or not rows or steps <= 0:
        return None
    return sum(row.bytes or 0 for row in rows) / steps / gradients


def find(facts: Facts) -> Finding | None:
    """Exposed transfers that fewer synchronisations would save."""
    split = split_exposed(facts)
    if split is None or not split.transfer or facts.world < 2 or facts.trains is False:
        return None
    if facts.beyond_data:  # activations travel too, and are no gradients that could be sent less often
        return None
    exposed_ns = facts.step_part_ns(split.transfer)
    micro_batches, sent = micro_batches_of(facts), times_sent(facts)
    if micro_batches is not None and micro_batches > 1:
        return _each_micro_batch(facts, exposed_ns, micro_batches, sent)
    # One micro-batch: only where communication is a fault is a larger global batch worth naming.
    if micro_batches != 1 or split.transfer < exposed_communication.threshold(facts):
        return None
    prediction = predict(
        facts,
        exposed_ns,
        tuple((1 - 1 / SUGGESTED) * share for share in (0.6, 0.9, 1.0)),  # type: ignore[arg-type]
        "exposed transfer × (1 − 1 ÷ micro-batches), at equal samples",
        {"micro_batches": SUGGESTED, "transfer_share": round(split.transfer, 4)},
    )
    if not worth_it(facts, prediction):
        return None
    return _finding(
        facts,
        f"Gradients are sent with every batch: sending them once for {SUGGESTED} would save, at equal samples, {{gain}} of each",
        prediction,
        Recommendation(
            change={},
            why=f"Let the loader give {SUGGESTED} times the batch and set accumulation.steps = {SUGGESTED}, which cuts it "
            "into passes of today's size and sends gradients once (accumulation.steps alone cuts today's batch, which "
            f"saves memory but sends as often); in a loop of your own, step at every {SUGGESTED}th batch and leave the "
            "average out before it (no_sync).",
            numerics=f"{SUGGESTED} times the global batch trains differently: re-tune the learning rate and its schedule",
            predicted=prediction,
        ),
        {"times_sent": sent, "micro_batches": 1},
    )


def _each_micro_batch(
    facts: Facts, exposed_ns: int, micro_batches: int, sent: float | None
) -> Finding | None:
    if sent is None or sent < TIMES_SENT:
        return None
    saved = 1 - 1 / min(sent, micro_batches)
    prediction = predict(
        facts,
        exposed_ns,
        (saved * 0.6, saved * 0.9, saved),
        "exposed transfer × (1 − 1 ÷ times the gradients are sent)",
        {"times_sent": round(sent, 2), "micro_batches": micro_batches},
    )
    if not worth_it(facts, prediction):
        return None
    return _finding(
        facts,
        f"Gradients are sent {sent:.1f} times a step, though one update needs them once: {{gain}} of each",
        prediction,
        Recommendation(
            change={},
            why="Leave the average out on all micro-batches but the last: DistributedDataParallel's no_sync() around them, "
            f"or the whole batch to engine.train_step with accumulation.steps = {micro_batches}.",
            numerics="unchanged but for the order of sums",
            predicted=prediction,
        ),
        {"times_sent": round(sent, 3), "micro_batches": micro_batches},
    )


def _finding(
    facts: Facts,
    title: str,
    prediction: Prediction | None,
    recommendation: Recommendation,
    evidence: dict[str, float | int | None],
) -> Finding:
    assert prediction is not None and prediction.gain_ns is not None and facts.step_ns
    share = prediction.gain_ns.mid / facts.step_ns
    gain = f"{duration(prediction.gain_ns.mid)} ({percent(share)})"
    return Finding(
        ID,
        KIND,
        f"{title.format(gain=gain)} {facts.unit}",
        {**evidence, **prediction.inputs},
        recommendation,
        share,
    )
