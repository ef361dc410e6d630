"""The field's own order of work: one device first, then memory, layout, balance and scale.

Each item says what it saw, or that it cannot be said, and what comes next. ``unknown`` is an answer; but of a source
that holds no time (a dump, a snapshot, a schedule) only what it can say is listed.

Beside the summary it reads the studies: kernels for the first item, groups for the layout, the pipeline's bubble and
the owners of memory for the balance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trine.analyzers.findings import Facts
from trine.analyzers.findings._facts import RankFacts
from trine.analyzers.findings._frees import zero
from trine.analyzers.findings._memory import fullest
from trine.analyzers.findings._waits import latest, split_exposed
from trine.analyzers.findings.exposed_communication import threshold
from trine.analyzers.planned import is_simulated
from trine.analyzers.results import CheckItem, Finding
from trine.analyzers.studies import result_of
from trine.analyzers.studies.groups import GroupsResult
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.studies.pipeline import Pipeline
from trine.analyzers.units import percent, rank_list, size

__all__ = ["checklist"]

State = Literal["pass", "fail", "unknown"]

_RECORD = "Record with trine.profile(model=…)."
_CALIBRATE = "Run trine hardware --calibrate on the device."

#: Model FLOPs utilisation that one device should reach.
MFU = 0.50
#: Replicated state below this share of a device's memory is nothing to shard.
REPLICATED_SHARE = 0.10
#: Peak over capacity above which a layout does not fit its model.
FITS_SHARE = 0.92
#: Spread of peaks over ranks that still counts as balance. Of exposed communication, waits included, that is what
#: ``exposed-communication`` bears of bytes alone: one limit for both, so that the list never fails what the verdict passes.
SPREAD_SHARE = 0.15
#: Bubble beyond the schedule's ideal that is still balance.
BUBBLE_EXCESS = 0.10
#: A tensor group may be halved where the peak, doubled, would still fit, and its communication costs this much.
ROOMY_SHARE = 0.45
TENSOR_SHARE = 0.10
#: Below this a run cannot scale linearly, whatever other device counts would show.
LINEAR_BOUND = 0.80


def checklist(facts: Facts, findings: tuple[Finding, ...]) -> tuple[CheckItem, ...]:
    """The five items, in order; of an untimed source or a plan those that it can say."""
    items = (_mfu(facts, findings), _zero(facts), _layout(facts), _balance(facts, findings), _scaling(facts))
    if is_simulated(facts.metadata):
        return tuple(item for item in items if item.state != "unknown")
    if facts.analysis.is_timed:
        return items
    sayable = {"layout-fits-model", "balance"}
    return tuple(item for item in items if item.id in sayable and item.state != "unknown")


def _mfu(facts: Facts, findings: tuple[Finding, ...]) -> CheckItem:
    id, title = "single-device-mfu", "One device works at more than half its peak (MFU)"
    mfu = facts.analysis.mfu
    known = [] if mfu is None else [mfu.value] if mfu.value is not None else list(mfu.range.values())
    known = [value for value in known if value is not None]
    if not known or mfu is None:
        missing = "no model FLOPs, no step time or no peak of the device is known"
        said = next((note.message for note in facts.analysis.data_quality if note.id == "no-mfu"), None)
        words = said or f"MFU cannot be said: {missing}"
        kernels = _kernels(facts)
        if kernels:
            words = f"{'; '.join(kernels)}; {words}"
        return CheckItem(id, title, "unknown", words, _measure(facts))
    low, high = min(known), max(known)
    words = percent(low) if low == high else f"{percent(low)} to {percent(high)}, by convention"
    named = f" ({mfu.convention})" if mfu.convention and mfu.value is not None else ""
    if low >= MFU:
        return CheckItem(id, title, "pass", f"MFU {words}{named}", "Go on to memory and layout.")
    keys = [
        key
        for finding in findings
        if finding.recommendation is not None
        for key in finding.recommendation.change
        if key.startswith(("precision.", "compute.", "data."))
    ]
    cure = f"Start with {', '.join(dict.fromkeys(keys))}." if keys else "Look at precision and fused kernels."
    evidence = "; ".join([f"MFU {words}{named}", *_kernels(facts)])
    state: State = "fail" if high < MFU else "unknown"
    if state == "unknown":
        cure = "Choose a convention with --convention; they differ on either side of one half."
    return CheckItem(id, title, state, evidence, cure)


def _measure(facts: Facts) -> str:
    """What to record or measure, so that MFU can be said: only what is not known yet."""
    needed = []
    if not any(rank.metadata.get("flops") for rank in facts.ranks):
        needed.append(_RECORD)
    if not facts.analysis.hardware.peak_flops_per_s:
        needed.append(_know_device(facts))
    return " ".join(dict.fromkeys(needed)) or "Record ten steps or more with trine.profile."


def _know_device(facts: Facts) -> str:
    """How to know what a device has; a source that names none must be recorded first."""
    return _CALIBRATE if facts.analysis.hardware.name else _RECORD


def _kernels(facts: Facts) -> list[str]:
    """What kernels say of one device's use: distance to the roofline, tensor cores, short kernels."""
    found = result_of(facts.analysis, "kernel_efficiency", KernelEfficiency)
    if found is None or found.basis != "device" or not found.total_ns:
        return []
    said = []
    if found.roofline_ns is not None and found.roofline_ns[0]:
        took, least = found.roofline_ns
        said.append(f"operators known from their shapes reach {percent(least / took)} of the roofline")
    known = sum(ns for state, ns in found.products.items() if state in ("used", "unused"))
    if known:
        said.append(
            f"{percent(found.products.get('used', 0) / known)} of the products' time is on tensor cores"
        )
    return said


