"""Which changes are worth trying: what the analysis recommends, and what the runtime knows besides.

A recommendation may set keys of several techniques at once. Each technique is tried by itself, so that
what it gains can be told; the finding's prediction stands for it where the finding meant it alone.
Otherwise the prediction comes from timing the piece that it replaces, or from the measured α–β.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trine.analyzers.results import Analysis, Gain, RankResult
from trine.analyzers.units import duration, percent
from trine.optim import Config
from trine.optim._schema import spell
from trine.optim.techniques import refusals, techniques
from trine.optim.techniques.data_parallel import best_bucket_bytes
from trine.record.hardware import calibrated

__all__ = ["Candidate", "Skipped", "candidates", "spelled", "with_pieces"]

#: What compiling the sample's blocks costs once, from a cold cache (measured: 30 s on two CPU cores).
COMPILE_SECONDS = {"cpu": 30.0, "cuda": 40.0}
_MIB = 2**20
#: PyTorch's own: the first bucket and all others.
_DEFAULT_BUCKETS_MIB = (1.0, 25.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change to try. ``predicted`` is the gain a step (ns); ``basis`` says where it comes from."""

    name: str
    change: Mapping[str, Any]
    predicted: Gain | None
    basis: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A change that is not tried, and why."""

    change: str
    reason: str


def spelled(change: Mapping[str, Any]) -> str:
    """A change as it stands in a configuration file, in one line."""
    return ", ".join(f"{key} = {spell(value)}" for key, value in change.items())


def candidates(analysis: Analysis, steps: int, compile_anyway: bool) -> tuple[list[Candidate], list[Skipped]]:
    """Changes to try on this run and those left out. ``steps``: how many the tuned run will train."""
    found: dict[str, Candidate] = {}
    skipped: list[Skipped] = []
    for finding in analysis.findings:
        recommendation = finding.recommendation
        if recommendation is None or not recommendation.change:
            continue
        possible, refused = _possible(recommendation.change)
        skipped += refused
        groups = list(_by_technique(possible))
        alone = len(groups) == 1 and not refused
        gain = recommendation.predicted.gain_ns if recommendation.predicted else None
        for technique, change in groups:
            reason = _unwise(technique, change, gain, steps, analysis, compile_anyway)
            if reason:
                skipped.append(Skipped(spelled(change), reason))
            elif technique not in found or found[technique].predicted is None:
                basis = f"finding {finding.id}" if alone else "the piece timed alone"
                found[technique] = Candidate(spelled(change), change, gain if alone else None, basis)
    for technique, candidate, omission in _known_to_the_runtime(analysis):
        if technique in found:
            continue
        if candidate is not None:
            found[technique] = candidate
        elif omission is not None:
            skipped.append(omission)
    return list(found.values()), _once(skipped)


def _possible(change: Mapping[str, Any]) -> tuple[dict[str, Any], list[Skipped]]:
    """The part of a change that this version's runtime can apply, and the rest with its reasons."""
    reasons = refusals(Config().with_changes(change))
    refused = [Skipped(spelled({key: change[key]}), reasons[key]) for key in change if key in reasons]
    return {key: value for key, value in change.items() if key not in reasons}, refused


