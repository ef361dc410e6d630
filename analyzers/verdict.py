"""One sentence and one place: what bounds a run, how sure, what to do, what it would gain.

The place is a point between three sides, for every rank and for the job:

* **computation**: the share of the step limited by arithmetic (matrix products, convolutions,
  attention, compiled kernels),
* **communication**: the share in exposed communication, waiting included,
* **memory**: the share limited by moving memory: exposed copies, elementwise and normalisation
  kernels, the optimizer.

The three are divided by their sum; idle time, the loader and Python belong to no side and are left
out. The job's point is the mean of its ranks' points, the hull holds one point a rank.
"""

from __future__ import annotations

from typing import Literal

from trine.analyzers.desync_words import healthy_words, statement
from trine.analyzers.findings import Facts
from trine.analyzers.findings._facts import MIN_WINDOW_NS, RankFacts, typical
from trine.analyzers.findings._kinds import by_class, work
from trine.analyzers.results import Finding, Verdict
from trine.analyzers.studies import result_of
from trine.analyzers.studies.desync import Desync
from trine.analyzers.studies.memory_owners import MemoryOwners
from trine.analyzers.studies.pipeline import Pipeline
from trine.analyzers.units import duration, interval, percent, size

__all__ = ["verdict"]

Point = tuple[float, float, float]

#: Share of the step in compute from which on a run without a fault counts as bound by computation.
COMPUTE_BOUND = 0.5
#: Steps that make a verdict sure, and those that make it fair.
SURE_STEPS = 10
FAIR_STEPS = 3
#: Share of the step at stake from which on a fault is clear with fewer.
CLEAR_SEVERITY = 0.3

#: Exposed communication, as a share of the step, that is said although no fault is found in it.
MUCH_EXPOSED = 0.25

#: How a verdict names each fault.
_BOUND = {
    "input-bound": "its input",
    "host-bound": "its host",
    "exposed-communication": "communication",
    "straggler": "a straggler",
    "optimizer-bound": "its optimizer",
    "memory-near-limit": "memory that is nearly full",
    "fragmentation": "fragmented memory",
    "memory-leak": "memory that only grows",
    "allocation-retries": "an allocator that struggles",
    "out-of-memory": "memory that ran out",
    "blocking-calls": "calls that wait for the device",
    "stage-imbalance": "uneven stages",
    "restarts": "failures",
}


#: Sources that know memory and nothing else.
_MEMORY_FORMATS = frozenset({"memory_snapshot", "memory_timeline"})


def verdict(facts: Facts, findings: tuple[Finding, ...]) -> Verdict:
    """Name what bounds the run. ``findings`` are sorted, the weightiest fault first."""
    points = tuple(point for rank in facts.ranks if (point := _point(rank)) is not None)
    centre = _mean(points) if points else None
    worst = next((finding for finding in findings if finding.kind == "fault"), None)
    sure = _confidence(facts, worst)
    best = next((finding for finding in findings if finding.kind == "opportunity"), None)
    if worst is not None and worst.id == "desync":
        # A job that stands still is not bound by anything: it never comes to an end.
        return Verdict(f"This job hangs: {_lower(worst.title)}.", worst.id, _told(worst), centre, points)
    if worst is not None and worst.id == "out-of-memory":
        # The failure itself is in the file; that takes no steps to be sure of.
        text = f"This run fails: {_lower(worst.title)}{_advice(facts, worst)}."
        return Verdict(text, worst.id, "high", centre, points)
    if worst is not None and worst.id == "memory-leak":
        steps = worst.evidence.get("steps", 0)
        sure = "high" if steps >= SURE_STEPS else "medium"
    if worst is not None:
        name = _BOUND.get(worst.id, worst.id)
        if worst.id == "host-bound" and len(facts.ranks) > 1:
            name = "its hosts"
        text = f"This run is held back by {name}: {_lower(worst.title)}{_advice(facts, worst)}."
        return Verdict(text, worst.id, sure, centre, points)
    compute = _compute_share(facts)
    if compute is None and (agreed := _dumps_agree(facts)) is not None:
        return Verdict(agreed, None, "medium", centre, points)
    if compute is None and (seen := _memory_alone(facts)) is not None:
        return Verdict(seen, None, "medium", centre, points)
    if compute is None:
        reason = _why_unknown(facts)
        return Verdict(f"What bounds this run cannot be said: {reason}.", None, "low", centre, points)
    bound = "computation" if compute >= COMPUTE_BOUND else None
    head = f"No fault found; {_seen(facts, compute)}"
    if best is not None:
        text = f"{head}. The best step from here: {_lower(best.title)}{_advice(facts, best)}."
    else:
        text = f"{head}, and no change that Trine knows would gain 5 % or more."
    return Verdict(text, bound, sure, centre, points)