def _zero(facts: Facts) -> CheckItem:
    id, title = "zero-where-replicated", "What every rank would keep a copy of is sharded (ZeRO)"
    kind = facts.about("data_parallel", "kind")
    if facts.world < 2:
        return CheckItem(id, title, "pass", "one rank: nothing is replicated", "Go on to the layout.")
    if kind is None and facts.about("model", "class") is not None:
        # Recorded, and none of PyTorch's wrappers was in what was given as the model.
        evidence = "the recorded model is wrapped by neither DDP nor FSDP, so how parameters are distributed is not known"
        cure = "Give trine.profile the wrapped model, as the loop calls it."
        return CheckItem(id, title, "unknown", evidence, cure)
    if kind is None:
        return CheckItem(id, title, "unknown", "how parameters are distributed was not recorded", _RECORD)
    sharded = zero(facts)
    state: State
    if sharded is None:
        state = "unknown" if kind == "ddp" and not facts.configuration.get("zero") else "pass"
        if kind == "fsdp2" and _replicates(facts):
            state, evidence = (
                "unknown",
                "replicas by PyTorch's replicate; what sharding them frees is not known",
            )
            return CheckItem(id, title, state, evidence, "Where memory is short, set zero.stage = 2.")
        evidence = (
            f"data parallel by {kind}" if state == "pass" else "DDP; the optimizer's bytes were not recorded"
        )
        return CheckItem(id, title, state, evidence, "Go on to the layout.")
    stage, prediction = sharded
    freed = -(prediction.peak_bytes_change or 0)
    fill = fullest(facts)
    if fill is not None and freed < REPLICATED_SHARE * fill.capacity_bytes:
        share = percent(freed / fill.capacity_bytes)
        return CheckItem(
            id,
            title,
            "pass",
            f"replicated, but sharding would free only {size(freed)} ({share} of memory)",
            "Nothing to do at this size.",
        )
    state = "unknown" if fill is None else "fail"
    evidence = f"each rank keeps {size(freed)} that others keep too"
    if fill is None:
        evidence += "; how much of its memory that is is not known"
    return CheckItem(id, title, state, evidence, f"Where memory is short, set zero.stage = {stage}.")


