"""What the recorded run had already: a change that it made before cannot be made again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trine.optim.plan.whatif.graph import Graph, is_pipeline
from trine.record.errors import UsageError

__all__ = ["fact", "require_no_pipeline", "require_plain"]


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
    had = fact(graph, "configuration", *key.split("."))
    if had not in (None, "none", False, 0):
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
