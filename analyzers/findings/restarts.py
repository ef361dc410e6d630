"""``restarts``: the run broke off and was started again, and much of its time went into that."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.goodput import Goodput
from trine.analyzers.units import duration, percent

from ._facts import Facts

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "restarts"
KIND: Literal["fault"] = "fault"

#: Of the wall time, lost in gaps, in starting again and in steps done twice.
SHARE = 0.05


def _lost(found: Goodput) -> dict[str, int]:
    """What restarts cost: the gaps, the steps done twice, and all starts but the first."""
    return {
        "gaps_ns": found.losses_ns["restart"],
        "repeated_steps_ns": found.losses_ns["repeated"],
        "starting_again_ns": sum(one.losses_ns["start_up"] for one in found.attempts[1:]),
    }


def find(facts: Facts) -> Finding | None:
    """Restarts after a failure cost more than the threshold."""
    found = result_of(facts.analysis, "goodput", Goodput)
    if found is None or not found.restarts or not found.wall_ns:
        return None
    lost = _lost(found)
    share = sum(lost.values()) / found.wall_ns
    if share < SHARE:
        return None
    longest = max(lost, key=lost.__getitem__)
    broke = [one for one in found.attempts[:-1] if one.state != "stopped"]
    again = "" if found.repeated_steps is None else f" and {found.repeated_steps} steps done twice"
    return Finding(
        id=ID,
        kind=KIND,
        title=f"The run broke off {len(broke)} time{'' if len(broke) == 1 else 's'}: {percent(share)} of its time went "
        f"into starting again{again}",
        evidence={
            **lost,
            "share": round(share, 4),
            "restarts": found.restarts,
            "ended": {f"attempt {one.attempt}": f"{one.state} after {one.steps} steps" for one in broke},
            "repeated_steps": found.repeated_steps,
        },
        recommendation=Recommendation(
            change={},
            why={
                "gaps_ns": f"Between a failure and the next start lie {duration(lost['gaps_ns'])}: restart at once "
                "(torchrun --max-restarts, or the scheduler's requeue).",
                "repeated_steps_ns": "Save checkpoints more often: a failure costs half the distance between two on average "
                "(Young 1974: every √(2 × time of a checkpoint × mean time between failures)).",
                "starting_again_ns": "Starting takes long: keep the compiler's cache (TORCHINDUCTOR_CACHE_DIR) and the "
                "prepared data set on a disk that outlives the process.",
            }[longest],
            numerics="unchanged",
            predicted=None,
        ),
        severity=min(share, 1.0),
    )


def healthy(facts: Facts) -> str | None:
    """That nothing broke off, or what little it cost."""
    found = result_of(facts.analysis, "goodput", Goodput)
    if found is None or not found.restarts or find(facts) is not None:
        return None
    share = sum(_lost(found).values()) / found.wall_ns
    return f"Restarts: {found.restarts} cost {percent(share)} of the run (fault from {percent(SHARE)})"
