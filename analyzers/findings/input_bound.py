"""``input-bound``: steps wait for the next batch."""

from __future__ import annotations

import math
from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts, Part, RankFacts
from ._gain import predict

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "input-bound"
KIND: Literal["fault"] = "fault"

#: Share of the step in the loader from which on it is a fault (XProf's guide calls 5 % to 20 % moderate).
SHARE = 0.10
#: The same where the host only *might* have held the device up: it was not seen what the device did.
UNSEEN_DEVICE_SHARE = 0.20
#: Workers are never suggested beyond this; the machine's cores are rarely all free.
MOST_WORKERS = 16


def _stall(facts: Facts) -> Part | None:
    """Share of the step lost to the loader, from the best source at hand."""

    def read(rank: RankFacts) -> Part | None:
        # A device may work on while its host loads: there, only idle time counts.
        idle = rank.window(lambda breakdown: breakdown.idle.data)
        phase = rank.phase("data")
        if facts.on_accelerator:
            return idle or phase
        return phase or idle

    return facts.part(read)


def _workers(facts: Facts, share: float) -> tuple[int | None, int]:
    """(workers now, workers that keep up): a batch must be made in the time the rest of the step takes."""
    now = facts.about("loader", "workers")
    now = int(now) if isinstance(now, int) else None
    busy = share if not now else 1.0  # workers that cannot keep up work all the time
    needed = math.ceil(max(now or 1, 1) * busy / max(1 - share, 0.05)) + 1
    return now, min(max(needed, 2, (now or 0) + 1), MOST_WORKERS)


def find(facts: Facts) -> Finding | None:
    """The typical rank spends more than the threshold waiting for its loader."""
    stall = _stall(facts)
    if stall is None:
        return None
    unseen = bool(facts.on_accelerator) and stall.basis == "phases"
    if stall.share < (UNSEEN_DEVICE_SHARE if unseen else SHARE):
        return None
    stall_ns = facts.step_part_ns(stall.share)
    now, workers = _workers(facts, stall.share)
    # Loading in the training process: workers hide it all but a hand-over. More workers than now: as
    # far as the machine has cores for them. ResNet-50 traced with no worker and with four (torch 1.9,
    # V100) gave back 49.9 of 50.0 ms; on few cores workers take time from the step, hence the low ends.
    saved = (0.5, 0.9, 1.0) if now == 0 else (0.3, 0.75, 1.0)
    prediction = predict(
        facts,
        stall_ns,
        saved,
        "loader stall × share that worker processes hide (all but the hand-over; half if cores are short)",
        {"stall_share": round(stall.share, 4), "workers": workers},
        change={"data.workers": workers} if now == 0 else None,
    )
    with_now = "" if now is None else f", with {now} worker{'' if now == 1 else 's'}"
    return Finding(
        id=ID,
        kind=KIND,
        title=f"The step waits {duration(stall_ns)} ({percent(stall.share)}) for its next batch{with_now}",
        evidence={
            "stall_ns": stall_ns,
            "stall_share": round(stall.share, 4),
            "basis": stall.basis,
            "typical_rank": stall.rank,
            "workers": now,
            "device_may_have_been_busy": unseen,
        },
        recommendation=Recommendation(
            change={"data.workers": workers, "data.prefetch": 4},
            why=f"Make batches in {workers} worker processes, ahead of the step. If the stall stays, the "
            "storage or the per-sample work is the limit: decode and tokenise before training.",
            numerics="unchanged: the order of samples stays; random augmentation draws from each worker's own seed",
            predicted=prediction,
        ),
        severity=stall.share,
    )


def healthy(facts: Facts) -> str | None:
    """The loader's share, when it was seen and is below the threshold."""
    stall = _stall(facts)
    if stall is None or stall.share >= SHARE:
        return None
    return f"Input: {percent(stall.share)} of the {facts.unit} waits for the next batch (fault from {percent(SHARE)})"
