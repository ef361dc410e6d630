"""What the recorded run had already: a change that it made before cannot be made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trine.optim.config import Config
from trine.optim.plan.whatif.graph import LEAST_BYTES, LINK, Graph, Task, is_pipeline
from trine.optim.plan.whatif.transforms import Change
from trine.record.errors import UsageError

__all__ = [
    "fact",
    "refuse_known",
    "refuse_neutral",
    "require_no_pipeline",
    "require_one_group",
    "require_one_microbatch",
    "require_plain",
]


def fact(graph: Graph, *names: str) -> Any:
    """What the record's metadata says under nested names; None where it says nothing."""
    found: Any = graph.facts
    for name in names:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def require_plain(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where the recorded run was configured with another ``key`` than none."""
    section, name = key.split(".")
    had = fact(graph, "configuration", section, name)
    if had not in (None, "none", False, 0, getattr(getattr(Config(), section), name)):
        raise UsageError(
            f"{key}: the recorded run has {key} = {had} already, which cannot be taken out of its steps: record a run "
            "without it"
        )


def require_no_pipeline(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where ranks send each other messages: their parts of a step are not alike."""
    if is_pipeline(graph):
        raise UsageError(
            f"{key}: this record is a pipeline's, whose ranks do different work and send each other messages: ask it of a "
            "record without parallel.pipeline"
        )


def refuse_neutral(graph: Graph, change: Change, keys: Sequence[str]) -> NoReturn:
    """Raise ``UsageError`` for values that leave every step as it is. ``keys``: the one that decides, and those beside it.

    What the recorded run has cannot be undone; that nothing changes where it has it not is no news.
    """
    key = keys[0]
    require_plain(graph, key)
    if key not in change.given:
        alone = next(each for each in keys if each in change.given)
        raise UsageError(f"{alone}: changes nothing without {key}: ask for both")
    refuse_known(change, key)


def refuse_known(change: Change, key: str) -> NoReturn:
    """Raise ``UsageError`` for the value that the recorded run has."""
    raise UsageError(
        f"{key} = {str(change.given[key]).lower()}: the run has that by all that its record says, so nothing would change: ask "
        "for another value"
    )


def require_one_group(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where some ranks exchange among themselves: of more ranks it is not known who would."""
    parts = {
        task.group
        for each in graph.steps[0].ranks
        for task in each.tasks
        if task.lane == LINK and 0 < len(task.group) < graph.world and not 0 < task.bytes < LEAST_BYTES
    }
    if parts:
        sizes = " and ".join(str(size) for size in sorted({len(group) for group in parts}))
        raise UsageError(
            f"{key}: this record's {graph.world} ranks exchange in groups of {sizes}, and which of them would grow is not "
            "said: ask trine plan"
        )


def require_one_microbatch(graph: Graph, key: str) -> None:
    """Raise ``UsageError`` where a step runs forward again after a backward: whose blocks are whose is not known."""
    if int(graph.facts.get("accumulation") or 1) > 1 or _takes_turns(graph.steps[0].ranks[0].tasks):
        raise UsageError(
            f"{key}: this step is of several micro-batches, whose blocks are not told apart: ask it of a record with one "
            "micro-batch a step"
        )


def _takes_turns(tasks: Sequence[Task]) -> bool:
    phases = [task.phase for task in tasks if task.kind == "product" and not task.recomputed]
    begun = phases.index("backward") if "backward" in phases else len(phases)
    return "forward" in phases[begun:]
