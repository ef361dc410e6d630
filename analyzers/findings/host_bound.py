"""``host-bound``: the work waits because the host launches too slowly, blocks, or does something else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.critical_path import CriticalPath
from trine.analyzers.studies.launch_queue import KEY as QUEUE
from trine.analyzers.studies.launch_queue import QueuePart
from trine.analyzers.units import duration, percent

from . import blocking_calls
from ._blocking import DISTURBED_TIMES, Replayed, replayed_of, step_ns_of
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
#: A queue of which more work than this share has no launch on record says nothing.
LOST_SHARE = 0.05
#: Part of the job's path that one rank's host holds ...
HOLDS_SHARE = 0.5
#: ... and what mending that rank (or the pair that costs most) gains at most, where the others' hosts are no faster.
ALONE_SHARE = 0.1
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
    queue: QueuePart | None = None
    replayed: Replayed | None = None
    own_ns: float | None = None  # a step of its own window
    holds: bool = False  # the others wait in collectives for this rank's host, and their own are no faster

    @property
    def between(self) -> float | None:
        """Host and sync together; None where no breakdown tells."""
        return None if self.host is None or self.sync is None else self.host + self.sync


def _idle(facts: Facts) -> _Idle | None:
    """The typical rank's idle time caused by the host; None where neither a breakdown nor phases tell."""
    if "host_idle" not in facts.memo:
        found = [idle for rank in facts.ranks if (idle := _idle_of(facts, rank)) is not None]
        held = _holder(facts, found)
        facts.memo["host_idle"] = (
            typical(found, lambda idle: max(idle.between or 0.0, idle.outside or 0.0))
            if held is None
            else held
        )
    kept: _Idle | None = facts.memo["host_idle"]
    return kept


def _holder(facts: Facts, found: list[_Idle]) -> _Idle | None:
    """The rank whose host decides the job's path, where mending that rank alone would gain little: then all hosts
    are about as slow, and most devices are not idle only because they wait in collectives for it."""
    path = result_of(facts.analysis, "critical_path", CriticalPath)
    if path is None or path.job is None or not path.job.ranks:
        return None
    job, first = path.job, path.job.ranks[0]
    host = sum(first.segments_ns.get(name, 0) for name in ("operator", "python"))
    alone = max((one.gain_ns for one in job.without), default=job.length_ns)
    if host < HOLDS_SHARE * job.length_ns or alone > ALONE_SHARE * job.length_ns:
        return None
    return next(
        (replace(idle, holds=True) for idle in found if idle.rank == first.rank and idle.replayed), None
    )


def _idle_of(facts: Facts, rank: RankFacts) -> _Idle | None:
    breakdown = rank.breakdown
    # A device may work on while its host logs: there, only its own idle time counts.
    outside = None if facts.on_accelerator else rank.usual("other")
    usual_ns = facts.step_ns if len(rank.durations) else None  # steps that ran without a profiler
    if breakdown is None or step_ns_of(breakdown) > DISTURBED_TIMES * (usual_ns or step_ns_of(breakdown)):
        return None if outside is None else _Idle(rank.rank, None, None, outside)
    host, sync = breakdown.idle.host / breakdown.window_ns, breakdown.idle.sync / breakdown.window_ns
    queue: QueuePart | None = rank.result.summary.parts.get(QUEUE)
    if queue is not None and host + sync > 0:
        # What waited in another stream's queue was the device's to start: only an empty queue is the host's doing.
        scale = min(queue.starved_ns / max(queue.window_ns, 1) / (host + sync), 1.0) if _tells(queue) else 1.0
        host, sync = host * scale, sync * scale
    # Under a profiler every operator costs more. Steps that ran without one say how much: that much of
    # the idle time is its doing, not the program's.
    if usual_ns and breakdown.steps:
        step_ns = step_ns_of(breakdown)
        real = max((host + sync) * step_ns - max(step_ns - usual_ns, 0.0), 0.0) / usual_ns
        scale = min(real / (host + sync), 1.0) if host + sync > 0 else 0.0
        host, sync = host * scale, sync * scale
    own_ns = usual_ns or step_ns_of(breakdown)
    return _Idle(rank.rank, host, sync, outside, queue, replayed_of(facts, rank), own_ns)


def _tells(queue: QueuePart) -> bool:
    """Whether nearly all work has a launch: else the queue looks emptier than it was."""
    return queue.without_launch <= LOST_SHARE * (queue.work + queue.without_launch)


def _threshold(facts: Facts) -> float:
    return DEVICE_SHARE if facts.on_accelerator else CPU_SHARE


