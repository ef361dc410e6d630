"""``optimizer-bound``: the optimizer takes a large share of the step."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts, Part
from ._gain import faster, predict

__all__ = ["FUSED_SPEED_UP", "ID", "KIND", "find", "fused_speed_up", "healthy", "optimizer_part"]

ID = "optimizer-bound"
KIND: Literal["fault"] = "fault"

#: Share of the step from which on it is a fault.
SHARE = 0.30

#: (device, implementation now) → how many times faster the fused one is: low, mid, high.
#: CPU: AdamW over 5.2 M parameters, fused 18.8–22 ms against 47.8–126 ms for-loop, foreach no faster
#: than the loop (torch 2.13). Accelerators: a launch per parameter and operation becomes one per chunk;
#: foreach has few launches already, but still reads and writes the state several times.
FUSED_SPEED_UP: dict[tuple[str, str], tuple[float, float, float]] = {
    ("cpu", "for-loop"): (1.8, 2.5, 5.0),
    ("cpu", "foreach"): (1.8, 2.5, 5.0),
    ("accelerator", "for-loop"): (2.0, 4.0, 10.0),
    ("accelerator", "foreach"): (1.1, 1.5, 2.5),
}


def optimizer_part(facts: Facts) -> Part | None:
    """Share of the step in the optimizer on the typical rank."""
    return facts.part(lambda rank: rank.phase("optimizer"))


def fused_speed_up(facts: Facts) -> tuple[float, float, float] | None:
    """How much faster a fused optimizer would be; None where it is fused or unknown."""
    implementation = facts.about("optimizer", "implementation")
    device = "accelerator" if facts.on_accelerator else "cpu"
    return FUSED_SPEED_UP.get((device, str(implementation)))


def find(facts: Facts) -> Finding | None:
    """The optimizer's share is above the threshold."""
    part = optimizer_part(facts)
    if part is None or part.share < SHARE:
        return None
    spent_ns = facts.step_part_ns(part.share)
    implementation = facts.about("optimizer", "implementation")
    name = facts.about("optimizer", "class") or "optimizer"
    how = f" ({implementation})" if implementation else ""
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{name}{how} takes {duration(spent_ns)} ({percent(part.share)}) of the step",
        evidence={
            "optimizer_ns": spent_ns,
            "optimizer_share": round(part.share, 4),
            "implementation": implementation,
            "class": facts.about("optimizer", "class"),
            "typical_rank": part.rank,
            "basis": part.basis,
        },
        recommendation=_recommendation(facts, spent_ns, part.share),
        severity=part.share,
    )


def _recommendation(facts: Facts, spent_ns: int, share: float) -> Recommendation:
    inputs: dict[str, float | int | str] = {"optimizer_share": round(share, 4), "ranks": facts.world}
    speed_up = fused_speed_up(facts)
    if speed_up is not None:
        return Recommendation(
            change={"compute.fuse": ["optimizer"]},
            why="One fused kernel reads and writes each state once, where the loop does so per operation.",
            numerics="reordered floating-point operations: losses agree to about 1e-6",
            predicted=predict(
                facts,
                spent_ns,
                faster(*speed_up),
                "optimizer × (1 − 1 ÷ speed-up of the fused implementation)",
                inputs | {"speed_up_mid": speed_up[1]},
            ),
        )
    if facts.world > 1 and facts.about("data_parallel", "kind") == "ddp":
        return Recommendation(
            change={"zero.stage": 1},
            why="Every rank updates all parameters; with ZeRO-1 each updates its own part and they exchange it.",
            numerics="unchanged",
            predicted=predict(
                facts,
                spent_ns,
                # All of the (N−1)/N less the parameters' all-gather, which this run has not measured.
                tuple(f * (1 - 1 / facts.world) for f in (0.3, 0.7, 0.95)),  # type: ignore[arg-type]
                "optimizer × (1 − 1 ÷ ranks), less the parameters' all-gather",
                inputs,
                change={"zero.stage": 1},
            ),
        )
    return Recommendation(
        change={},
        why="The implementation is fused already, or unknown: accumulate gradients over more micro-batches, "
        "so that one update serves more samples.",
        numerics="a larger global batch trains differently: re-tune the learning rate",
        predicted=None,
    )


def healthy(facts: Facts) -> str | None:
    """The optimizer's share, when it was seen and is below the threshold."""
    part = optimizer_part(facts)
    if part is None or part.share >= SHARE:
        return None
    return f"Optimizer: {percent(part.share)} of the step (fault from {percent(SHARE)})"
