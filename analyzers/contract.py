"""The JSON contract ``trine.analysis/1``: what ``trine analyze --format json`` prints.

Names end in their unit, integers stay integers, and what cannot be said is ``null`` with the reason
under ``data_quality``. Adding a key keeps the version; renaming or removing one changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from trine.optim.config import APPLIED
from trine.record.model import PHASES

from .results import (
    Analysis,
    Breakdown,
    CheckItem,
    CollectiveResult,
    Finding,
    Gain,
    Mfu,
    NamedTime,
    RankResult,
    Recommendation,
    StepStatistics,
)
from .studies import studies

__all__ = ["SCHEMA", "to_json"]

SCHEMA = "trine.analysis/1"

#: Keys that are there whatever can be said; studies fill them.
_PROMISED = ("pipeline", "critical_path", "memory_owners", "desync", "padding", "goodput")


def to_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis as plain dictionaries, lists, strings, numbers and ``None``: ready for ``json.dumps``."""
    source = analysis.source
    notes = [{"id": n.id, "severity": n.severity, "message": n.message} for n in analysis.data_quality]
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "source": {
            "path": source.path,
            "format": source.format,
            "formats": source.formats or (source.format,),
            "world_size": source.world_size,
            "ranks": source.ranks,
            "missing_ranks": source.missing_ranks,
            "steps": source.steps,
            "selection": source.selection,
        },
        "data_quality": notes,
        "hardware": asdict(analysis.hardware),
        "ranks": [_rank(rank) for rank in analysis.ranks],
        "collectives": [_collective(result) for result in analysis.collectives],
        "step_time_ns": _steps(analysis.step_statistics),
        "mfu": _mfu(analysis.mfu),
        **_studies(analysis),
        "kernels": [_named(one) for one in analysis.kernels],
        "operators": [_named(one) for one in analysis.operators],
        "checklist": [_check(item) for item in analysis.checklist],
        "not_bound_by": [asdict(one) for one in analysis.not_bound_by],
        "verdict": asdict(analysis.verdict),
        "findings": [_finding(finding) for finding in analysis.findings],
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _studies(analysis: Analysis) -> dict[str, Any]:
    """Each study's result under its key, null where there is none; the reason is under ``data_quality``."""
    found = {
        study.KEY: study.to_json(analysis.studies[study.KEY]) if study.KEY in analysis.studies else None
        for study in studies()
    }
    return {**dict.fromkeys(_PROMISED), **found}


def _rank(rank: RankResult) -> dict[str, Any]:
    summary, part = rank.summary, rank.communication
    breakdown = summary.breakdown
    memory = summary.memory
    return {
        "rank": rank.rank,
        "window_ns": breakdown.window_ns if breakdown else None,
        "steps": [] if summary.steps is None else summary.steps["index"],
        "phases_ns": None
        if summary.phases_ns is None
        else {name: summary.phases_ns[name] for name in PHASES},
        **_breakdown(breakdown),
        "breakdown_missing": summary.breakdown_missing,
        "communication": None
        if part is None
        else {
            "transfer_ns": part.transfer_ns,
            "wait_ns": part.wait_ns,
            "caused_wait_ns": part.caused_wait_ns,
            "lateness_ns": part.lateness_ns,
            "last_in": part.last_in,
            "matched": part.matched,
            "late_doing": [
                {"activity": one.activity, "total_ns": one.total_ns, "example": one.example}
                for one in part.late_doing
            ],
        },
        "clock_offset_ns": rank.clock_offset_ns,
        "memory": None
        if memory is None
        else {
            "peak_bytes": memory.peak_bytes,
            "reserved_peak_bytes": memory.reserved_peak_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "at_peak_bytes": memory.at_peak,
            "lower_bound": memory.lower_bound,
            "allocation_retries": memory.retries,
            "kind": memory.kind,
        },
        "step_time_ns": _steps(summary.step_statistics),
        "matmul_ns": summary.dtypes,
    }


def _breakdown(breakdown: Breakdown | None) -> dict[str, Any]:
    if breakdown is None:
        return dict.fromkeys(
            ("breakdown_ns", "idle_ns", "busy_ns", "overlap_ns", "overlap_efficiency", "basis")
        )
    return {
        "breakdown_ns": {
            "compute": breakdown.compute_ns,
            "exposed_communication": breakdown.exposed_communication_ns,
            "exposed_copy": breakdown.exposed_copy_ns,
            "idle": breakdown.idle_ns,
        },
        "idle_ns": asdict(breakdown.idle),
        "busy_ns": asdict(breakdown.busy),
        "overlap_ns": breakdown.overlap_ns,
        "overlap_efficiency": breakdown.overlap_efficiency,
        "basis": breakdown.basis,
    }


def _steps(statistics: StepStatistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    return {
        "median": statistics.median_ns,
        "low": statistics.low_ns,
        "high": statistics.high_ns,
        "p95": statistics.p95_ns,
        "count": statistics.count,
        "warm_up_steps": statistics.warm_up,
        "outlier_steps": statistics.outliers,
    }


def _collective(result: CollectiveResult) -> dict[str, Any]:
    return {
        "op": result.op,
        "group": result.group,
        "ranks": result.ranks,
        "bytes": result.bytes,
        "calls": result.calls,
        "transfer_ns": result.transfer_ns,
        "wait_ns": result.wait_ns,
        "algbw_bytes_per_s": result.algbw_bytes_per_s,
        "busbw_bytes_per_s": result.busbw_bytes_per_s,
        "label": result.label,
        "caused_by_ns": {str(rank): amount for rank, amount in result.caused_by.items()},
        "group_size": result.group_size,
    }


def _mfu(mfu: Mfu | None) -> dict[str, Any] | None:
    return None if mfu is None else asdict(mfu)


def _named(one: NamedTime) -> dict[str, Any]:
    return {"name": one.name, "kind": one.kind, "calls": one.calls, "total_ns": one.total_ns}


def _check(item: CheckItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "title": item.title,
        "state": item.state,
        "evidence": item.evidence,
        "next": item.next,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "kind": finding.kind,
        "title": finding.title,
        "severity": finding.severity,
        "evidence": finding.evidence,
        "recommendation": _recommendation(finding.recommendation),
    }


def _recommendation(recommendation: Recommendation | None) -> dict[str, Any] | None:
    if recommendation is None:
        return None
    predicted = recommendation.predicted
    return {
        "change": recommendation.change,
        "why": recommendation.why,
        "numerics": recommendation.numerics,
        "not_applied_by_runtime": sorted(set(recommendation.change) - APPLIED),
        "predicted": None
        if predicted is None
        else {
            "gain_ns": _gain(predicted.gain_ns),
            "step_time_ns": _gain(predicted.step_time_ns),
            "peak_bytes_change": predicted.peak_bytes_change,
            "formula": predicted.formula,
            "inputs": predicted.inputs,
        },
    }


def _gain(gain: Gain | None) -> dict[str, int] | None:
    return None if gain is None else {"low": gain.low, "mid": gain.mid, "high": gain.high}


def _plain(value: Any) -> Any:
    """Only what JSON has. A float that is not a number cannot be said, so it is ``None``."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return str(value)
