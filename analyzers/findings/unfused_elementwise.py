"""``unfused-elementwise``: time goes to kernels that only move memory, one operation at a time."""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.units import duration, percent

from . import optimizer_bound
from ._facts import Facts, Part, RankFacts
from ._gain import faster, predict, worth_it
from ._kinds import by_class, classify, work

__all__ = ["ID", "KIND", "find"]

ID = "unfused-elementwise"
KIND: Literal["opportunity"] = "opportunity"

#: Share of elementwise time that fusion saves where no device kernels were seen in order: low, mid, high. A chain of k
#: operations moves k round trips to memory, fused one; part of a trace's elementwise work stands alone and stays.
#: Where they were, the chains themselves say (``studies/_fusion.py``).
SAVED = (0.15, 0.4, 0.65)
#: Attention by hand: its scores are written and read several times; a fused one never stores them.
ATTENTION_BY_HAND = ("eager", "math", "manual", "by hand")


def _study(facts: Facts) -> KernelEfficiency | None:
    """The study of kernels, where it saw a device's kernels in their order."""
    result = result_of(facts.analysis, "kernel_efficiency", KernelEfficiency)
    return result if result is not None and result.basis == "device" else None


def _saved(facts: Facts) -> tuple[float, float, float]:
    """Shares of elementwise time that fusion saves: as this run's chains say, else :data:`SAVED`."""
    result = _study(facts)
    elementwise = result.classes.get("elementwise", 0) if result is not None else 0
    if result is None or elementwise <= 0:
        return SAVED
    low, mid, high = (min(saved / elementwise, 1.0) for saved in result.chain_totals[3:])
    return low, mid, high


def _elementwise(rank: RankFacts) -> Part | None:
    breakdown, rows = rank.breakdown, work(rank.result.summary)
    if breakdown is None or not rows:
        return None
    seen = sum(row.total_ns for row in rows)
    if seen <= 0:
        return None
    share = by_class(rows).get("elementwise", 0) / seen
    return Part(share * breakdown.compute_ns / breakdown.window_ns, "breakdown", rank.rank)


def _optimizer_gain(facts: Facts) -> tuple[float, tuple[float, float, float]] | None:
    """(ns at stake, fractions saved) of fusing the optimizer, unless ``optimizer-bound`` says so already."""
    part, speed_up = optimizer_bound.optimizer_part(facts), optimizer_bound.fused_speed_up(facts)
    if part is None or speed_up is None or part.share >= optimizer_bound.SHARE:
        return None
    return facts.step_part_ns(part.share), faster(*speed_up)


def _predict(
    facts: Facts, elementwise_ns: int, optimizer: tuple[float, tuple[float, float, float]] | None
) -> Prediction | None:
    own_saved = _saved(facts)
    optimizer_ns, optimizer_saved = optimizer if optimizer is not None else (0.0, (0.0, 0.0, 0.0))
    stake = elementwise_ns + optimizer_ns
    if stake <= 0:
        return None
    saved = tuple(
        (elementwise_ns * own + optimizer_ns * other) / stake
        for own, other in zip(own_saved, optimizer_saved, strict=True)
    )
    measured = _study(facts) is not None
    formula = (
        "elementwise × share that fusion saves"
        + (" (reads and writes between neighbours of this run's chains)" if measured else "")
        + " + optimizer × (1 − 1 ÷ speed-up of the fused one)"
    )
    inputs: dict[str, float | int | str] = {
        "elementwise_ns": elementwise_ns,
        "optimizer_ns": round(optimizer_ns),
        "elementwise_saved_mid": round(own_saved[1], 3),
        "optimizer_saved_mid": round(optimizer_saved[1], 3),
    }
    change = {"compute.compile": "blocks"} if elementwise_ns and optimizer is None else None
    return predict(facts, stake, saved, formula, inputs, change=change)  # type: ignore[arg-type]


def find(facts: Facts) -> Finding | None:
    """Eager elementwise work or an unfused optimizer whose fusion is worth the opportunity's share."""
    compiled = bool(facts.about("compile"))
    part = None if compiled else facts.part(_elementwise)
    optimizer = _optimizer_gain(facts)
    elementwise_ns = facts.step_part_ns(part.share) if part is not None else 0
    prediction = _predict(facts, elementwise_ns, optimizer)
    if prediction is None or prediction.gain_ns is None or not worth_it(facts, prediction):
        return None
    change: dict[str, Any] = {}
    if part is not None:
        change["compute.compile"] = "blocks"
    if facts.about("attention") in ATTENTION_BY_HAND:
        change["compute.attention"] = "sdpa"
    if optimizer is not None:
        change["compute.fuse"] = ["optimizer"]
    step_ns = facts.step_ns or 1
    stake = elementwise_ns + (round(optimizer[0]) if optimizer is not None else 0)
    what = "Unfused elementwise work" if part is not None else "An unfused optimizer"
    if part is not None and optimizer is not None:
        what = "Unfused elementwise work and an unfused optimizer"
    takes = "take" if part is not None and optimizer is not None else "takes"
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{what} {takes} {duration(stake)} ({percent(stake / step_ns)}) of the {facts.unit}",
        evidence={
            "elementwise_ns": elementwise_ns,
            "optimizer_ns": round(optimizer[0]) if optimizer is not None else None,
            "optimizer_implementation": facts.about("optimizer", "implementation"),
            "attention": facts.about("attention"),
            "compiled": facts.about("compile"),
            "top": _top(facts, part),
            **_chains(facts, part),
        },
        recommendation=Recommendation(
            change=change,
            why="Compile the repeated blocks (one kernel for a chain of operations), keep attention's scores "
            "out of memory, update parameters in one fused kernel; each part alone helps too.",
            numerics="reordered floating-point operations: losses agree to about 1e-6 in fp32; under compile dropout masks differ from eager",
            predicted=prediction,
        ),
        severity=prediction.gain_ns.mid / step_ns,
    )


def _chains(facts: Facts, part: Part | None) -> dict[str, Any]:
    """The chains that would gain most, where the device's kernels were seen."""
    result = _study(facts)
    if part is None or result is None or not result.chains:
        return {}
    count, kernels, *_ = result.chain_totals
    ordered = sorted(result.chains, key=lambda chain: -chain.saved_ns[1])[:3]
    return {
        "chains": count,
        "chained_kernels": kernels,
        "top_chains": [
            {"operators": chain.operators, "count": chain.count, "saved_ns": chain.saved_ns[1]}
            for chain in ordered
        ],
    }


def _top(facts: Facts, part: Part | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    rank = next(rank for rank in facts.ranks if rank.rank == part.rank)
    rows = [row for row in work(rank.result.summary) if classify(row.name) == "elementwise"]
    rows = sorted(rows, key=lambda row: -row.total_ns)[:3]
    return [{"name": row.name, "calls": row.calls, "total_ns": row.total_ns} for row in rows]
