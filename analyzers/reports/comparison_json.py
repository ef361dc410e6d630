"""A comparison for programs: what ``trine compare --format json`` and ``trine check`` write."""

from __future__ import annotations

import json

from trine.analyzers.comparison import Comparison, Difference, Side
from trine.analyzers.reports._changes import difference_to_dict

__all__ = ["comparison_to_dict", "render_json"]


def render_json(comparison: Comparison) -> str:
    """JSON by the schema ``trine.comparison/1``; every name ends in its unit."""
    return json.dumps(comparison_to_dict(comparison), indent=1, default=str) + "\n"


def comparison_to_dict(comparison: Comparison) -> dict[str, object]:
    """The comparison as the JSON contract has it."""
    ratio = comparison.step_time
    return {
        "schema": "trine.comparison/1",
        "verdict": comparison.verdict,
        "step_time": None
        if ratio is None
        else {
            "ratio": ratio.ratio,
            "low": ratio.low,
            "high": ratio.high,
            "confidence": ratio.confidence,
            "minimum_effect": ratio.minimum_effect,
            "smallest_change": ratio.smallest_change,
            "power": ratio.power,
        },
        "first": _side_to_dict(comparison.first),
        "second": _side_to_dict(comparison.second),
        "metrics": [
            {
                "name": m.name,
                "first": m.first,
                "second": m.second,
                "first_values": list(m.first_values),
                "second_values": list(m.second_values),
                "more_is_better": m.more_is_better,
            }
            for m in comparison.metrics
        ],
        "causes": [
            {
                "kind": c.kind,
                "name": c.name,
                "first_ns": c.first_ns,
                "second_ns": c.second_ns,
                "change_ns": c.change_ns,
                "share": c.share,
                "first_calls": c.first_calls,
                "second_calls": c.second_calls,
            }
            for c in comparison.causes
        ],
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
        "environment": [_difference_to_dict(d) for d in comparison.environment],
        "configuration": [_difference_to_dict(d) for d in comparison.configuration],
        "notes": list(comparison.notes),
    }


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


def _difference_to_dict(difference: Difference) -> dict[str, object]:
    return {"name": difference.name, "first": difference.first, "second": difference.second}


# --- words and lines ---------------------------------------------------------------------------
