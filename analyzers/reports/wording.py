"""The reports' own words, by language. Findings bring theirs with them.

A language is one mapping below with the keys of ``ENGLISH``; nothing else changes to add one.
"""

from __future__ import annotations

from collections.abc import Mapping

from trine.record.errors import UsageError

__all__ = ["LANGUAGES", "words"]

ENGLISH: Mapping[str, str] = {
    # head
    "title": "Trine: what holds this run back",
    "ranks": "ranks",
    "rank": "rank",
    "steps": "steps",
    "step": "step",
    "no_steps": "no step marks",
    "selection": "steps taken",
    "device": "device",
    "format": "read as",
    "source": "source",
    "missing": "missing ranks",
    "confidence": "sure: {level}",
    "high": "high",
    "medium": "medium",
    "low": "low",
    "computation": "computation",
    "communication": "communication",
    "memory": "memory",
    "at_work": "of the time at work",
    "idle": "idle",
    "step_time": "step time",
    # findings
    "findings": "What to do",
    "fault": "fault",
    "opportunity": "opportunity",
    "no_findings": "Nothing to mend: no fault, and no change that would gain 5 % or more.",
    "no_findings_here": "Nothing to mend in what these files show.",
    "set": "set",
    "do": "do",
    "by_hand": "nothing that Trine knows of",
    "gain": "gain",
    "gain_words": "{mid} a {unit} ({basis}, {low} to {high}): {before} becomes {after}",
    "cost_words": "costs {mid} a {unit} ({basis}, {low} to {high})",
    "by_replay": "by replay",
    "by_estimate": "an estimate",
    "no_gain": "not predicted: this run lacks what it takes",
    "gain_of_a_hang": "the whole job: as it stands, it never ends",
    "stake_of_a_hang": "the whole job at stake",
    "frees": "frees {bytes} at the peak",
    "not_applied": "Trine's own runtime does not apply {keys} yet: set it in your framework",
    "caution": "note",
    "numerics": "numbers: {text}",
    "numbers": "numbers",
    "formula": "predicted as {formula}",
    "evidence": "evidence",
    "unit_step": "step",
    "unit_window": "window",
    # breakdown
    "where": "Where the time goes",
    "breakdown_title": "Window of each rank, divided",
    "phases_title": "Steps of each rank, by phase",
    "phases_title_warm_up": "Steps of each rank, by phase, warm-up included (findings leave it out)",
    "idle_title": "Idle time by cause",
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copy",
    "window": "window",
    "overlap": "overlap",
    "basis": "seen on",
    "basis_device": "device",
    "basis_host": "host operators",
    "cause_data": "loader",
    "cause_host": "host",
    "cause_sync": "blocking call",
    "cause_dependency": "dependency",
    "cause_bubble": "bubble",
    "cause_other": "other",
    "phase_data": "data",
    "phase_copy": "copy",
    "phase_forward": "forward",
    "phase_backward": "backward",
    "phase_optimizer": "optimizer",
    "phase_exposed_communication": "exposed communication",
    "phase_other": "other",
    "no_breakdown": "No breakdown: {reason}.",
    "total": "total",
    # steps
    "step_times": "Step times",
    "step_line": "median {median} ({low} to {high}, 95 % interval), 95th percentile {p95}, {count} {unit}",
    "warm_up": "warm-up left out: {steps}",
    "outliers": "slow steps: {steps}",
    "step_series": "Step time by step",
    "median": "median",
    "interval": "interval",
    "p95": "p95",
    # communication
    "communication_section": "Communication",
    "collectives_title": "Collectives, matched over ranks",
    "operation": "operation",
    "group": "group",
    "calls": "calls",
    "bytes": "bytes",
    "transfer": "transfer",
    "wait": "wait",
    "busbw": "busbw",
    "algbw": "algbw",
    "caused_by": "waited for",
    "blame_title": "Who waits, and who is waited for",
    "waits": "waits",
    "causes": "causes",
    "late_by": "late by",
    "last_in": "last in",
    "matched": "matched",
    "doing": "before it arrives",
    "heat_title": "Wait by rank and collective",
    # memory
    "memory_section": "Memory",
    "peak": "peak",
    "reserved": "reserved",
    "capacity": "capacity",
    "of_capacity": "of capacity",
    "retries": "retries",
    "at_peak": "at the peak",
    "memory_series": "Allocated memory over time",
    "lower_bound": "at least",
    # work
    "work": "Kernels and operators",
    "kernels_title": "Kernels by time, all ranks",
    "operators_title": "Operators by own time, all ranks",
    "name": "name",
    "kind": "kind",
    "time": "time",
    "mean": "mean",
    # mfu
    "utilisation": "Utilisation",
    "mfu": "MFU",
    "hfu": "HFU",
    "convention": "convention",
    "mfu_line": "MFU {value} by the convention {convention}",
    "mfu_range": "MFU by convention (none was chosen; --convention chooses)",
    "hardware": "hardware",
    "flops": "model FLOPs a step",
    "peak_flops": "peak",
    "inputs": "where each number comes from",
    "no_mfu": "MFU cannot be said: it needs model FLOPs, a step time and the device's peak.",
    # the rest
    "applied": "Applied by trine.optimize",
    "not_bound": "Not bound by",
    "no_not_bound": "Nothing can be ruled out: the input holds too few steps, or lacks the signals.",
    "checklist": "The order of work",
    "pass": "pass",
    "fail": "fail",
    "unknown": "unknown",
    "quality": "Data quality",
    "no_quality": "Nothing to say: everything that was read could be used.",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "unanswered": "not answered for want of data: {names} (--format json says what each needs)",
    "more_rows": "{left} more not shown",
    "more_ranks": "{left} more ranks not shown; those shown are the slowest and the most waiting",
    "at_most": "highest",
    "figure_table": "numbers",
    "cut": "This report was cut to {limit}: {what} left out. trine analyze --format json has everything.",
    "triangle_note": "The dot places the run between the three sides by what its time at work is spent on (idle time, the loader and Python belong to no side); an outline around it spans its ranks.",
    "footer": "Made by Trine. Its documentation explains shares, terms and formulas (pages “findings” and “reports”).",
}

LANGUAGES: Mapping[str, Mapping[str, str]] = {"en": ENGLISH}


def words(language: str) -> Mapping[str, str]:
    """The catalogue of a language. Raises ``UsageError`` for one that does not exist."""
    found = LANGUAGES.get(language)
    if found is None:
        raise UsageError(
            f"reports are not written in {clean_language(language)!r}; --lang takes {', '.join(LANGUAGES)}"
        )
    return found


def clean_language(language: str) -> str:
    """A language code as typed, short and printable."""
    return "".join(character for character in language[:20] if character.isprintable())
