"""Who makes the others wait, and what is left of exposed communication once that is taken out.

Kept apart from the two rules that speak of it (``straggler``, ``exposed-communication``), so that a
wait which a rank causes is never counted as bandwidth too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._facts import MIN_STEPS, Facts, RankFacts, typical

__all__ = ["LATE_SHARE", "Late", "Split", "late_ranks", "latest", "split_exposed"]

#: A rank is late when it costs the others at least this share of every step ...
LATE_SHARE = 0.10
#: ... causes at least this share of all waiting, and this many times its even share ...
CAUSED_SHARE = 0.25
CAUSED_TIMES_EVEN = 1.5
#: ... and is behind in at least this share of the steady steps (chance alone gives half, with two ranks).
CONSISTENT = 0.75
#: On CPUs ranks share cores with each other and with everything else, and take turns at being late.
#: Where too few steps are marked to tell a turn from a habit, one rank must cause most of all waiting.
CPU_CAUSED_SHARE = 0.70


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


def _behind(facts: Facts, rank: RankFacts) -> tuple[float, float] | None:
    """(median ns per step that the others are exposed longer than ``rank``, share of steps that holds).

    Where all meet in every step, the last to arrive waits least: what the least waiting of the others
    waits more than it is what it cost them. A median over steady steps, so warm-up does not count.
    """
    if len(rank.durations) < MIN_STEPS:
        return None
    others = [other for other in facts.ranks if other is not rank and len(other.durations)]
    common = set(rank.indexes.tolist()).intersection(*(other.indexes.tolist() for other in others))
    if not others or len(common) < MIN_STEPS:
        return None
    steps = np.array(sorted(common))
    own = _exposed_in(rank, steps)
    least = np.min([_exposed_in(other, steps) for other in others], axis=0)
    # Ranks whose phases show no exposed communication at all cannot say who waited.
    if not least.any():
        return None
    return float(np.median(least - own)), float(np.mean(least > own))


def _exposed_in(rank: RankFacts, steps: np.ndarray) -> np.ndarray:
    return np.asarray(rank.phases["exposed_communication"][np.searchsorted(rank.indexes, steps)])


def _lateness(facts: Facts, rank: RankFacts, total_caused: int) -> Late | None:
    """What collectives and phases say of a rank, where they agree: the smaller cost of the two."""
    communication = rank.result.communication
    matched = communication is not None and communication.matched > 0
    behind = _behind(facts, rank)
    costs: list[float] = []
    if matched and communication is not None:
        costs.append(communication.lateness_ns / max(_steps_of(facts, rank), 1))
    if behind is not None:
        costs.append(max(behind[0], 0.0))
    waits = [
        part.share * fraction * (facts.step_ns or 0)
        for other in facts.ranks
        if other is not rank
        and (part := other.exposed) is not None
        and (fraction := other.wait_fraction) is not None
    ]
    # Overlapping waits are summed by the collective; the step feels no more than what was exposed.
    if waits:
        costs.append(max(waits))
    if not costs:
        return None
    caused = None
    if matched and communication is not None and total_caused > 0:
        caused = communication.caused_wait_ns / total_caused
    return Late(rank.rank, round(min(costs)), caused, behind[1] if behind is not None else None)


def _steps_of(facts: Facts, rank: RankFacts) -> int:
    if facts.unit == "window":
        return 1
    steps = rank.result.summary.steps
    return len(steps) if steps is not None and len(steps) else max(facts.steps, 1)


def _all_late(facts: Facts) -> list[Late]:
    if facts.step_ns is None or len(facts.ranks) < 2:
        return []
    total = sum(r.result.communication.caused_wait_ns for r in facts.ranks if r.result.communication)
    return [late for rank in facts.ranks if (late := _lateness(facts, rank, total)) is not None]


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
