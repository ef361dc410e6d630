"""A plan as plain values by the schema ``trine.plan/1``: names end in their unit, what is not known is None with its reason.

``rows[k]["layout"]``, the best first, has every column of a layout with kinds by their words, so ``Layouts.of(**layout)`` is the row again;
``workload`` has the fields of a workload, ``cluster`` what it was planned for. ``trine export`` reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trine.optim.plan.alternatives import Alternative
from trine.optim.plan.candidates import Candidate
from trine.optim.plan.cluster_json import cluster_to_dict
from trine.optim.plan.cost import Range, RunCost
from trine.optim.plan.layouts import KINDS
from trine.optim.plan.limits import Limit, Limits
from trine.optim.plan.memory import USABLE
from trine.optim.plan.planning import ORDER_KNOWN_TO, Plan
from trine.optim.plan.problem import Problem
from trine.optim.plan.stages import stage_counts

__all__ = ["SCHEMA", "plan_to_dict"]

SCHEMA = "trine.plan/1"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Every value of a plan; strict JSON takes it."""
    problem = plan.problem
    return {
        "schema": SCHEMA,
        "workload": problem.workload.to_dict(),
        "parameters": problem.workload.parameters,
        "cluster": cluster_to_dict(problem.cluster),
        "stack": {
            "name": problem.stack.name,
            "provenance": problem.stack.provenance or None,
            "offers": {name: list(values) for name, values in problem.abilities.choices.items()},
            "source": problem.abilities.source,
        },
        "options": _options(problem),
        "assumptions": list(plan.assumptions),
        "tied": {"rows": plan.tied, "order_known_to": ORDER_KNOWN_TO},
        "rows": [_candidate(one, rank, plan) for rank, one in enumerate(plan.ranked, 1)],
        "splits": [asdict(split) for split in plan.splits],
        "alternatives": [_alternative(one) for one in plan.alternatives],
        "front": [_candidate(one, None, plan) for one in plan.front],
        "lost_shapes": plan.losers,
        "limits": _limits(plan.limits),
        "largest": None if plan.largest is None else _limits(plan.largest),
        "busier": None if plan.busier is None else asdict(plan.busier),
        "jitter": _jitter(plan),
        "search": {
            "shapes": plan.tally.shapes,
            "configurations": plan.tally.configurations,
            "weighed": plan.tally.computed,
            "seconds": plan.tally.seconds,
            "configurations_per_minute": plan.tally.per_minute,
        },
        "data_quality": _quality(plan),
    }


def _alternative(one: Alternative) -> dict[str, Any]:
    return {
        "column": one.column,
        "value": one.value,
        "layout": one.layout,
        "step_s": _range(one.step),
        **_peak(one.peak),
        "fits": one.fits,
        "reason": one.reason,
    }


def _quality(plan: Plan) -> list[dict[str, str]]:
    found = []
    if plan.best.cost is None:
        found.append(("no-tokens", "days and price need --tokens (and --price)"))
    elif plan.best.cost.price is None:
        found.append(("no-price", "price needs --price, of a device for an hour"))
    if plan.jitter is None:
        found.append(("no-jitter", "variation of steps was measured on 64 devices and more, not on so few"))
    if plan.largest is None:
        found.append(
            ("no-largest", "the largest micro-batch and context of any layout are looked for with --largest")
        )
    notes = [{"id": name, "severity": "info", "message": message} for name, message in found]
    return notes + [{"id": "not-fitted", "severity": "warning", "message": text} for text in plan.unfitted]


def _options(problem: Problem) -> dict[str, Any]:
    return {
        "devices": problem.devices,
        "global_batch": problem.global_batch,
        "global_batch_is_usual": problem.batch_is_usual,
        "sequence": problem.workload.sequence,
        "memory_headroom": problem.headroom,
        "pins": {
            name: [KINDS[name][value] if name in KINDS else value for value in values]
            for name, values in problem.pins.items()
        },
        "searched": list(problem.searched),
    }


def _candidate(one: Candidate, rank: int | None, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {} if rank is None else {"rank": rank}
    return found | {
        "layout": one.layout,
        "stage_layers": _stage_layers(one, plan.problem),
        "step_s": _range(one.step),
        "source": one.source,
        "parts_s": one.parts_s,
        "tokens_per_s": _range(one.tokens_per_s),
        "mfu": {**_range(one.mfu), "convention": plan.convention, "peak_of": one.mfu_precision},
        "memory": {
            **_peak(one.peak),
            "capacity_bytes": plan.problem.cluster.device.memory_bytes,
            "usable_bytes": plan.problem.capacity_bytes,
            "fits_at_high": one.peak.high <= USABLE * plan.problem.cluster.device.memory_bytes,
            "stage": one.stage,
            "by_category_bytes": one.memory_bytes,
            "node_host_bytes": one.host_bytes,
            "node_disk_bytes": one.disk_bytes,
            "node_remote_bytes": one.remote_bytes,
        },
        "bound_by": one.bound,
        "lost_by": one.lost_by,
        "beyond_stack": list(one.beyond),
        "cost": _cost(one.cost),
    }


def _stage_layers(one: Candidate, problem: Problem) -> list[int]:
    """Layers of each stage in turn, which need not be equal: as they are predicted, chunks of a rank counting each."""
    return stage_counts(problem.workload.layers, int(one.layout["pipeline"]) * int(one.layout["chunks"]))


def _cost(cost: RunCost | None) -> dict[str, Any] | None:
    if cost is None:
        return None
    return {
        "tokens": cost.tokens,
        "days": _range(cost.days),
        "device_hours": _range(cost.device_hours),
        "price": None if cost.price is None else _range(cost.price),
    }


def _range(found: Range) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _peak(found: Range) -> dict[str, float]:
    return {"peak_bytes": found.value, "peak_low_bytes": found.low, "peak_high_bytes": found.high}


def _limits(limits: Limits) -> dict[str, Any]:
    return {"micro_batch": _limit(limits.micro_batch), "context_tokens": _limit(limits.context)}


def _limit(limit: Limit | None) -> dict[str, Any] | None:
    if limit is None:
        return None
    names = ("value", "low", "high", "layout", "bounded")
    return {name: getattr(limit, name) for name in names}


def _jitter(plan: Plan) -> Mapping[str, float] | None:
    if plan.jitter is None:
        return None
    names = ("low_s", "median_s", "high_s", "mean_low_s", "mean_s", "mean_high_s")
    return {name: float(getattr(plan.jitter, name)) for name in names}