def _seen(facts: Facts, compute: float) -> str:
    """Of a run without a fault: its computation, and much communication that this does not hide."""
    bound = ", which bounds it," if compute >= COMPUTE_BOUND else ""
    words = f"{percent(compute)} of the {facts.unit} is computation{bound}"
    exposed = _exposed_by_phase(facts)
    if exposed is not None and exposed >= MUCH_EXPOSED:
        return f"{words} and {percent(exposed)} communication that it does not hide"
    return words.removesuffix(",")


def _told(desync: Finding) -> Literal["high", "medium", "low"]:
    """How sure the study of dumps is: it needs no steps."""
    certainty = desync.evidence.get("certainty")
    return "high" if certainty == "high" else "medium" if certainty == "medium" else "low"


def _dumps_agree(facts: Facts) -> str | None:
    """Of a job of which dumps alone are known: that its ranks agree, and what was in flight."""
    dumps = result_of(facts.analysis, "desync", Desync)
    if dumps is None or dumps.stuck:
        return None
    noticed = [f"{statement(culprit)}." for culprit in dumps.culprits[:1]]
    return " ".join([f"{healthy_words(dumps)}.", *noticed, "Dumps alone say nothing of speed."])


def _memory_alone(facts: Facts) -> str | None:
    """Of a job of which the allocator's history alone is known: its peak, and what holds most of it."""
    memory = result_of(facts.analysis, "memory_owners", MemoryOwners)
    alone = all(rank.result.summary.format in _MEMORY_FORMATS for rank in facts.ranks)
    if memory is None or not memory.ranks or not alone:
        return None
    part = memory.ranks[0]
    at = max(range(len(part.totals)), key=lambda place: part.totals[place], default=0)
    held = sorted(
        ((level[at], name) for name, level in zip(part.categories, part.levels, strict=True)), reverse=True
    )
    shares = [
        f"{name.replace('_', ' ')} {percent(level / max(part.peak_bytes, 1))}"
        for level, name in held[:3]
        if level
    ]
    more = " or more" if part.lower_bound else ""
    text = f"Memory peaks at {size(part.peak_bytes)}{more}: {', '.join(shares)}"
    named = next((owned for owned in part.owners if owned.owner), None)
    if named is not None:
        text += f"; {named.owner} holds {size(named.bytes)} of it"
    return f"{text}. A snapshot of memory alone says nothing of speed."


def _lower(title: str) -> str:
    """A title inside a sentence; names such as ``AdamW`` and ``ZeRO-1`` keep their capitals."""
    first = title.split(" ", 1)[0]
    return title[0].lower() + title[1:] if first[1:].islower() else title


def _advice(facts: Facts, finding: Finding) -> str:
    """`` (…); do this, which would gain that``; empty where nothing is recommended."""
    recommendation = finding.recommendation
    if recommendation is None:
        return ""
    do = ", ".join(f"{key} = {value_text(value)}" for key, value in recommendation.change.items())
    text = f"; set {do}" if do else ""
    predicted = recommendation.predicted
    if predicted is None or predicted.gain_ns is None or not facts.step_ns:
        return text or "; see what to do by hand below"
    gain = predicted.gain_ns
    if gain.mid <= 0:
        return text
    lead = f"{text}, which would gain" if do else "; mending it would gain"
    # Some gains are of a mean step, with what only some steps do (a checkpoint): then the share is too.
    after = predicted.step_time_ns
    share = percent(gain.mid / (facts.step_ns if after is None else after.mid + gain.mid))
    return f"{lead} about {duration(gain.mid)} a {facts.unit} ({share}; {interval(gain.low, gain.high)})"


