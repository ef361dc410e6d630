"""All ranks together, from their summaries alone: so 8 ranks and 8,000 take the same path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from trine.record.model import MISSING, Job, Quality

from .clocks import AGREEING_NS, Clock, clock_offsets
from .collectives import Blame, blame, collective_results, communications, heat_cells
from .lines import listed
from .matching import Calls, match_collectives
from .planned import is_simulated, of_no_run, without_rates
from .results import Analysis, RankResult, RankSummary, Source, Verdict
from .selection import Selection
from .shared_cores import about_shared_cores
from .steps import job_step_statistics, sampled_steps
from .studies import Whole, join_all
from .tables import add_up
from .utilization import find_hardware, find_mfu

__all__ = ["conclude"]


def conclude(
    job: Job, summaries: Sequence[RankSummary], selection: Selection, *, convention: str | None = None
) -> Analysis:
    """Join the summaries of a job's ranks. Findings, checklist and verdict are left to ``diagnose``.

    ``convention`` chooses how MFU counts model FLOPs (``counted``, ``palm``, ``megatron``,
    ``narayanan``, ``6n``).
    """
    summaries = sorted(summaries, key=lambda summary: summary.rank)
    by_rank = {summary.rank: summary for summary in summaries}
    calls, alone, matching_notes = match_collectives(summaries)
    clocks = clock_offsets(list(by_rank), calls, {rank: one.host_name for rank, one in by_rank.items()})
    blames = [blame(call, clocks) for call in calls]
    shares = communications(blames, by_rank)
    statistics = job_step_statistics([sampled_steps(s.steps, s.metadata) for s in summaries])
    hardware, hardware_notes = find_hardware(summaries)
    mfu, mfu_notes = find_mfu(summaries, hardware, statistics, convention)
    missing = _missing(job, summaries)
    whole = Whole(job, by_rank, calls, blames, clocks, hardware, statistics, mfu)
    results = join_all(whole)
    quality = [
        *job.quality,
        *(note for summary in summaries for note in summary.quality),
        *_about_ranks(job, summaries, missing),
        *about_shared_cores(summaries),
        *matching_notes,
        *_about_clocks(clocks, list(by_rank), bool(calls)),
        *_about_lone_calls(alone, len(summaries)),
        *_about_untimed_calls([*calls, *alone]),
        *hardware_notes,
        *mfu_notes,
        *whole.quality,
    ]
    collectives = collective_results([*blames, *_unshared(alone, clocks)])
    if is_simulated(job.metadata):
        quality, collectives = of_no_run(quality), without_rates(collectives)
    return Analysis(
        source=_source(job, summaries, missing, selection),
        data_quality=tuple(_merged(quality)),
        hardware=hardware,
        ranks=tuple(
            RankResult(
                summary=summary,
                communication=shares.get(summary.rank),
                clock_offset_ns=_offset(clocks, summary.rank, bool(calls)),
            )
            for summary in summaries
        ),
        collectives=collectives,
        heatmap=heat_cells(blames, [group for summary in summaries for group in summary.groups]),
        step_statistics=statistics,
        mfu=mfu,
        kernels=add_up(summary.kernels for summary in summaries),
        operators=add_up(summary.operators for summary in summaries),
        checklist=(),
        not_bound_by=(),
        findings=(),
        verdict=Verdict("Not diagnosed.", None, "low", None),
        studies=results,
    )


def _source(
    job: Job, summaries: Sequence[RankSummary], missing: tuple[int, ...], selection: Selection
) -> Source:
    steps = {int(index) for s in summaries if s.steps is not None for index in s.steps["index"].tolist()}
    return Source(
        path=job.name or str(job.path),
        format=job.format,
        world_size=job.world_size or max((s.world_size or 0 for s in summaries), default=0) or None,
        ranks=tuple(summary.rank for summary in summaries),
        missing_ranks=missing,
        steps=len(steps),
        selection=selection.text,
        metadata=dict(job.metadata),
        formats=job.formats or (job.format,),
    )


def _missing(job: Job, summaries: Sequence[RankSummary]) -> tuple[int, ...]:
    if is_simulated(job.metadata):
        return ()  # those that are drawn stand for all
    present = {summary.rank for summary in summaries}
    world = job.world_size or max((s.world_size or 0 for s in summaries), default=0)
    return tuple(sorted({*range(world), *job.rank_ids} - present))


def _offset(clocks: dict[int, Clock], rank: int, matched: bool) -> int | None:
    return clocks[rank].stated_ns if matched and rank in clocks else None


def _unshared(alone: Sequence[Calls], clocks: dict[int, Clock]) -> list[Blame]:
    return [blame(call, clocks) for call in alone]


# --- what must be said -------------------------------------------------------------------------


def _about_ranks(job: Job, summaries: Sequence[RankSummary], missing: tuple[int, ...]) -> list[Quality]:
    if not missing or any(note.id == "missing-ranks" for note in job.quality):
        return []
    world = len(missing) + len(summaries)
    message = (
        f"{len(missing)} of {world} ranks are missing ({listed(missing)}): they are left out, "
        "and what they did to the others cannot be said"
    )
    return [Quality("missing-ranks", "warning", message)]


def _about_clocks(clocks: dict[int, Clock], ranks: list[int], matched: bool) -> list[Quality]:
    notes = []
    apart = {rank: clock for rank, clock in clocks.items() if not clock.agrees}
    if apart:
        worst = max(apart, key=lambda rank: abs(apart[rank].offset_ns))
        message = (
            f"clocks of ranks {listed(sorted(apart))} disagree with rank {min(clocks)}'s by more than "
            f"{AGREEING_NS // 1000} µs (rank {worst}: {apart[worst].offset_ns / 1e6:+.3f} ms); "
            "starts are compared after correction"
        )
        drifting = max(apart.values(), key=lambda clock: abs(clock.drift))
        if drifting.drift:
            message += (
                f"; clocks drift by up to {abs(drifting.drift) * 1e6:.1f} µs a second, which is corrected too"
            )
        notes.append(Quality("clock-disagreement", "info", message))
    unlinked = [rank for rank in ranks if rank not in clocks]
    if matched and unlinked:
        message = f"no collective links ranks {listed(unlinked)} to rank {min(ranks)}: their clock offsets are not known"
        notes.append(Quality("clock-unknown", "info", message))
    return notes


def _about_lone_calls(alone: Sequence[Calls], ranks: int) -> list[Quality]:
    if not alone:
        return []
    if ranks == 1:
        message = (
            "one rank alone cannot tell waiting from transferring: transfer is the call's whole length, "
            "bandwidths are lower bounds, and wait and lateness are not known"
        )
    else:
        groups = sorted({f"{call.operation} in group {call.group or 'unnamed'}" for call in alone})
        message = (
            f"of {', '.join(groups[:5])}{' and more' if len(groups) > 5 else ''} one rank alone is here: "
            "transfer includes its wait"
        )
    return [Quality("collectives-alone", "info", message)]


def _about_untimed_calls(calls: Sequence[Calls]) -> list[Quality]:
    if not calls or any((call.end_ns != MISSING).any() for call in calls):
        return []
    count = sum(len(call.rows) for call in calls)
    message = (
        f"when {count} collectives started and ended is not known, only that they were issued, so transfer and "
        "wait cannot be said; record a deep window, or give NCCL its Inspector plugin"
    )
    return [Quality("collectives-untimed", "info", message)]


def _merged(notes: Sequence[Quality]) -> list[Quality]:
    """The same note of several ranks said once, with the ranks."""
    ranks: dict[tuple[str, str, str], list[int | None]] = defaultdict(list)
    for note in notes:
        ranks[note.id, note.severity, note.message].append(note.rank)
    merged = []
    for note in notes:
        said_by = ranks.pop((note.id, note.severity, note.message), None)
        if said_by is None:
            continue
        known = sorted({rank for rank in said_by if rank is not None})
        if len(known) > 1:
            note = Quality(note.id, note.severity, f"{note.message} (ranks {listed(known)})")
        merged.append(note)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(merged, key=lambda note: order[note.severity])
