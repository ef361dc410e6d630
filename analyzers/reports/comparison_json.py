"""A comparison for programs: what ``trine compare --format json`` and ``trine check`` write."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trine.analyzers.comparison import Comparison, Side
from trine.analyzers.flaws import RunFlaw
from trine.analyzers.reports._changes import difference_to_dict

__all__ = ["comparison_to_dict", "quality_to_list", "render_json"]

# Fields that are called the same in the JSON.
_STEP_TIME = ("ratio", "low", "high", "confidence", "minimum_effect", "smallest_change", "power")
_METRIC = ("name", "first", "second", "first_values", "second_values", "more_is_better")
_CAUSE = ("kind", "name", "first_ns", "second_ns", "change_ns", "share", "first_calls", "second_calls")
_WHOLE = ("kind", "first_ns", "second_ns", "change_ns", "share")
_DIFFERENCE = ("name", "first", "second")


def render_json(comparison: Comparison) -> str:
    """JSON by the schema ``trine.comparison/1``; every name ends in its unit."""
    return json.dumps(comparison_to_dict(comparison), indent=1, default=str) + "\n"


def comparison_to_dict(comparison: Comparison) -> dict[str, object]:
    """The comparison as the JSON contract has it."""
    ratio = comparison.step_time
    return {
        "schema": "trine.comparison/1",
        "verdict": comparison.verdict,
        "step_time": None if ratio is None else _fields(ratio, _STEP_TIME),
        "first": _side_to_dict(comparison.first),
        "second": _side_to_dict(comparison.second),
        "metrics": [_fields(metric, _METRIC) for metric in comparison.metrics],
        "causes": [_fields(cause, _CAUSE) for cause in comparison.causes],
        "wholes": [_fields(whole, _WHOLE) for whole in comparison.wholes],
        "difference": difference_to_dict(comparison.difference),
        "findings": None
        if comparison.findings is None
        else [
            {
                "id": f.id,
                "kind": f.kind,
                "state": f.state,
                "first_severity": f.first,
                "second_severity": f.second,
                "title": f.title,
            }
            for f in comparison.findings
        ],
        "environment": [_fields(each, _DIFFERENCE) for each in comparison.environment],
        "configuration": [_fields(each, _DIFFERENCE) for each in comparison.configuration],
        "data_quality": quality_to_list(comparison.quality),
        "notes": list(comparison.notes),
    }


def quality_to_list(quality: Sequence[RunFlaw]) -> list[dict[str, object]]:
    """What is wrong with the data of runs."""
    return [
        {
            "id": each.flaw.id,
            "severity": each.flaw.severity,
            "message": each.flaw.message,
            "runs": list(each.sources),
        }
        for each in quality
    ]


def _side_to_dict(side: Side) -> dict[str, object]:
    rows = zip(side.sources, side.steps, side.warm_up, side.run_medians_ns, strict=True)
    return {
        "label": side.label,
        "median_ns": side.median_ns,
        "runs": [
            {
                "source": source,
                "steps": steps,
                "warm_up": warm_up,
                "median_ns": found[0] if found else None,
                "low_ns": found[1] if found else None,
                "high_ns": found[2] if found else None,
            }
            for source, steps, warm_up, found in rows
        ],
    }


def _fields(value: object, names: tuple[str, ...]) -> dict[str, object]:
    """Its fields of these names, as they are called in the JSON."""
    found = {name: getattr(value, name) for name in names}
    return {name: list(each) if isinstance(each, tuple) else each for name, each in found.items()}
