"""``stage-imbalance``: one stage of the pipeline computes longer than the others, and all move at its pace."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts
from ._gain import predict
from ._pipelines import evident_pipeline, per_step

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "stage-imbalance"
KIND: Literal["fault"] = "fault"

#: How much longer than the median stage the longest computes, from which on it is a fault; on CPUs, whose cores
#: stages may share, more ...
LONGER = 0.15
LONGER_ON_CPU = 0.35
#: ... in how many of the iterations it must be the longest ...
SAME_STAGE = 0.65
#: ... and what that costs, as a share of the iteration.
COST_SHARE = 0.05
#: Of the difference to an even split, what moving whole layers gets back.
GOT_BACK = (0.4, 0.7, 1.0)


def find(facts: Facts) -> Finding | None:
    """The longest stage takes 15 % more than the median one, and that costs 5 % of the iteration."""
    result = evident_pipeline(facts)
    limit = LONGER_ON_CPU if facts.on_accelerator is False else LONGER
    if result is None or result.imbalance < limit or result.slowest_share < SAME_STAGE:
        return None
    computes = sorted(stage.compute_ns for stage in result.stages)
    longest, mean = computes[-1], sum(computes) / len(computes)
    median = longest / (1 + result.imbalance)
    cost = (longest - median) / result.iteration_ns
    if cost < COST_SHARE:
        return None
    prediction = predict(
        facts,
        per_step(facts, result, longest - mean),
        GOT_BACK,
        "computing of the longest stage − mean of all stages",
        {"longest_ns": longest, "mean_ns": round(mean), "iteration_ns": result.iteration_ns},
    )
    held = next(stage.stages for stage in result.stages if stage.rank == result.slowest)
    named = ", ".join(str(stage) for stage in held if stage >= 0)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Rank {result.slowest}'s stage{f' ({named})' if named else ''} computes {duration(longest)} an iteration, "
        f"{percent(result.imbalance)} more than the median stage, and all others move at its pace",
        evidence={
            "rank": result.slowest,
            "compute_ns": {f"rank {stage.rank} ns": stage.compute_ns for stage in result.stages[:64]},
            "imbalance_share": round(result.imbalance, 4),
            "cost_share": round(cost, 4),
        },
        recommendation=Recommendation(
            change={},
            why="Move layers from that stage to the others (parallel.split names the layers at which stages begin); the last stage "
            "often carries the output head and the loss, the first the embedding: give them fewer layers.",
            numerics="unchanged",
            predicted=prediction,
        ),
        severity=cost,
    )


def healthy(facts: Facts) -> str | None:
    """How even the stages are."""
    result = evident_pipeline(facts)
    if result is None or find(facts) is not None:
        return None
    return f"Stage balance: the longest stage computes {percent(result.imbalance)} more than the median one"