def value_text(value: object) -> str:
    """A configuration value as a Trine TOML file writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _confidence(facts: Facts, worst: Finding | None) -> Literal["high", "medium", "low"]:
    """High with many steps and all ranks; low with next to nothing."""
    source = facts.analysis.source
    errors = any(quality.severity == "error" for quality in facts.analysis.data_quality)
    steps = max((len(rank.durations) for rank in facts.ranks), default=0) or facts.steps
    if errors or steps < FAIR_STEPS:
        # A loss far above every threshold is seen without many steps.
        clear = not errors and steps > 0 and worst is not None and worst.severity >= CLEAR_SEVERITY
        return "medium" if clear else "low"
    return "high" if steps >= SURE_STEPS and not source.missing_ranks else "medium"


def _why_unknown(facts: Facts) -> str:
    unrecorded = next((rank.unrecorded for rank in facts.ranks if rank.unrecorded is not None), None)
    if unrecorded is not None:
        return unrecorded
    missing = next(
        (reason for rank in facts.ranks if (reason := rank.result.summary.breakdown_missing)), None
    )
    if missing:
        return missing.rstrip(".")
    exposed = _exposed_share(facts)
    if exposed is not None and exposed >= MUCH_EXPOSED:
        seen = f"{percent(exposed)} of the {facts.unit} is communication that no computation hides, but"
        if len(facts.ranks) < 2:
            return f"{seen} one rank alone cannot tell waiting from moving bytes; give it the traces of all ranks"
        if not any(part.matched for rank in facts.ranks if (part := rank.result.communication) is not None):
            return f"{seen} who waited for whom cannot be said, since the ranks' calls could not be matched (see data quality)"
        return (
            f"{seen} no single rank causes most of the waiting, and too few events were recorded to say more"
        )
    return "too few steps or events were recorded; give it a trace or a record of ten steps or more"


def _exposed_share(facts: Facts) -> float | None:
    """Exposed communication of the typical rank, from windows with too few events for anything else too."""
    shares = [
        breakdown.exposed_communication_ns / breakdown.window_ns
        for rank in facts.ranks
        if (breakdown := rank.result.summary.breakdown) is not None
        and breakdown.window_ns >= MIN_WINDOW_NS
        and rank.unrecorded is None
    ]
    return typical(shares, float)


def _exposed_by_phase(facts: Facts) -> float | None:
    """Exposed communication of the typical rank: from phases over all steps, else from the breakdown."""
    seen = facts.part(lambda rank: rank.phase("exposed_communication"))
    return seen.share if seen is not None else _exposed_share(facts)


def _compute_share(facts: Facts) -> float | None:
    """Compute of the typical rank: from phases over all steps, else from the breakdown."""
    forward = facts.part(lambda rank: rank.phase("forward"))
    backward = facts.part(lambda rank: rank.phase("backward"))
    if forward is not None and backward is not None:
        optimizer = facts.part(lambda rank: rank.phase("optimizer"))
        return forward.share + backward.share + (optimizer.share if optimizer is not None else 0.0)
    seen = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if seen is None and (pipeline := result_of(facts.analysis, "pipeline", Pipeline)) is not None:
        return 1 - pipeline.bubble_ratio
    return seen.share if seen is not None else None


def _point(rank: RankFacts) -> Point | None:
    """(computation, communication, memory) of one rank, summing to 1."""
    moving = _moving_share_of_compute(rank)
    forward, backward = rank.phase("forward"), rank.phase("backward")
    if forward is not None and backward is not None:
        copy, optimizer = rank.phase("copy"), rank.phase("optimizer")
        exposed = rank.phase("exposed_communication")
        compute = forward.share + backward.share
        sides = (
            compute * (1 - moving),
            exposed.share if exposed is not None else 0.0,
            compute * moving
            + (copy.share if copy is not None else 0.0)
            + (optimizer.share if optimizer is not None else 0.0),
        )
        return _normalised(sides)
    breakdown = rank.breakdown
    if breakdown is None:
        return None
    compute = float(breakdown.compute_ns)
    return _normalised(
        (
            compute * (1 - moving),
            float(breakdown.exposed_communication_ns),
            compute * moving + breakdown.exposed_copy_ns,
        )
    )


def _moving_share_of_compute(rank: RankFacts) -> float:
    """Of the kernels or operators seen, the share of time that only moves memory; 0 where none was seen."""
    classes = by_class(work(rank.result.summary))
    total = sum(classes.values())
    return (classes.get("elementwise", 0) + classes.get("optimizer", 0)) / total if total else 0.0


def _normalised(sides: Point) -> Point | None:
    total = sum(sides)
    return (sides[0] / total, sides[1] / total, sides[2] / total) if total > 0 else None


def _mean(points: tuple[Point, ...]) -> Point:
    count = len(points)
    return (
        sum(point[0] for point in points) / count,
        sum(point[1] for point in points) / count,
        sum(point[2] for point in points) / count,
    )
