"""``straggler``: the same rank arrives last, step after step, and the others wait for it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from trine.analyzers.results import Finding, LateActivity, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.critical_path import CriticalPath
from trine.analyzers.units import duration, percent, rank_list

from ._facts import Facts, RankFacts
from ._gain import predict
from ._pipelines import may_be_bubble
from ._waits import LATE_SHARE, Late, late_ranks, latest

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "straggler"
KIND: Literal["fault"] = "fault"

#: What a late rank was doing → (in words, configuration change, what to do).
REMEDIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "loader": (
        "in its loader",
        {"data.workers": 4, "data.prefetch": 4},
        "Load that rank's batches ahead, and see whether its shard or its disk is slower than the others'.",
    ),
    "compute": (
        "computing",
        {},
        (
            "Compare that rank's device (clock, temperature, other jobs) and its share of the work (sequence lengths, "
            "experts, table rows, stages) with the others'."
        ),
    ),
    "slower": (
        "slower in forward, backward and optimizer alike",
        {},
        "Its processor or device is slower or shared: look at clocks, temperature and other processes there.",
    ),
    "garbage_collection": (
        "in Python's garbage collector",
        {},
        "Call gc.freeze() after set-up and gc.disable(), then gc.collect() on all ranks at the same step.",
    ),
    "python": (
        "in Python code outside every operator",
        {},
        "Look for what only this rank does in the step: logging, checkpointing, evaluation, sleeping.",
    ),
    "copy": (
        "copying",
        {"data.pin_memory": True},
        "Pin the batch's memory and copy non_blocking.",
    ),
    "launching": (
        "launching work",
        {},
        "Its host launches more slowly than the others': look for other processes and garbage collection there.",
    ),
}
#: A rank whose forward, backward and optimizer all take at least this many times the others' ...
SLOWER_TIMES = 1.15
#: ... and alike, within this factor, has a slower processor, not more work.
ALIKE_TIMES = 2.0

#: Share of the lateness that a change of configuration takes away; mending a cause by hand takes it all
#: away at best.
SAVED_BY_CHANGE = (0.3, 0.7, 1.0)
SAVED_BY_HAND = (0.5, 0.85, 1.0)

#: Where the replay gains less than this part of the lateness, other ranks are next in line, and that is said ...
NEXT_IN_LINE = 0.7
#: ... if the replay of the job as it was is off by no more than this.
MOST_REPLAY_ERROR = 0.05

#: Remedies speak of one rank; how they say it of several.
_PLURAL = (
    ("Its host launches", "Their hosts launch"),
    ("Its processor or device is", "Their processors or devices are"),
    ("that rank's device", "those ranks' devices"),
    ("that rank's", "those ranks'"),
    ("its shard or its disk is slower", "their shards or disks are slower"),
    ("its share", "their share"),
    ("only this rank does", "only these ranks do"),
    (
        "on that rank to see what it does before it arrives",
        "on those ranks to see what they do before they arrive",
    ),
)

_UNKNOWN: tuple[str, dict[str, Any], str] = (
    "",
    {},
    "Record a deep window on that rank to see what it does before it arrives.",
)


def _doing(facts: Facts, rank: RankFacts) -> LateActivity | None:
    """What the collectives say it did meanwhile; else the phase that exceeds the others' most."""
    others = [other for other in facts.ranks if other is not rank and other.phases]
    if (slower := _slower(rank, others)) is not None:
        return slower
    communication = rank.result.communication
    if communication is not None and communication.late_doing:
        best = max(communication.late_doing, key=lambda activity: activity.total_ns)
        if best.activity in REMEDIES:
            return best
    names = {"data": "loader", "copy": "copy", "forward": "compute", "backward": "compute"}
    names |= {"optimizer": "compute", "other": "python"}
    if not rank.phases or not others:
        return None
    excess = {
        phase: float(np.median(rank.phases[phase]))
        - float(np.median([np.median(other.phases[phase]) for other in others]))
        for phase in names
    }
    worst = max(excess, key=lambda phase: excess[phase])
    total = round(excess[worst] * len(rank.durations))
    return LateActivity(names[worst], total, f"phase {worst}") if total > 0 else None


def _slower(rank: RankFacts, others: list[RankFacts]) -> LateActivity | None:
    """Every kind of work takes longer on this rank, in proportion: the processor, not the program."""
    if not rank.phases or not others:
        return None
    own = {name: float(np.median(values)) for name, values in rank.phases.items()}
    usual = {name: float(np.median([np.median(o.phases[name]) for o in others])) for name in own}
    working = ("forward", "backward", "optimizer")
    if min(usual[name] for name in working) <= 0:
        return None
    times = [own[name] / usual[name] for name in working]
    more = sum(own[name] - usual[name] for name in working)
    beside = max(own[name] - usual[name] for name in ("data", "copy", "other"))
    if min(times) < SLOWER_TIMES or max(times) > ALIKE_TIMES * min(times) or beside > more:
        return None
    factor = f"{min(times):.1f} to {max(times):.1f} times the others'"
    return LateActivity("slower", round(more * len(rank.durations)), factor)


