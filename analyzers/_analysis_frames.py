"""An analysis as data frames: its tables, with units in the columns' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trine.record.model import SCHEMAS, Quality

from ._tabular import Frames, frame_of, frame_of_rows, known, rows_of
from .results import Analysis, CheckItem, CollectiveResult, Finding, HeatCell, NamedTime, NotBound, RankResult

if TYPE_CHECKING:
    import pandas

__all__ = ["analysis_frames"]


def analysis_frames(analysis: Analysis) -> Frames:
    """``summary``, ``ranks``, ``steps``, ``collectives``, ``waits`` (rank × collective), ``kernels``, ``operators``,
    ``findings``, ``checklist``, ``not_bound_by`` and ``data_quality``."""
    return Frames(
        {
            "summary": frame_of_rows([_summary(analysis)]),
            "ranks": frame_of_rows([_rank(one) for one in analysis.ranks], ("rank",)),
            "steps": _steps(analysis.ranks),
            "collectives": frame_of(analysis.collectives, CollectiveResult),
            "waits": frame_of(analysis.heatmap, HeatCell),
            "kernels": frame_of(analysis.kernels, NamedTime),
            "operators": frame_of(analysis.operators, NamedTime),
            "findings": frame_of_rows([_finding(one) for one in analysis.findings], _FINDING),
            "checklist": frame_of(analysis.checklist, CheckItem),
            "not_bound_by": frame_of(analysis.not_bound_by, NotBound),
            "data_quality": frame_of(analysis.data_quality, Quality),
        }
    )


def _summary(analysis: Analysis) -> dict[str, Any]:
    source, verdict, mfu, steps = analysis.source, analysis.verdict, analysis.mfu, analysis.step_statistics
    return {
        "path": source.path,
        "format": source.format,
        "world_size": source.world_size,
        "ranks": len(source.ranks),
        "missing_ranks": len(source.missing_ranks),
        "steps": source.steps,
        "step_median_ns": None if steps is None else steps.median_ns,
        "step_low_ns": None if steps is None else steps.low_ns,
        "step_high_ns": None if steps is None else steps.high_ns,
        "step_p95_ns": None if steps is None else steps.p95_ns,
        "bound_by": verdict.bound_by,
        "confidence": verdict.confidence,
        "verdict": verdict.sentence,
        "mfu": None if mfu is None else mfu.value,
        "device": analysis.hardware.name,
    }


def _rank(one: RankResult) -> dict[str, Any]:
    """The main numbers of a rank; those that it lacks are absent, which is ``NA`` beside ranks that have them."""
    summary = one.summary
    row: dict[str, Any] = {"rank": one.rank, "format": summary.format, "host_name": summary.host_name}
    row["device"] = summary.devices[0].name if summary.devices else None
    for part, prefix in (
        (summary.step_statistics, "step_"),
        (summary.breakdown, ""),
        (one.communication, ""),
        (summary.memory, "memory_"),
    ):
        if part is not None:
            (found,) = rows_of([part])
            row |= {prefix + name: value for name, value in found.items() if isinstance(value, _NUMBERS)}
    row |= {f"phase_{name}_ns": amount for name, amount in (summary.phases_ns or {}).items()}
    row["clock_offset_ns"] = one.clock_offset_ns
    return row


_NUMBERS = (int, float, str, bool)


def _steps(ranks: Sequence[RankResult]) -> pandas.DataFrame:
    """The selected steps of all ranks, a row each."""
    import pandas

    found = []
    for one in ranks:
        if one.summary.steps is not None and len(one.summary.steps):
            frame = known(one.summary.steps)
            frame.insert(0, "rank", one.rank)
            found.append(frame)
    return (
        pandas.concat(found, ignore_index=True) if found else frame_of_rows([], ("rank", *SCHEMAS["steps"]))
    )


_FINDING = (
    *("id", "kind", "step_share", "title", "change"),
    *("gain_low_ns", "gain_mid_ns", "gain_high_ns", "why", "numerics", "evidence"),
)


def _finding(one: Finding) -> dict[str, Any]:
    advice = one.recommendation
    predicted = advice.predicted if advice is not None else None
    gain = predicted.gain_ns if predicted is not None else None
    change: Mapping[str, Any] = advice.change if advice is not None else {}
    return {
        "id": one.id,
        "kind": one.kind,
        "step_share": one.severity,
        "title": one.title,
        "change": dict(change) or None,
        "gain_low_ns": gain.low if gain is not None else None,
        "gain_mid_ns": gain.mid if gain is not None else None,
        "gain_high_ns": gain.high if gain is not None else None,
        "why": advice.why if advice is not None else None,
        "numerics": advice.numerics if advice is not None else None,
        "evidence": dict(one.evidence),
    }