def _by_technique(change: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for technique in techniques():
        own = {key: value for key, value in change.items() if key in technique.KEYS}
        if own:
            yield technique.__name__.rpartition(".")[2], own


def _unwise(
    technique: str,
    change: Mapping[str, Any],
    gain: Gain | None,
    steps: int,
    analysis: Analysis,
    compile_anyway: bool,
) -> str | None:
    if technique == "accumulation":
        return "it would make a step of other samples, and the loss could not be compared"
    if technique == "compilation" and not compile_anyway:
        kind = _about(analysis, "device", "type") or "cpu"
        cost = COMPILE_SECONDS.get(str(kind), COMPILE_SECONDS["cpu"])
        if gain is None or gain.mid <= 0:
            return f"compiling costs about {cost:.0f} s, and no gain is predicted (--compile tries it)"
        pays_after = cost * 1e9 / gain.mid
        if pays_after > steps:
            return (
                f"compiling costs about {cost:.0f} s: at a predicted {duration(gain.mid)} a step it pays after "
                f"{pays_after:.0f} steps, and the demo trains {steps} (--compile tries it)"
            )
    return None


def _known_to_the_runtime(analysis: Analysis) -> Iterator[tuple[str, Candidate | None, Skipped | None]]:
    """What no finding has to say, because it is small or because only the program shows it."""
    piece = "the piece timed alone"
    if _about(analysis, "attention") in ("manual", "eager", "math"):
        change: dict[str, Any] = {"compute.attention": "sdpa"}
        yield "attention", Candidate(spelled(change), change, None, piece), None
    if _about(analysis, "optimizer", "implementation") not in ("fused", None):
        change = {"compute.fuse": ["optimizer"]}
        yield "fused_optimizer", Candidate(spelled(change), change, None, piece), None
    yield "data_parallel", *_bucket(analysis)
    dtype = {"precision.dtype": "bf16"}
    yield "autocast", None, Skipped(spelled(dtype), "no gain is predicted on this device")
    share = _phase_share(analysis, "data")
    if share is not None:
        reason = f"the step waits {percent(share)} for its batches"
        yield "loading", None, Skipped("data.workers", reason)


def _bucket(analysis: Analysis) -> tuple[Candidate | None, Skipped | None]:
    """The bucket size of the √ rule, with its gain by the same latency–bandwidth model."""
    change = "communication.bucket_mib"
    gradients = _about(analysis, "model", "gradient_bytes") or _about(analysis, "model", "parameter_bytes")
    if (analysis.source.world_size or 1) < 2 or not gradients:
        return None, None
    measured = calibrated(str(_about(analysis, "device", "name")))
    if measured is None or not measured.collective:
        return None, Skipped(change, "the all-reduce was not measured: trine hardware --calibrate")
    alpha, beta = float(measured.collective["alpha_s"]), float(measured.collective["bytes_per_s"])
    size = best_bucket_bytes(int(gradients), alpha, beta)
    first, cap = (mib * _MIB for mib in _DEFAULT_BUCKETS_MIB)
    last_now = min(cap, max(gradients - first, 0)) if gradients > first else gradients
    buckets_now, buckets_then = 1 + -(-max(gradients - first, 0) // cap), -(-gradients // size)
    gain_s = (last_now - size) / beta - (buckets_then - buckets_now) * alpha
    exposed = _per_step(analysis, "exposed_communication") or 0
    mid = round(min(max(gain_s * 1e9, 0), exposed))
    if mid == 0:
        return None, Skipped(change, f"{buckets_now:.0f} buckets by PyTorch's default are as good by α and β")
    keys = {"communication.bucket_mib": round(size / _MIB, 2), "communication.gradient_as_view": True}
    # Where hidden transfers take cores from compute, as on CPUs, nothing may be left of it.
    predicted = Gain(0, mid, max(mid, exposed))
    return Candidate(spelled(keys), keys, predicted, "α and β of this machine"), None


def with_pieces(found: list[Candidate], pieces: Mapping[str, Any]) -> list[Candidate]:
    """Candidates without a prediction get it from their timed piece: median before less median after."""
    return [
        replace(candidate, predicted=_gain_of(pieces[candidate.name]))
        if candidate.predicted is None and candidate.name in pieces
        else candidate
        for candidate in found
    ]


def _gain_of(piece: Mapping[str, Any]) -> Gain:
    """Quartiles against each other are the interval: a piece alone does not know the rest of the step."""
    before, after = (sorted(piece[key]) for key in ("before_s", "after_s"))

    def quantile(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(share * len(values)))]

    low = quantile(before, 0.25) - quantile(after, 0.75)
    mid = quantile(before, 0.5) - quantile(after, 0.5)
    high = quantile(before, 0.75) - quantile(after, 0.25)
    low, mid, high = sorted((low, mid, high))
    return Gain(round(low * 1e9), round(mid * 1e9), round(high * 1e9))


def _about(analysis: Analysis, *path: str) -> Any:
    """A fact of the first rank's metadata; ``None`` where it is missing."""
    value: Any = analysis.ranks[0].summary.metadata if analysis.ranks else None
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _per_step(analysis: Analysis, phase: str) -> int | None:
    """A phase's time a step (ns) on the rank where it is longest."""

    def of(rank: RankResult) -> int | None:
        phases, statistics = rank.summary.phases_ns, rank.summary.step_statistics
        if not phases or statistics is None or not statistics.count:
            return None
        return round(phases.get(phase, 0) / statistics.count)

    return max((value for rank in analysis.ranks if (value := of(rank)) is not None), default=None)


def _phase_share(analysis: Analysis, phase: str) -> float | None:
    spent = _per_step(analysis, phase)
    step = analysis.step_statistics.median_ns if analysis.step_statistics else None
    return spent / step if spent is not None and step else None


def _once(skipped: list[Skipped]) -> list[Skipped]:
    return list({each.change: each for each in reversed(skipped)}.values())[::-1]