def find(facts: Facts) -> Finding | None:
    """One or more ranks pass every threshold of lateness."""
    late = late_ranks(facts)
    if not late or facts.step_ns is None or may_be_bubble(facts):
        return None
    by_rank = {rank.rank: rank for rank in facts.ranks}
    doing = {culprit.rank: _doing(facts, by_rank[culprit.rank]) for culprit in late}
    # Ranks late in turn add up; none can give back more than the step.
    cost_ns = min(sum(culprit.cost_ns for culprit in late), facts.step_ns)
    first = doing[late[0].rank]
    words, change, why = REMEDIES.get(first.activity, _UNKNOWN) if first is not None else _UNKNOWN
    ranks = [culprit.rank for culprit in late]
    if len(ranks) > 1:
        why = _of_several(why)
    example = f" ({first.example})" if first is not None and first.example else ""
    replayed_ns = _replayed(facts, ranks)
    stake_ns = cost_ns if replayed_ns is None else min(cost_ns, replayed_ns)
    prediction = _predict(facts, stake_ns, cost_ns, SAVED_BY_CHANGE if change else SAVED_BY_HAND)
    title = _title(facts, ranks, cost_ns, stake_ns)
    if stake_ns < NEXT_IN_LINE * cost_ns:
        why += (
            f" Do not expect all of it back: with nobody waiting for {rank_list(ranks)} the {facts.unit} would be "
            f"{duration(stake_ns)} shorter, since the next ranks' own work then decides it (see the critical path)."
        )
    return Finding(
        id=ID,
        kind=KIND,
        title=title + (f": {words}{example}" if words else ""),
        evidence={
            "ranks": [_evidence(culprit, doing[culprit.rank], by_rank[culprit.rank]) for culprit in late],
            "cost_ns": cost_ns,
            "replayed_gain_ns": replayed_ns,
            "waited_in": _waited_in(facts, set(ranks)),
        },
        recommendation=Recommendation(dict(change), why, "unchanged", prediction),
        severity=stake_ns / facts.step_ns,
    )


def _predict(
    facts: Facts, stake_ns: int, cost_ns: int, saved: tuple[float, float, float]
) -> Prediction | None:
    """With every rank as fast as the median one, where the replayed steps show that some are slower; else by ``saved``."""

    def predicted(change: dict[str, Any] | None) -> Prediction | None:
        return predict(
            facts,
            stake_ns,
            saved,
            "lateness behind the second last, as far as the others' waiting is exposed, and no more than the job replayed "
            "without waiting for them gains, × share that goes away",
            {"lateness_share": round(cost_ns / (facts.step_ns or cost_ns), 4)},
            change=change,
            most_ns=stake_ns,
        )

    found = predicted({"straggler": False})
    shown = found is not None and found.gain_ns is not None and found.gain_ns.mid > 0
    return found if shown else predicted(None)


def _of_several(why: str) -> str:
    """What to do, of more than one rank."""
    for one, several in _PLURAL:
        why = why.replace(one, several)
    return why


def _title(facts: Facts, ranks: list[int], cost_ns: int, stake_ns: int) -> str:
    one = len(ranks) == 1
    who = f"{rank_list(ranks).capitalize()} {'arrives' if one else 'arrive'} late and "
    cost = f"{duration(cost_ns)} of each {facts.unit} ({percent(cost_ns / (facts.step_ns or cost_ns))})"
    if stake_ns >= NEXT_IN_LINE * cost_ns:
        return f"{who}cost{'s' if one else ''} the others {cost}"
    least = f"the {facts.unit} itself only {duration(stake_ns)}"
    return f"{who}make{'s' if one else ''} the others wait {cost}, which costs {least}"


def _replayed(facts: Facts, ranks: list[int]) -> int | None:
    """How much shorter a step of the trace is, replayed with nobody waiting for these ranks; None where that was not
    replayed. A record has far more steps than its deep windows show, and its phases tell."""
    path = result_of(facts.analysis, "critical_path", CriticalPath)
    recorded = any(rank.result.summary.format == "trine" for rank in facts.ranks)
    if path is None or path.job is None or recorded or facts.unit != "step":
        return None
    job = path.job
    gains = {one.ranks: one.gain_ns for one in job.without}
    gains |= {(one.rank,): one.gain_ns for one in job.ranks if one.gain_ns is not None}
    gain_ns = gains.get(tuple(sorted(ranks)))
    if gain_ns is None or job.replay_error is None or abs(job.replay_error) > MOST_REPLAY_ERROR:
        return None
    return round(gain_ns / max(path.ranks[0].step_count, 1))


def _evidence(late: Late, doing: LateActivity | None, rank: RankFacts) -> dict[str, Any]:
    communication = rank.result.communication
    return {
        "rank": late.rank,
        "host": rank.result.summary.host_name,
        "cost_ns": late.cost_ns,
        "caused_wait_ns": communication.caused_wait_ns if communication else None,
        "share_of_all_waiting": None if late.caused is None else round(late.caused, 4),
        "share_of_steps_behind": None if late.consistent is None else round(late.consistent, 4),
        "last_in": communication.last_in if communication else None,
        "matched": communication.matched if communication else None,
        "doing": doing.activity if doing is not None else None,
        "example": doing.example if doing is not None else None,
    }


def _waited_in(facts: Facts, culprits: set[int]) -> list[dict[str, Any]]:
    """The three kinds of collective in which the others waited longest for the late ranks."""
    rows = [
        (sum(ns for rank, ns in row.caused_by.items() if rank in culprits), row)
        for row in facts.analysis.collectives
    ]
    rows = sorted((pair for pair in rows if pair[0] > 0), key=lambda pair: -pair[0])[:3]
    return [{"op": row.op, "group": row.group, "wait_ns": wait} for wait, row in rows]


def healthy(facts: Facts) -> str | None:
    """The costliest rank's lateness, when all ranks could be compared and none is late."""
    worst = latest(facts)
    if worst is None or not facts.step_ns or late_ranks(facts) or may_be_bubble(facts):
        return None
    share = worst.cost_ns / facts.step_ns
    if share >= LATE_SHARE:
        return f"Stragglers: no rank is late time after time; ranks take turns (at most {percent(share)} of the {facts.unit})"
    return f"Stragglers: the latest rank ({worst.rank}) costs the others {percent(share)} of the {facts.unit} (fault from {percent(LATE_SHARE)})"