def _replicates(facts: Facts) -> bool:
    """Whether a layout of several kinds has whole replicas: FSDP2's collectives, and nothing sharded."""
    zero = facts.configuration.get("zero")
    return bool(facts.beyond_data) and not (isinstance(zero, Mapping) and zero.get("stage"))


def _layout(facts: Facts) -> CheckItem:
    id, title = "layout-fits-model", "The parallel layout fits the model's size"
    fill = fullest(facts)
    kind = facts.about("data_parallel", "kind")
    if fill is None:
        peaks = [peak for rank in facts.ranks if (peak := _peak_bytes(rank)) is not None]
        if peaks:
            evidence = (
                f"{size(max(peaks))} at the peak of the fullest rank; how much the device has is not known"
            )
            return CheckItem(id, title, "unknown", evidence, _know_device(facts))
        cure = "Record memory (trine.profile does), or a trace with profile_memory=True."
        return CheckItem(id, title, "unknown", "peak memory was not recorded", cure)
    words = f"{size(fill.used_bytes)} of {size(fill.capacity_bytes)} at the peak ({percent(fill.share)})"
    if fill.share > FITS_SHARE or fill.retries:
        return CheckItem(
            id, title, "fail", f"{words}: it barely fits", "Shard more (zero.stage), then parallel.tensor."
        )
    if facts.world == 1 or (kind in ("ddp", "fsdp2", "zero") and not facts.beyond_data):
        return CheckItem(
            id,
            title,
            "pass",
            f"{words} with data parallelism alone, the cheapest layout that fits",
            "Go on to balance.",
        )
    return _by_groups(facts, words, fill.share)


def _peak_bytes(rank: RankFacts) -> int | None:
    memory = rank.result.summary.memory
    return None if memory is None else memory.peak_bytes or memory.reserved_peak_bytes


def _by_groups(facts: Facts, words: str, filled: float) -> CheckItem:
    """A layout of several dimensions, as its communication shows it."""
    id, title = "layout-fits-model", "The parallel layout fits the model's size"
    compare = "Measure other layouts, and compare them with trine compare."
    groups = result_of(facts.analysis, "groups", GroupsResult)
    kinds = (
        []
        if groups is None
        else [one for one in groups.kinds if one.kind not in ("unknown", "world") and one.sizes]
    )
    if not kinds and facts.beyond_data:
        named = ", ".join(f"{name} {degree}" for name, degree in facts.beyond_data.items())
        return CheckItem(id, title, "unknown", f"{words}, parallel by {named}", compare)
    if not kinds:
        evidence = f"{words}; which dimensions are parallel was not recorded"
        return CheckItem(id, title, "unknown", evidence, compare)
    named = ", ".join(f"{one.kind} {max(one.sizes)}" for one in kinds)
    tensor = next((one for one in kinds if one.kind == "tensor"), None)
    exposed = None if tensor is None else tensor.exposed_share
    if tensor is not None and exposed is not None and filled <= ROOMY_SHARE and exposed >= TENSOR_SHARE:
        evidence = f"{words}, parallel by {named}; tensor parallelism leaves {percent(exposed)} of the window exposed"
        cure = f"Try parallel.tensor = {max(tensor.sizes) // 2}: twice the memory a rank still fits."
        return CheckItem(id, title, "fail", evidence, cure)
    return CheckItem(id, title, "unknown", f"{words}, parallel by {named}", compare)


