"""What is to be exported, from a file: our own configuration in TOML, or a plan in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trine.optim.config import Config
from trine.optim.exports._exported import Exported
from trine.optim.exports._from_layout import checked_row, config_of
from trine.optim.exports._planned import problem_of, require_complete, require_kept
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.workload import Workload
from trine.record.errors import UnreadableInput, UsageError

__all__ = ["SCHEMA", "exported_from", "exported_of_layout"]

#: What ``trine plan --format json`` writes.
SCHEMA = "trine.plan/1"
#: Characters of what stands in the place of rows that a message repeats.
_SHOWN = 40


def exported_from(
    source: str | Path, *, row: int | None = None, devices: int | None = None, nodes: int | None = None
) -> Exported:
    """A file's configuration, or a plan's layout: its best, or the one in ``row``, counted from 1.

    ``devices`` and ``nodes``: of the job that a configuration is for; a plan says its own. Raises ``UsageError`` or
    ``UnreadableInput`` in one line.
    """
    path = Path(source)
    if path.suffix.lower() != ".json":
        if row is not None:
            raise UsageError(f"--row picks a layout of a plan, and {path} is a configuration: leave it out")
        return Exported(Config.from_toml(path), devices=devices, nodes=nodes)
    if devices is not None or nodes is not None:
        raise UsageError(
            f"{path} is a plan, which says its devices and nodes: leave --devices and --nodes out"
        )
    return _of_plan(_parsed(path), str(path), 1 if row is None else row)


def exported_of_layout(
    row: Mapping[str, int | str],
    workload: Workload | None = None,
    devices_per_node: int | None = None,
    stack: Stack | None = None,
) -> Exported:
    """One layout of the planner, for the software ``stack``. Raises ``UsageError`` for what is none."""
    layout = checked_row(row)
    config, lacks = config_of(layout, workload, operators="none" if stack is None else stack.operators)
    devices = int(Layouts.of(**layout).devices[0])
    nodes = None if devices_per_node is None else max(1, -(-devices // devices_per_node))
    if nodes is not None and devices % nodes:  # a job that leaves some of a node idle
        nodes = None
    return Exported(config, workload, layout, devices, nodes, lacks, stack)


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableInput(f"cannot read the plan {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is no JSON: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping) or found.get("schema") != SCHEMA:
        said = found.get("schema") if isinstance(found, Mapping) else None
        raise UnreadableInput(
            f'{path} is no plan: its "schema" is {json.dumps(said)}, not "{SCHEMA}"; write one by: '
            f"trine plan MODEL CLUSTER --format json -o {path}"
        )
    return found


def _of_plan(plan: Mapping[str, Any], where: str, row: int) -> Exported:
    rows = plan.get("rows")
    if not isinstance(rows, list) or not rows:
        said = "none" if "rows" not in plan else json.dumps(rows)[:_SHOWN]
        raise UnreadableInput(
            f'{where} holds no layouts: its "rows" are {said}, no list with one each: write the plan anew by trine plan'
        )
    if not 1 <= row <= len(rows):
        raise UsageError(f"{where} holds {len(rows)} layouts: --row takes 1 to {len(rows)}, not {row}")
    chosen = rows[row - 1]
    layout = chosen.get("layout") if isinstance(chosen, Mapping) else None
    if not isinstance(layout, Mapping):
        raise UnreadableInput(f"{where}: row {row} has no layout")
    at = f"{where}: row {row}"
    try:
        own = Layouts.of(**checked_row(layout))
        require_complete(layout)
        at = where
        problem = problem_of(plan)
        at = f"{where}: row {row}"
        _require_as_planned(own, plan)
        require_kept(own, problem, chosen.get("stage_layers"))
    except UsageError as error:
        raise UnreadableInput(f"{at}: {error}") from error
    exported = exported_of_layout(layout, problem.workload, problem.cluster.devices_per_node, problem.stack)
    return replace(exported, cluster=problem.cluster, headroom=problem.headroom)


def _require_as_planned(layout: Layouts, plan: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` where a row was changed by hand, and no longer makes the plan's devices or its batch."""
    own = {"devices": int(layout.devices[0]), "global_batch": int(layout.global_batch[0])}
    made = {
        "devices": ("data", "context", "tensor", "pipeline"),
        "global_batch": ("data", "micro_batch", "microbatches"),
    }
    for name, table in (("devices", plan.get("cluster")), ("global_batch", plan.get("options"))):
        planned = table.get(name) if isinstance(table, Mapping) else None
        if planned is not None and planned != own[name]:
            spelled = " x ".join(f"{column} {layout[column][0]}" for column in made[name])
            raise UsageError(
                f"its layout has {spelled} = {own[name]}, and its plan is for {name.replace('_', ' ')} {planned}: plan anew with "
                "--pin, in place of changing it by hand"
            )
