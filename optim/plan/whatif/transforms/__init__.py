"""Transformations: each module here that does not begin with an underscore says what some keys make of a graph.

A module has

``KEYS``
    the keys that it answers for: those of the configuration (``precision.dtype``), or words of a what-if alone
    (``straggler``, ``ranks``);
``ORDER``
    when it is applied: what changes how often work runs comes before what changes how long it takes;
``apply(graph, change) -> Graph``
    the graph with the change made. Raises ``UsageError`` where the graph does not say what is needed.

The registry finds it by its file; its test and its line in ``docs/whatif.md`` are all else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from trine.optim.config import Config
from trine.optim.plan.whatif.graph import Graph
from trine.optim.plan.whatif.times import OperationTimes

__all__ = ["Change", "Transform", "transforms"]


@dataclass(frozen=True, slots=True)
class Change:
    """What is asked: ``given`` by key, ``config`` the configuration that its keys make, and the machine's ``times``."""

    given: Mapping[str, Any]
    config: Config
    times: OperationTimes


class Transform(Protocol):
    """What a module of this folder offers."""

    KEYS: tuple[str, ...]
    ORDER: int

    def apply(self, graph: Graph, change: Change) -> Graph:
        """The graph with the change made."""
        ...


@cache
def transforms() -> tuple[Transform, ...]:
    """Every transformation, in the order in which they are applied."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )
    found = [cast(Transform, import_module(f"{__name__}.{name}")) for name in names]
    return tuple(sorted(found, key=lambda transform: transform.ORDER))
