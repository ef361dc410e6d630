"""What a plan in JSON was made for, and whether a layout in it is one that such a plan can hold.

A plan is a file, and people change files: a layout that no search would have weighed is refused before another tool's
words are made of it. What was pinned beyond the software's own stays, as it does in a search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from trine.optim.plan.asked import asked_pins
from trine.optim.plan.cluster_json import cluster_from_dict
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.constraints import BATCH, CHOICES, RANKS, STAGES, kept, words_of
from trine.optim.plan.expert_constraints import EXPERTS
from trine.optim.plan.layouts import DEFAULTS, KINDS, OFFLOADED, Layouts
from trine.optim.plan.problem import Problem, parse_pins, parse_searched
from trine.optim.plan.saving_constraints import SAVINGS
from trine.optim.plan.stages import stage_counts
from trine.optim.plan.workload import Workload
from trine.optim.plan.workload_files import check_field, latent_from_table
from trine.record.errors import UsageError

__all__ = ["problem_of", "require_complete", "require_kept"]

_ALL = (*RANKS, *EXPERTS, *BATCH, *STAGES, *CHOICES, *SAVINGS)
#: Characters of a value that a message repeats.
_SHOWN = 40


def problem_of(plan: Mapping[str, Any]) -> Problem:
    """What was asked of the search. Raises ``UsageError`` for a part that is missing or is not what it should be."""
    workload, cluster = _workload(_table(plan, "workload")), cluster_from_dict(_table(plan, "cluster"))
    options = _table(plan, "options")
    batch = options.get("global_batch")
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise UsageError(f"global_batch of its options is {batch!r}, no whole number")
    pins, searched = options.get("pins", {}), options.get("searched", [])
    if not isinstance(pins, Mapping) or not isinstance(searched, list):
        raise UsageError("pins of its options are no table, or what was searched is no list")
    return Problem.of(
        workload,
        cluster,
        _stack(_table(plan, "stack")),
        global_batch=batch,
        headroom=_headroom(options),
        pins=parse_pins(asked_pins(pins)),
        searched=parse_searched(str(name) for name in searched),
    )


def require_complete(row: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for a column that is not there: what it would be by default may be another layout."""
    missing = [name for name in DEFAULTS if name not in row]
    if missing:
        raise UsageError(f"its layout has no {missing[0]}: put it back, or write the plan anew by trine plan")


def require_kept(layout: Layouts, problem: Problem, stage_layers: Any = None) -> None:
    """Raises ``UsageError`` where a search for ``problem`` would not have weighed this one layout.

    ``stage_layers``: of each stage in turn, as the plan lists them; None where it does not.
    """
    row = layout.row(0)
    try:
        parse_pins(f"{name}={value}" for name, value in row.items())
    except UsageError as error:
        raise UsageError(f"its layout is out of range: {str(error).removeprefix('--pin: ')}") from error
    if not kept(_ALL, problem, layout.columns).all():
        raise UsageError(words_of(_ALL, problem, layout.columns))
    beyond = _beyond(row, problem)
    if beyond is not None:
        raise UsageError(f"{problem.stack.name} does not offer {beyond}={row[beyond]}, which nobody pinned")
    counts = stage_counts(problem.workload.layers, int(row["pipeline"]) * int(row["chunks"]))
    if stage_layers is not None and stage_layers != counts:
        raise UsageError(f"its stage_layers are {_short(stage_layers)}, and its stages have {_short(counts)}")


def _beyond(row: Mapping[str, int | str], problem: Problem) -> str | None:
    """A column whose value the software does not offer, and neither a pin nor what was searched asks for."""
    for column, offered in problem.abilities.choices.items():
        value, usual = row[column], DEFAULTS[column]
        plain = KINDS[column][usual] if column in KINDS else usual
        far = column in OFFLOADED and value == "remote" and "remote" in problem.searched
        if value not in offered and value != plain and column not in problem.pins and not far:
            return column
    return None


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _table(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plan.get(name)
    if isinstance(found, Mapping):
        return found
    said = f"it has no {name}" if name not in plan else f"its {name} is no table"
    raise UsageError(f"{said}: write the plan anew by trine plan")


def _headroom(options: Mapping[str, Any]) -> float:
    """Of a device's memory; none where the plan does not say."""
    share = options.get("memory_headroom", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise UsageError(f"memory_headroom of its options is {share!r}, no share from 0 to below 1")
    return float(share)


def _stack(table: Mapping[str, Any]) -> Stack:
    name = table.get("name")
    if not isinstance(name, str):
        raise UsageError(f"its stack has no name of a software, but {_short(name)}")
    return stack_named(name)


def _workload(table: Mapping[str, Any]) -> Workload:
    """As ``dataclasses.asdict`` wrote it."""
    known = {each.name for each in fields(Workload)}
    unknown = sorted(str(name) for name in table if name not in known)
    if unknown:
        raise UsageError(f"a workload has no {unknown[0]!r}")
    given = {key: value for key, value in table.items() if key != "latent" or value is not None}
    for key, value in given.items():
        check_field(key, value, "its workload")
    missing = [each.name for each in fields(Workload) if each.default is MISSING and each.name not in given]
    if missing:
        raise UsageError(f"its workload has no {missing[0]}")
    if "latent" in given:
        given["latent"] = latent_from_table(given["latent"], "its workload")
    return Workload(**given)
