"""``host-bound``: the work waits because the host launches too slowly, blocks, or does something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trine.analyzers.results import Breakdown, Finding, Recommendation
from trine.analyzers.units import duration, percent

from ._facts import Facts, RankFacts, typical
from ._gain import predict

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "host-bound"
KIND: Literal["fault"] = "fault"

#: Idle device time whose cause is the host, as a share of the window, from which on it is a fault.
DEVICE_SHARE = 0.15
#: Without a device: time outside every operator. Python between operators is normal there ...
CPU_SHARE = 0.50
#: ... and is much of a step this short, whatever one does.
CPU_STEP_NS = 5_000_000
#: A deep window whose steps take this many times the usual ones shows the profiler, not the program.
DISTURBED_TIMES = 1.5
#: Of the usual step, what lies outside loader, forward, backward and optimizer: logging, metrics,
#: evaluation, checkpoints.
OUTSIDE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Idle:
    """Shares of the step: launching too slowly, blocking, and a phase outside the training itself."""

    rank: int
    host: float | None
    sync: float | None
    outside: float | None

    @property
    def between(self) -> float | None:
        """Host and sync together; None where no breakdown tells."""
        return None if self.host is None or self.sync is None else self.host + self.sync


def _idle(facts: Facts) -> _Idle | None:
    """The typical rank's idle time caused by the host; None where neither a breakdown nor phases tell."""
    found = [idle for rank in facts.ranks if (idle := _idle_of(facts, rank)) is not None]
    return typical(found, lambda idle: max(idle.between or 0.0, idle.outside or 0.0))


def _idle_of(facts: Facts, rank: RankFacts) -> _Idle | None:
    breakdown = rank.breakdown
    # A device may work on while its host logs: there, only its own idle time counts.
    outside = None if facts.on_accelerator else rank.usual("other")
    usual_ns = facts.step_ns if len(rank.durations) else None  # steps that ran without a profiler
    if breakdown is None or _step_ns(breakdown) > DISTURBED_TIMES * (usual_ns or _step_ns(breakdown)):
        return None if outside is None else _Idle(rank.rank, None, None, outside)
    host, sync = breakdown.idle.host / breakdown.window_ns, breakdown.idle.sync / breakdown.window_ns
    # Under a profiler every operator costs more. Steps that ran without one say how much: that much of
    # the idle time is its doing, not the program's.
    if usual_ns and breakdown.steps:
        step_ns = _step_ns(breakdown)
        real = max((host + sync) * step_ns - max(step_ns - usual_ns, 0.0), 0.0) / usual_ns
        scale = min(real / (host + sync), 1.0) if host + sync > 0 else 0.0
        host, sync = host * scale, sync * scale
    return _Idle(rank.rank, host, sync, outside)


def _step_ns(breakdown: Breakdown) -> float:
    return breakdown.window_ns / max(len(breakdown.steps), 1)


def _threshold(facts: Facts) -> float:
    return DEVICE_SHARE if facts.on_accelerator else CPU_SHARE


def find(facts: Facts) -> Finding | None:
    """Idle time caused by the host, or time outside the training itself, above its threshold."""
    idle = _idle(facts)
    if idle is None or (not facts.on_accelerator and (facts.step_ns or 0) < CPU_STEP_NS):
        return None
    if idle.outside is not None and idle.outside >= max(OUTSIDE_SHARE, idle.between or 0.0):
        return _outside(facts, idle, idle.outside)
    if idle.between is None or idle.between < _threshold(facts):
        return None
    return _between(facts, idle, idle.between)


def _outside(facts: Facts, idle: _Idle, share: float) -> Finding:
    stall_ns = facts.step_part_ns(share)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{duration(stall_ns)} of the usual step ({percent(share)}) lies outside loader, forward, backward and optimizer",
        evidence=_evidence(idle, stall_ns, "phases"),
        recommendation=Recommendation(
            change={},
            why="Look at what the loop does besides: logging, metrics, evaluation, checkpoints, sleeping. Do it "
            "every few steps, or in the background.",
            numerics="unchanged",
            predicted=predict(
                facts,
                stall_ns,
                (0.2, 0.5, 0.9),
                "time outside the training itself × share that can leave the step",
                {"outside_share": round(share, 4)},
            ),
        ),
        severity=share,
    )


def _between(facts: Facts, idle: _Idle, share: float) -> Finding:
    stall_ns = facts.step_part_ns(share)
    blocks = (idle.sync or 0.0) > (idle.host or 0.0)
    cause = "the host blocks in synchronising calls" if blocks else "the host is busy between launches"
    title = f"No operator runs for {duration(stall_ns)} of the {facts.unit} ({percent(share)}): the time goes to Python"
    if facts.on_accelerator:
        title = f"The device idles {duration(stall_ns)} of the {facts.unit} ({percent(share)}) while {cause}"
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence=_evidence(idle, stall_ns, "breakdown"),
        recommendation=_recommendation(facts, stall_ns, share, blocks),
        severity=share,
    )


def _evidence(idle: _Idle, stall_ns: int, basis: str) -> dict[str, Any]:
    return {
        "host_idle_share": None if idle.host is None else round(idle.host, 4),
        "sync_idle_share": None if idle.sync is None else round(idle.sync, 4),
        "outside_share": None if idle.outside is None else round(idle.outside, 4),
        "stall_ns": stall_ns,
        "typical_rank": idle.rank,
        "basis": basis,
    }


def _recommendation(facts: Facts, stall_ns: int, share: float, blocks: bool) -> Recommendation:
    # Fewer launches: compilation joins elementwise chains, so between a fifth and most of the gaps go.
    # The low end also allows for what a profiler itself adds to the host.
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
    if idle is None or find(facts) is not None:
        return None
    limit = _threshold(facts)
    if idle.between is not None:
        what = "the device idles for the host" if facts.on_accelerator else "no operator runs"
        below = idle.between < limit
        return (
            f"Host: {what} {percent(idle.between)} of the time (fault from {percent(limit)})"
            if below
            else None
        )
    if idle.outside is None or idle.outside >= OUTSIDE_SHARE:
        return None
    return f"Host: {percent(idle.outside)} of the usual step lies outside the training itself (fault from {percent(OUTSIDE_SHARE)})"
