"""``blocking-calls``: the host stops to wait for the device, again and again, and the device then waits for the host.

A blocking call costs more than its own return: while it waits, nothing is launched, so the device runs dry
behind it. The replay of the critical path without these waits says by how much, so this is what
``host-bound`` must leave to it.
"""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies.critical_path import Entry
from trine.analyzers.units import duration, percent

from ._blocking import Replayed, blocking
from ._facts import Facts
from ._gain import predict

__all__ = ["ID", "KIND", "SHARE", "find", "healthy"]

ID = "blocking-calls"
KIND: Literal["fault"] = "fault"

#: Share of the step that the replay gains without their waits, from which on it is a fault.
SHARE = 0.08
#: A call that blocks less than once a step (a checkpoint, a print now and then) is no habit.
CALLS_A_STEP = 1.0
#: Share of the stall that idle time during the calls must make for the table of idle time to speak for itself.
IDLE_WITHIN = 0.5
#: Calls that are named.
MOST_NAMED = 3


def found_in(facts: Facts) -> Replayed | None:
    """The typical rank's replay where blocking calls are a fault, else None."""
    replayed = blocking(facts)
    if replayed is None or replayed.blocking < SHARE:
        return None
    often = sum(entry.count for entry in replayed.calls if entry.gain_ns)
    return replayed if often >= CALLS_A_STEP * max(replayed.steps, 1) else None


def find(facts: Facts) -> Finding | None:
    """Calls without whose waits the step would be shorter by :data:`SHARE` or more."""
    replayed = found_in(facts)
    if replayed is None:
        return None
    named = [entry for entry in replayed.calls if entry.gain_ns][:MOST_NAMED]
    stall_ns = facts.step_part_ns(replayed.blocking)
    most = named[0]
    where = f" in {most.where}" if most.where else ""
    times = round(sum(entry.count for entry in replayed.calls) / max(replayed.steps, 1))
    return Finding(
        id=ID,
        kind=KIND,
        title=f"The host blocks {times} time{'' if times == 1 else 's'} a {facts.unit} and costs {duration(stall_ns)} of it "
        f"({percent(replayed.blocking)}): mostly {most.name}{where}",
        evidence={
            "gain_share": round(replayed.blocking, 4),
            "calls_per_step": round(sum(entry.count for entry in replayed.calls) / max(replayed.steps, 1), 1),
            "calls": [_said(entry, replayed.steps) for entry in named],
            "typical_rank": replayed.rank,
            "basis": "replay of the critical path",
        },
        recommendation=Recommendation(
            change={"data.pin_memory": True} if _copies_in(most) else {},
            why=" ".join(filter(None, (_why(most), _beside_the_table(facts, replayed.rank, stall_ns)))),
            numerics="unchanged",
            predicted=predict(
                facts,
                stall_ns,
                (0.4, 0.8, 1.0),
                "step − step replayed without the waits × share of them that can go",
                {"gain_share": round(replayed.blocking, 4)},
            ),
        ),
        severity=replayed.blocking,
    )


def _said(entry: Entry, steps: int) -> dict[str, Any]:
    return {
        "name": entry.name,
        "where": entry.where,
        "calls": entry.count,
        "blocked_ns": round(entry.total_ns / max(steps, 1)),
        "gain_ns": round((entry.gain_ns or 0) / max(steps, 1)),
    }


def _copies_in(entry: Entry) -> bool:
    """Whether the call brings data to the device from memory that is not pinned."""
    return "Memcpy" in entry.name and not _reads_back(entry)


def _reads_back(entry: Entry) -> bool:
    return any(
        name in entry.name for name in ("_local_scalar_dense", "item", "DtoH", "nonzero", "is_nonzero")
    )


def _why(entry: Entry) -> str:
    if _copies_in(entry):
        return (
            "Pin the loader's memory and copy with non_blocking=True: a copy from pageable memory holds the host "
            "until the device gets to it."
        )
    if _reads_back(entry):
        return (
            "Read values back every few steps, or later: .item(), .cpu(), float(loss), print(loss) and a condition on "
            "a tensor all wait until the device has caught up. Keep running sums on the device."
        )
    return (
        "Take the waiting call out of the step, or do it every few steps: torch.cuda.synchronize(), event.synchronize(), "
        ".item() and .cpu() stop launching until the device has caught up."
    )


def _beside_the_table(facts: Facts, rank: int, stall_ns: int) -> str:
    """How the replay and the table of idle time agree: the device works while a call waits, and idles after it.

    Empty where the table itself counts most of the stall under blocking calls."""
    found = next((one for one in facts.ranks if one.rank == rank), None)
    if found is None or found.breakdown is None:
        return ""
    idle, steps = found.breakdown.idle, max(len(found.breakdown.steps), 1)
    if idle.sync / steps >= IDLE_WITHIN * stall_ns:
        return ""
    return (
        "While a call waits the device still works; it runs dry once the call returns, until the host has launched again. "
        f"So the table of idle time counts this mostly under the host (rank {rank}: {duration(idle.host)}) and not under blocking "
        f"calls ({duration(idle.sync)}), which are only what it idles while the host still waits."
    )


def healthy(facts: Facts) -> str | None:
    """What blocking calls cost, when the replay tells and it is no fault."""
    replayed = blocking(facts)
    if replayed is None or found_in(facts) is not None or replayed.blocking >= SHARE:
        return None
    return f"Blocking calls: {percent(max(replayed.blocking, 0.0))} of the {facts.unit} would go without their waits (fault from {percent(SHARE)})"
