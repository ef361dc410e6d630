"""``exposed-communication``: steps wait for collectives that no compute hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trine.analyzers.results import CollectiveResult, Finding, Prediction, Recommendation
from trine.analyzers.units import duration, percent, rate

from ._facts import Facts
from ._gain import predict
from ._pipelines import waits_are_bubble
from ._waits import Split, late_ranks, split_exposed

__all__ = ["ID", "KIND", "find", "healthy", "threshold"]

ID = "exposed-communication"
KIND: Literal["fault"] = "fault"

#: Exposed bytes as a share of the step from which on it is a fault, on accelerators and on CPUs. On
#: CPUs the transfer takes the very cores that compute, so a fair share of exposure is the normal price.
TRANSFER_SHARE = 0.10
CPU_TRANSFER_SHARE = 0.25
#: Waiting for each other without one culprit. Scheduling noise on shared cores looks the same.
WAIT_SHARE = 0.20
CPU_WAIT_SHARE = 0.35
#: Exposed time that the files at hand cannot split (ranks missing).
UNSPLIT_SHARE = 0.20


def threshold(facts: Facts) -> float:
    """Exposed-transfer share from which on this run has a fault."""
    return TRANSFER_SHARE if facts.on_accelerator else CPU_TRANSFER_SHARE


def find(facts: Facts) -> Finding | None:
    """Bytes in the open, or waits without one culprit, above their thresholds."""
    split = split_exposed(facts)
    if split is None or facts.world < 2 or waits_are_bubble(facts):
        return None
    if split.transfer is None or split.wait is None:
        limit = UNSPLIT_SHARE if facts.on_accelerator else CPU_WAIT_SHARE
        return _unsplit(facts, split) if split.exposed >= limit else None
    if split.transfer >= threshold(facts):
        return _bytes(facts, split)
    wait_limit = WAIT_SHARE if facts.on_accelerator else CPU_WAIT_SHARE
    # A wait with a culprit is the straggler's finding, and counted there alone.
    return _waits(facts, split) if split.wait >= wait_limit and not late_ranks(facts) else None


def _bytes(facts: Facts, split: Split) -> Finding:
    assert split.transfer is not None
    lost_ns = facts.step_part_ns(split.transfer)
    top = _top(facts, "transfer_ns")
    slowest = f", most in {top[0]['op']}" if top else ""
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Moving bytes in the open takes {duration(lost_ns)} ({percent(split.transfer)}) of the {facts.unit}{slowest}",
        evidence=_evidence(split, "bytes", lost_ns, top),
        recommendation=_smaller_or_hidden(facts, lost_ns, split.transfer),
        severity=split.transfer,
    )


def _waits(facts: Facts, split: Split) -> Finding:
    assert split.wait is not None
    lost_ns = facts.step_part_ns(split.wait)
    top = _top(facts, "wait_ns")
    where = f", most in {top[0]['op']}" if top else ""
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Ranks wait for each other {duration(lost_ns)} ({percent(split.wait)}) of the {facts.unit}{where}; no single rank causes it",
        evidence=_evidence(split, "waiting", lost_ns, top),
        recommendation=Recommendation(
            change={"data.length_grouped": True},
            why="The work differs from rank to rank in turn: batches of equal token counts even it out. On "
            "shared machines look for other processes and for more threads than cores.",
            numerics="the order of samples changes",
            predicted=predict(
                facts,
                lost_ns,
                (0.1, 0.4, 0.8),
                "exposed waiting × share that evenly filled batches remove",
                {"wait_share": round(split.wait, 4)},
            ),
        ),
        severity=split.wait,
    )


def _unsplit(facts: Facts, split: Split) -> Finding:
    lost_ns = facts.step_part_ns(split.exposed)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Communication that nothing hides takes {duration(lost_ns)} ({percent(split.exposed)}) of the {facts.unit}; "
        "the other ranks' files would say whether it waits or moves bytes",
        evidence=_evidence(split, "unknown", lost_ns, []),
        recommendation=Recommendation(
            change={},
            why="Give Trine the files of all ranks: a wait for a late rank and a slow link need different cures.",
            numerics="unchanged",
            predicted=None,
        ),
        severity=split.exposed,
    )


def _smaller_or_hidden(facts: Facts, lost_ns: int, share: float) -> Recommendation:
    """The cure that fits how this run is distributed."""
    inputs: dict[str, float | int | str] = {"transfer_share": round(share, 4)}

    def gain(
        saved: tuple[float, float, float], formula: str, change: Mapping[str, Any] | None = None
    ) -> Prediction | None:
        return predict(facts, lost_ns, saved, formula, inputs, change=change)

    kind = facts.about("data_parallel", "kind")
    if kind == "ddp" and _full_precision_gradients(facts):
        return Recommendation(
            change={"communication.compression": "bf16", "communication.gradient_as_view": True},
            why="Send gradients in bf16: half the bytes in the same collectives.",
            numerics="gradients are rounded to bf16 before they are averaged: losses stay within 2e-3 of fp32",
            # Half the bytes, less the casts and the latency that stay.
            predicted=gain(
                (0.25, 0.42, 0.5),
                "exposed transfer × (1 − bytes after ÷ before), bf16 for fp32",
                {"communication.compression": "bf16"},
            ),
        )
    if kind == "fsdp2":
        return Recommendation(
            change={"zero.prefetch": 2},
            why="Gather the next blocks' parameters earlier. With memory to spare, zero.reshard_after_forward "
            "= false also drops the second gather of each step.",
            numerics="unchanged",
            predicted=gain((0.15, 0.4, 0.67), "exposed transfer × share that earlier gathers hide"),
        )
    return Recommendation(
        change={"communication.overlap": True, "communication.bucket_mib": "auto"},
        why="Start each collective as soon as its data is ready, so that it runs beside compute.",
        numerics="unchanged",
        # The replay has the record's own buckets; a size that a measurement decides cannot be replayed before it.
        predicted=gain(
            (0.1, 0.4, 0.8), "exposed transfer × share that overlap hides", {"communication.overlap": True}
        ),
    )


def _full_precision_gradients(facts: Facts) -> bool:
    if (facts.configuration.get("communication") or {}).get("compression", "none") != "none":
        return False
    return facts.about("precision", "parameter_dtype") in ("float32", "torch.float32", "fp32")


def _top(facts: Facts, by: Literal["transfer_ns", "wait_ns"]) -> list[dict[str, Any]]:
    """The three kinds of collective that cost most."""

    def cost(row: CollectiveResult) -> int:
        return row.transfer_ns if by == "transfer_ns" else row.wait_ns

    rows = sorted(facts.analysis.collectives, key=cost, reverse=True)[:3]
    return [
        {
            "op": row.op,
            "group": row.group,
            "calls": row.calls,
            "bytes": row.bytes,
            by: cost(row),
            "busbw": None if row.busbw_bytes_per_s is None else rate(row.busbw_bytes_per_s),
        }
        for row in rows
        if cost(row) > 0
    ]


def _evidence(split: Split, cause: str, lost_ns: int, top: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cause": cause,
        "lost_ns": lost_ns,
        "exposed_share": round(split.exposed, 4),
        "wait_share": None if split.wait is None else round(split.wait, 4),
        "transfer_share": None if split.transfer is None else round(split.transfer, 4),
        "basis": split.basis,
        "collectives": top,
    }


def healthy(facts: Facts) -> str | None:
    """Exposed transfers, when they were seen and are below the threshold."""
    if facts.world < 2 or waits_are_bubble(facts):
        return None
    split = split_exposed(facts)
    if split is None:
        return None
    if split.transfer is None or split.wait is None:
        if split.exposed >= threshold(facts):
            return None
        return f"Communication: {percent(split.exposed)} of the {facts.unit} is exposed (fault from {percent(threshold(facts))})"
    if split.transfer >= threshold(facts) or find(facts) is not None:
        return None
    return (
        f"Bandwidth: {percent(split.transfer)} of the {facts.unit} moves bytes in the open "
        f"(fault from {percent(threshold(facts))})"
    )
