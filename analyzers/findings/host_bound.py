"""``host-bound``: the device waits because the host launches too slowly or blocks."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts, Part
from ._gain import predict

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "host-bound"
KIND: Literal["fault"] = "fault"

#: Idle device time whose cause is the host, as a share of the window, from which on it is a fault.
DEVICE_SHARE = 0.15
#: Without a device: time outside every operator. Python between operators is normal there, and a
#: profiler's own cost falls into it.
CPU_SHARE = 0.35


def _idle(facts: Facts) -> tuple[Part, Part] | None:
    """(host, sync) idle shares of the typical rank by their sum."""
    both = facts.part(lambda rank: rank.window(lambda b: b.idle.host + b.idle.sync))
    if both is None:
        return None
    rank = next(rank for rank in facts.ranks if rank.rank == both.rank)
    host, sync = rank.window(lambda b: b.idle.host), rank.window(lambda b: b.idle.sync)
    assert host is not None and sync is not None
    return host, sync


def _threshold(facts: Facts) -> float:
    return DEVICE_SHARE if facts.on_accelerator else CPU_SHARE


def find(facts: Facts) -> Finding | None:
    """Idle time caused by the host is above the threshold on the typical rank."""
    idle = _idle(facts)
    if idle is None or idle[0].share + idle[1].share < _threshold(facts):
        return None
    host, sync = idle
    share = host.share + sync.share
    stall_ns = facts.step_part_ns(share)
    blocks = sync.share > host.share
    who = "The device idles" if facts.on_accelerator else "No operator runs for"
    cause = "the host blocks in synchronising calls" if blocks else "the host is busy between launches"
    title = (
        f"{who} {duration(stall_ns)} of the {facts.unit} ({percent(share)}) while {cause}"
        if facts.on_accelerator
        else f"{who} {duration(stall_ns)} of the {facts.unit} ({percent(share)}): the time goes to Python"
    )
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence={
            "host_idle_share": round(host.share, 4),
            "sync_idle_share": round(sync.share, 4),
            "stall_ns": stall_ns,
            "typical_rank": host.rank,
            "basis": host.basis,
            "note": "measured under a profiler, which slows the host itself",
        },
        recommendation=_recommendation(facts, stall_ns, share, blocks),
        severity=share,
    )


def _recommendation(facts: Facts, stall_ns: int, share: float, blocks: bool) -> Recommendation:
    # Fewer launches: compilation joins elementwise chains, so between a fifth and most of the gaps go.
    # The low end also allows for what the profiler itself added to the host.
    prediction = predict(
        facts,
        stall_ns,
        (0.15, 0.45, 0.8),
        "host-caused idle time × share that fewer launches and synchronisations remove",
        {"idle_share": round(share, 4)},
    )
    if blocks:
        return Recommendation(
            change={},
            why="Find what blocks: .item(), .cpu(), print(loss), torch.cuda.synchronize() or a copy from "
            "unpinned memory inside the step; read such values every few steps, non_blocking, instead.",
            numerics="unchanged",
            predicted=prediction,
        )
    if facts.about("compile"):
        return Recommendation(
            change={},
            why="The model is compiled already: move logging, metrics and tokenising out of the step, or "
            "make the batch larger so that each launch does more.",
            numerics="unchanged",
            predicted=prediction,
        )
    return Recommendation(
        change={"compute.compile": "blocks", "compute.fuse": ["optimizer"]},
        why="Compile the repeated blocks and fuse the optimizer: fewer, longer kernels for the same work.",
        numerics="reordered floating-point operations: losses agree to about 1e-6 in fp32; dropout masks differ from eager",
        predicted=prediction,
    )


def healthy(facts: Facts) -> str | None:
    """Host-caused idle time, when it was seen and is below the threshold."""
    idle = _idle(facts)
    if idle is None or (share := idle[0].share + idle[1].share) >= _threshold(facts):
        return None
    what = "the device idles for the host" if facts.on_accelerator else "no operator runs"
    return f"Host: {what} {percent(share)} of the time (fault from {percent(_threshold(facts))})"
