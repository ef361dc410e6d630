"""``checkpoint-stalls``: training stands still while checkpoints are written."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Gain, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.goodput import Goodput
from trine.analyzers.units import count, duration, percent

from ._facts import Facts

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "checkpoint-stalls"
KIND: Literal["opportunity"] = "opportunity"

#: Share of the time between the first step and the last.
SHARE = 0.05
#: One may be a rehearsal.
LEAST_CHECKPOINTS = 2
#: Of the time that a checkpoint blocks, what asynchronous saving hides: all but the copy to the host (PyTorch's blog on
#: asynchronous checkpointing, 2024, reports 10 to 20 times less blocking on large models; small ones gain less).
SAVED = (0.4, 0.8, 0.95)


def find(facts: Facts) -> Finding | None:
    """Checkpoints between steps take more than the threshold."""
    found = result_of(facts.analysis, "goodput", Goodput)
    if found is None or found.checkpoints < LEAST_CHECKPOINTS or not found.steady_ns or not found.steps:
        return None
    share = found.checkpoint_ns / found.steady_ns
    if share < SHARE or SAVED[1] * share < SHARE:
        return None
    each, a_step = found.checkpoint_ns // found.checkpoints, found.checkpoint_ns / found.steps
    mean = round(found.steady_ns / found.steps)
    low, mid, high = (round(a_step * saved) for saved in SAVED)
    asynchronous = all(name.endswith("async_save") for name in found.checkpoint_names)
    why = (
        "Save less often, or to a faster disk: what blocks is the copy to the host."
        if asynchronous
        else "Save with torch.distributed.checkpoint.async_save, which blocks for the copy to the host alone and writes "
        "while training goes on; or less often."
    )
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Checkpoints stop training for {duration(each)} each, {percent(share)} of the time since the first step",
        evidence={
            "checkpoints": found.checkpoints,
            "checkpoint_ns": found.checkpoint_ns,
            "share": round(share, 4),
            "steps_between": round(found.steps / found.checkpoints, 1),
            "saved_by": list(found.checkpoint_names),
        },
        recommendation=Recommendation(
            change={},
            why=why,
            numerics="unchanged",
            predicted=Prediction(
                Gain(low, mid, high),
                Gain(mean - high, mean - mid, mean - low),
                None,
                "time in checkpoints ÷ steps × 0.4–0.8–0.95; the step is the mean, checkpoints included",
                {"checkpoint_ns": found.checkpoint_ns, "steps": found.steps, "mean_step_ns": mean},
            ),
        ),
        severity=share,
    )


def healthy(facts: Facts) -> str | None:
    """What checkpoints take, when some were seen."""
    found = result_of(facts.analysis, "goodput", Goodput)
    if found is None or not found.checkpoints or not found.steady_ns or find(facts) is not None:
        return None
    share = found.checkpoint_ns / found.steady_ns
    plural = "" if found.checkpoints == 1 else "s"
    return f"Checkpoints: {count(found.checkpoints)} checkpoint{plural} took {percent(share)} of the time since the first step"