def find(facts: Facts) -> Finding | None:
    """Idle time caused by the host, or time outside the training itself, above its threshold."""
    idle = _idle(facts)
    if idle is None or (not facts.on_accelerator and (facts.step_ns or 0) < CPU_STEP_NS):
        return None
    if idle.outside is not None and idle.outside >= max(OUTSIDE_SHARE, idle.between or 0.0):
        return _outside(facts, idle, idle.outside)
    if idle.between is None:
        return None
    share = _without_blocking(facts, idle, idle.between)
    return None if share < _threshold(facts) else _between(facts, idle, share)


def _without_blocking(facts: Facts, idle: _Idle, share: float) -> float:
    """What is left to this rule where blocking calls are a fault of their own: they run the queue dry too."""
    blocked = blocking_calls.found_in(facts)
    return share if blocked is None else max(share - blocked.blocking, 0.0)


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
    # Of a rank that is named, what its own window says, so that the tables say the same.
    own_ns = idle.own_ns if idle.holds else None
    stall_ns = facts.step_part_ns(share) if own_ns is None else round(share * own_ns)
    blocks = (idle.sync or 0.0) > (idle.host or 0.0)
    cause = "the host blocks in synchronising calls" if blocks else "the host is busy between launches"
    title = f"No operator runs for {duration(stall_ns)} of the {facts.unit} ({percent(share)}): the time goes to Python"
    if facts.on_accelerator and idle.holds:
        title = (
            f"Rank {idle.rank}'s device idles {duration(stall_ns)} of its {duration(own_ns or 0)} ({percent(share)}) while "
            f"{cause}; the others wait for it in collectives, and their hosts are hardly faster"
        )
    elif facts.on_accelerator:
        title = f"The device idles {duration(stall_ns)} of the {facts.unit} ({percent(share)}) while {cause}"
    return Finding(
        id=ID,
        kind=KIND,
        title=title,
        evidence={**_evidence(idle, stall_ns, "breakdown"), **_of_queue(facts, idle)},
        recommendation=_recommendation(facts, idle, stall_ns, share, blocks),
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


def _of_queue(facts: Facts, idle: _Idle) -> dict[str, Any]:
    """How empty the launch queue was, and what the replay says of a host that takes no time."""
    found: dict[str, Any] = {}
    if idle.queue is not None:
        found["queue_empty_share"] = round(idle.queue.starved_ns / max(idle.queue.window_ns, 1), 4)
        found["last_runs_share"] = round(idle.queue.last_ns / max(idle.queue.window_ns, 1), 4)
        found["launch_to_start_ns"] = idle.queue.median_lead_ns
        found["kernel_ns"] = idle.queue.median_length_ns
    if idle.replayed is not None:
        found["gain_without_host_ns"] = facts.step_part_ns(idle.replayed.host)
    return found


def _recommendation(facts: Facts, idle: _Idle, stall_ns: int, share: float, blocks: bool) -> Recommendation:
    # Fewer launches: compilation joins elementwise chains, so between a fifth and most of the gaps go.
    # The low end also allows for what a profiler itself adds to the host.
    compiles = not blocks and not facts.compiled
    prediction = predict(
        facts,
        _at_most(facts, idle, stall_ns),
        (0.15, 0.45, 0.8),
        "host-caused idle time (no more than the replay gains without the host) × share that fewer launches and "
        "synchronisations remove",
        {"idle_share": round(share, 4)},
        change={"compute.compile": "blocks"} if compiles else None,
    )
    if blocks:
        return Recommendation(
            change={},
            why="Find what blocks: .item(), .cpu(), print(loss), torch.cuda.synchronize() or a copy from "
            "unpinned memory inside the step; read such values every few steps, non_blocking, instead.",
            numerics="unchanged",
            predicted=prediction,
        )
    if facts.compiled:
        whole = bool(facts.about("compile"))
        head = (
            "The model is compiled already:"
            if whole
            else "Part of the model is compiled already; for the rest,"
        )
        return Recommendation(
            change={},
            why=f"{head} move logging, metrics and tokenising out of the step, make the batch larger so that each "
            f"launch does more, or capture the step into a graph{'' if whole else '; or compile more of it'}.",
            numerics="unchanged",
            predicted=prediction,
        )
    if facts.trains is False:  # nothing that an optimizer could gain
        change: dict[str, Any] = {"compute.compile": "blocks"}
        why = "Compile the repeated blocks: fewer, longer kernels for the same work."
    else:
        change = {"compute.compile": "blocks", "compute.fuse": ["optimizer"]}
        why = "Compile the repeated blocks and fuse the optimizer: fewer, longer kernels for the same work."
    return Recommendation(
        change=change,
        why=why,
        numerics="reordered floating-point operations: losses agree to about 1e-6 in fp32; dropout masks differ from eager",
        predicted=prediction,
    )


def _at_most(facts: Facts, idle: _Idle, stall_ns: int) -> int:
    """No more than the step would gain did the host take no time at all between launches."""
    if idle.replayed is None:
        return stall_ns
    return min(stall_ns, facts.step_part_ns(max(idle.replayed.host, idle.replayed.blocking)))


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
