"""``bucket-size``: DDP's buckets are too few to overlap, or too small for the link."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import CollectiveResult, Finding, Prediction, Recommendation
from trine.analyzers.units import duration, percent, rate, size

from ._facts import Facts
from ._gain import predict, worth_it
from ._waits import split_exposed

__all__ = ["ID", "KIND", "find"]

ID = "bucket-size"
KIND: Literal["opportunity"] = "opportunity"

#: With fewer buckets than this a step, the last one's transfer is a large part of all.
FEW = 6
#: Buckets to aim for: enough to overlap, each still long.
AIM = 12
#: Buckets smaller than this are ruled by latency, not bandwidth ...
SMALL_BYTES = 1 << 20
#: ... and larger ones are what the link is judged by.
LARGE_BYTES = 4 << 20
#: DDP's own default.
DEFAULT_MIB = 25


def find(facts: Facts) -> Finding | None:
    """DDP, with exposed transfers that another bucket size would hide or shorten."""
    if facts.world < 2 or facts.about("data_parallel", "kind") != "ddp" or facts.trains is False:
        return None
    split = split_exposed(facts)
    rows = [row for row in facts.analysis.collectives if "all_reduce" in row.op and row.bytes]
    steps = facts.analysis.source.steps
    if split is None or not split.transfer or not rows or steps <= 0:
        return None
    exposed_ns = facts.step_part_ns(split.transfer)
    per_step = sum(row.calls for row in rows) / steps
    mean_bytes = sum(row.bytes or 0 for row in rows) / sum(row.calls for row in rows)
    if mean_bytes < SMALL_BYTES and per_step > AIM:
        return _too_small(facts, rows, exposed_ns, per_step, mean_bytes)
    if 1 <= per_step < FEW:
        return _too_few(facts, exposed_ns, per_step, mean_bytes)
    return None


def _too_few(facts: Facts, exposed_ns: int, per_step: float, mean_bytes: float) -> Finding | None:
    """The last bucket is sent when nothing is left to compute: the smaller it is, the less shows."""
    gradient_bytes = mean_bytes * per_step
    bucket_mib = max(round(gradient_bytes / AIM / 2**20), 1)
    if bucket_mib >= (facts.about("data_parallel", "bucket_mib") or DEFAULT_MIB):
        return None
    hidden = max(1 - per_step / AIM, 0.0)
    # On CPUs hidden transfers still take cores from compute, so the low end gains nothing.
    saved = (hidden * 0.2, hidden * 0.5, hidden * 0.9)
    if not facts.on_accelerator:
        saved = (0.0, hidden * 0.35, hidden * 0.8)
    prediction = predict(
        facts,
        exposed_ns,
        saved,
        "exposed transfer × (1 − buckets now ÷ buckets after) × share that backward hides",
        {"buckets_per_step": round(per_step, 1), "buckets_after": AIM},
        change={"communication.bucket_mib": bucket_mib},
    )
    title = f"{per_step:.0f} bucket{'s' if per_step >= 1.5 else ''} of {size(mean_bytes)} leave{'' if per_step >= 1.5 else 's'} little to overlap"
    return _finding(facts, title, prediction, bucket_mib, per_step, mean_bytes)


def _too_small(
    facts: Facts, rows: list[CollectiveResult], exposed_ns: int, per_step: float, mean_bytes: float
) -> Finding | None:
    """Many small messages: what larger ones reach on this link says what is lost to latency."""
    large = [
        row.busbw_bytes_per_s
        for row in facts.analysis.collectives
        if row.busbw_bytes_per_s and row.bytes and row.bytes / max(row.calls, 1) >= LARGE_BYTES
    ]
    link = max(large, default=None) or facts.analysis.hardware.link_bytes_per_s
    small = [row.busbw_bytes_per_s for row in rows if row.busbw_bytes_per_s]
    if not link or not small or max(small) >= link:
        return None
    lost = 1 - max(small) / link
    prediction = predict(
        facts,
        exposed_ns,
        (lost * 0.3, lost * 0.6, lost * 0.9),
        "exposed transfer × (1 − bus bandwidth now ÷ that of large messages)",
        {"busbw_now": max(small), "busbw_large": link},
        change={"communication.bucket_mib": DEFAULT_MIB},
    )
    title = f"{per_step:.0f} buckets of {size(mean_bytes)} reach {rate(max(small))} where large ones reach {rate(link)}"
    return _finding(facts, title, prediction, DEFAULT_MIB, per_step, mean_bytes)


def _finding(
    facts: Facts,
    title: str,
    prediction: Prediction | None,
    bucket_mib: int,
    per_step: float,
    mean_bytes: float,
) -> Finding | None:
    if prediction is None or prediction.gain_ns is None or not worth_it(facts, prediction):
        return None
    mid = prediction.gain_ns.mid
    share = mid / (facts.step_ns or 1)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{title}: {duration(mid)} ({percent(share)}) a {facts.unit} to gain",
        evidence={
            "buckets_per_step": round(per_step, 2),
            "mean_bytes": round(mean_bytes),
            "bucket_mib": facts.about("data_parallel", "bucket_mib"),
        },
        recommendation=Recommendation(
            change={"communication.bucket_mib": bucket_mib, "communication.gradient_as_view": True},
            why="Buckets that are many enough to start early and large enough to fill the link.",
            numerics="unchanged but for the order of sums",
            predicted=prediction,
        ),
        severity=share,
    )