def _balance(facts: Facts, findings: tuple[Finding, ...]) -> CheckItem:
    id, title = "balance", "Communication, bubble and memory are in balance over ranks"
    if facts.world < 2:
        return CheckItem(id, title, "pass", "one rank: nothing to balance", "Go on to scaling.")
    split, spread = split_exposed(facts), _spread(facts)
    bubble = result_of(facts.analysis, "pipeline", Pipeline)
    if split is None and bubble is None:
        return CheckItem(
            id,
            title,
            "unknown",
            "exposed communication was not seen",
            "Record with trine.profile, or trace all ranks.",
        )
    seen = []
    if split is not None:
        limit = f"balance up to {percent(threshold(facts))}"
        seen.append(f"{percent(split.exposed)} of the {facts.unit} is exposed communication ({limit})")
    if bubble is not None:
        ideal = "" if bubble.ideal_ratio is None else f" (its schedule's ideal {percent(bubble.ideal_ratio)})"
        seen.append(f"{percent(bubble.bubble_ratio)} of an iteration is pipeline bubble{ideal}")
    if spread is not None:
        seen.append(f"peak memory differs by {percent(spread)} over ranks")
    late = next((finding for finding in findings if finding.id == "straggler"), None)
    if late is not None:
        ranks = [row["rank"] for row in late.evidence["ranks"]]
        seen.append(f"{rank_list(ranks)} late")
    exposed = split is not None and split.exposed > threshold(facts)
    scattered = (spread or 0.0) > SPREAD_SHARE
    uneven = late is not None or exposed or _bubbles(bubble) or scattered
    if facts.analysis.source.missing_ranks and not uneven:
        return CheckItem(
            id, title, "unknown", "; ".join(seen) + "; ranks are missing", "Add the missing ranks' files."
        )
    if not uneven:
        return CheckItem(id, title, "pass", "; ".join(seen), "Go on to scaling.")
    cure = _even_out(findings, exposed=exposed, bubbles=_bubbles(bubble), scattered=scattered)
    return CheckItem(id, title, "fail", "; ".join(seen), cure)


def _even_out(findings: tuple[Finding, ...], *, exposed: bool, bubbles: bool, scattered: bool) -> str:
    """What comes next where ranks are out of balance: the faults, else where to look, since none is a fault by itself."""
    if any(finding.kind == "fault" for finding in findings):
        return "Mend the faults above, the largest first."
    where = []
    if exposed:
        where.append("which collectives take that time, and who waits for whom, is told under communication")
    if bubbles:
        where.append("more micro-batches, or another schedule, make the bubble smaller")
    if scattered:
        where.append("the ranks' peaks, and what holds them, are told under memory")
    return f"No fault by itself: {'; '.join(where)}."


def _bubbles(pipeline: Pipeline | None) -> bool:
    """Whether a pipeline's bubble is more than balance bears: beyond its schedule's own, or by itself."""
    if pipeline is None:
        return False
    if pipeline.ideal_ratio is None:
        return pipeline.bubble_ratio > BUBBLE_EXCESS
    return pipeline.bubble_ratio - pipeline.ideal_ratio > BUBBLE_EXCESS


def _spread(facts: Facts) -> float | None:
    """(largest − smallest peak) ÷ largest over ranks, on devices."""
    peaks = [
        memory.peak_bytes
        for rank in facts.ranks
        if (memory := rank.result.summary.memory) is not None
        and memory.kind == "device"
        and memory.peak_bytes
    ]
    return (max(peaks) - min(peaks)) / max(peaks) if len(peaks) > 1 else None


def _scaling(facts: Facts) -> CheckItem:
    id, title = "linear-scaling", "Throughput grows in proportion to devices"
    other = "half the devices" if facts.world > 1 else "two devices"
    cure = f"Run the same work on {other}, and compare the two with trine scaling."
    split, late = split_exposed(facts), latest(facts)
    if facts.world < 2 or split is None:
        return CheckItem(id, title, "unknown", "one run at one size cannot show it", cure)
    # One device would not communicate: what is exposed is the least that scaling costs.
    bound = 1 - split.exposed
    evidence = f"by its own exposed communication at most {percent(bound)} of linear"
    if late is not None and facts.step_ns and late.cost_ns / facts.step_ns > split.exposed:
        bound = 1 - late.cost_ns / facts.step_ns
        evidence = f"by its latest rank at most {percent(bound)} of linear"
    state: State = "fail" if bound < LINEAR_BOUND else "unknown"
    return CheckItem(id, title, state, evidence, cure)
