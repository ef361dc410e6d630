"""Who makes the others wait, and what is left of exposed communication once that is taken out.

Kept apart from the two rules that speak of it (``straggler``, ``exposed-communication``), so that a
wait which a rank causes is never counted as bandwidth too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.analyzers.results import Communication

from ._facts import MIN_STEPS, Facts, RankFacts, typical

__all__ = ["LATE_SHARE", "Late", "Split", "late_ranks", "latest", "split_exposed"]

#: A rank is late when it costs the others at least this share of every step ...
LATE_SHARE = 0.10
#: ... causes at least this share of all waiting, and this many times its even share ...
CAUSED_SHARE = 0.25
CAUSED_TIMES_EVEN = 1.5
#: ... and is behind in at least this share of the steady steps (chance alone gives half, with two ranks).
CONSISTENT = 0.65
#: On CPUs ranks share cores with each other and with everything else, and take turns at being late.
#: Where too few steps are marked to tell a turn from a habit, one rank must cause most of all waiting.
CPU_CAUSED_SHARE = 0.70
#: Exposed communication in the phases below which they saw none of it.
SEEN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that makes the others wait. ``cost_ns`` is per step: how much sooner the others would go
    on if it were as fast as the second last. ``caused`` is its share of all waiting (0..1) or None
    where collectives could not be matched; ``consistent`` the share of steps it was behind in."""

    rank: int
    cost_ns: int
    caused: float | None
    consistent: float | None


@dataclass(frozen=True, slots=True)
class Split:
    """Exposed communication of the typical rank as shares of the step: waiting, moving bytes; both
    None where the files at hand cannot tell them apart."""

    exposed: float
    wait: float | None
    transfer: float | None
    basis: str


def split_exposed(facts: Facts) -> Split | None:
    """Exposed communication on the typical rank, split in proportion to matched wait and transfer.

    A wait and a transfer hide behind compute alike, so the exposed part is split as the whole is. Each
    half is the lower median over ranks: a straggler waits for nobody.
    """
    exposed = facts.part(lambda rank: rank.exposed)
    if exposed is None:
        return None
    known = [
        (part.share * fraction, part.share * (1 - fraction))
        for rank in facts.ranks
        if (part := rank.exposed) is not None and (fraction := rank.wait_fraction) is not None
    ]
    if len(known) < 2:
        return Split(exposed.share, None, None, exposed.basis)
    wait = typical([wait for wait, _ in known], float)
    transfer = typical([transfer for _, transfer in known], float)
    return Split(exposed.share, wait, transfer, exposed.basis)


def _behind(facts: Facts) -> dict[int, tuple[float, float]]:
    """rank → (median ns per step that the others are exposed longer than it, share of steps that holds).

    Where all meet in every step, the last to arrive waits least: what the least waiting of the others
    waits more than it is what it cost them. A median over steady steps, so warm-up does not count.
    """
    known = [rank for rank in facts.ranks if len(rank.durations) >= MIN_STEPS]
    if len(known) < 2:
        return {}
    steps = known[0].indexes
    for rank in known[1:]:
        steps = np.intersect1d(steps, rank.indexes)
    if len(steps) < MIN_STEPS:
        return {}
    exposed = np.array(
        [rank.phases["exposed_communication"][np.searchsorted(rank.indexes, steps)] for rank in known]
    )
    # Where phases show next to no exposed communication anywhere they cannot say who waited: FSDP's waits
    # lie inside the forward and the backward pass.
    if float(exposed.mean(axis=1).max()) < SEEN_SHARE * (facts.step_ns or 0):
        return {}
    # The least of the others is the least of all, but for the rank that holds it: there, the second.
    lowest, second = np.partition(exposed, 1, axis=0)[:2]
    holder = np.argmin(exposed, axis=0)
    found = {}
    for row, rank in enumerate(known):
        more = np.where(holder == row, second, lowest) - exposed[row]
        found[rank.rank] = (float(np.median(more)), float(np.mean(more > 0)))
    return found


def _exposed_waits(facts: Facts) -> dict[int, float]:
    """rank → exposed waiting, ns per step."""
    return {
        rank.rank: part.share * fraction * (facts.step_ns or 0)
        for rank in facts.ranks
        if (part := rank.exposed) is not None and (fraction := rank.wait_fraction) is not None
    }


def _lateness(
    facts: Facts,
    rank: RankFacts,
    total_caused: float,
    behind: tuple[float, float] | None,
    waited: float | None,
) -> Late | None:
    """What collectives, phases and the others' waiting say of a rank, where they agree: the least of them."""
    communication = rank.result.communication
    costs: list[float] = []
    caused = None
    if communication is not None and communication.matched > 0:
        own = _own(communication)
        costs.append(own * communication.lateness_ns / max(_steps_of(facts, rank), 1))
        caused = own * communication.caused_wait_ns / total_caused if total_caused > 0 else None
    if behind is not None:
        costs.append(max(behind[0], 0.0))
    # Overlapping waits are summed by the collective; the step feels no more than what was exposed.
    if waited is not None:
        costs.append(waited)
    if not costs:
        return None
    return Late(rank.rank, round(min(costs)), caused, behind[1] if behind is not None else None)


def _own(communication: Communication) -> float:
    """Share of a rank's lateness that is its own, not passed on from another group's call that it waited in."""
    waited = sum(late.total_ns for late in communication.late_doing if late.activity == "waiting")
    return 1 - waited / communication.lateness_ns if waited else 1.0


def _steps_of(facts: Facts, rank: RankFacts) -> int:
    if facts.unit == "window":
        return 1
    steps = rank.result.summary.steps
    return len(steps) if steps is not None and len(steps) else max(facts.steps, 1)


def _all_late(facts: Facts) -> list[Late]:
    found: list[Late] | None = facts.memo.get("late")
    if found is None:
        found = facts.memo["late"] = _work_out_late(facts)
    return found


def _work_out_late(facts: Facts) -> list[Late]:
    if facts.step_ns is None or len(facts.ranks) < 2:
        return []
    total = sum(
        _own(part) * part.caused_wait_ns for r in facts.ranks if (part := r.result.communication) is not None
    )
    behind, waits = _behind(facts), _exposed_waits(facts)
    longest = sorted(waits.items(), key=lambda pair: -pair[1])[:2]
    found = []
    for rank in facts.ranks:
        # The longest wait of another rank.
        waited = next((ns for other, ns in longest if other != rank.rank), None)
        late = _lateness(facts, rank, total, behind.get(rank.rank), waited)
        if late is not None:
            found.append(late)
    return found


def late_ranks(facts: Facts) -> list[Late]:
    """Ranks that are late by every threshold above, the costliest first."""
    least = max(CAUSED_SHARE, min(CAUSED_TIMES_EVEN / max(len(facts.ranks), 1), 0.75))
    noisy = facts.on_accelerator is False
    found = [
        late
        for late in _all_late(facts)
        if late.cost_ns >= LATE_SHARE * (facts.step_ns or 0)
        and (
            late.caused is None
            or late.caused >= (CPU_CAUSED_SHARE if noisy and late.consistent is None else least)
        )
        and (late.consistent is None or late.consistent >= CONSISTENT)
    ]
    return sorted(found, key=lambda late: -late.cost_ns)


def latest(facts: Facts) -> Late | None:
    """The rank that costs the others most, whether or not it is a fault."""
    return max(_all_late(facts), key=lambda late: late.cost_ns, default=None)
