"""What a software stack can do at all: which schedules, ZeRO stages, recomputation and offload a search may choose for it.

:file:`abilities.toml` has a section a stack, each with its public source. A pin goes beyond them, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trine.optim.plan._tables import packaged
from trine.optim.plan.constants import Stack, stacks
from trine.optim.plan.layouts import OFFLOADED
from trine.optim.plan.refusals import Rule, rule_of

__all__ = ["Abilities", "abilities_of"]

#: Section that offers everything.
_EVERY = "every"


@dataclass(frozen=True, slots=True)
class Abilities:
    """``choices``: column of a layout → words or numbers that the stack offers for it. ``zero_in_pipelines``: stages of ZeRO
    that may stand beside pipeline stages. ``hybrid_shard``: ZeRO's group may be smaller than all data ranks. ``refuses``: what it
    has, but not together."""

    name: str
    choices: Mapping[str, tuple[Any, ...]]
    zero_in_pipelines: tuple[int, ...]
    hybrid_shard: bool
    source: str
    refuses: tuple[Rule, ...] = ()

    def only_one(self, column: str) -> bool:
        """Whether a degree (tensor, context, expert, pipeline) is 1 in this software."""
        return self.choices.get(column) == (1,)


@cache
def abilities_of(stack: Stack) -> Abilities:
    """Of a stack, its parent where it has no section of its own, or everything where neither has one."""
    sections = packaged("abilities.toml")
    name, seen = stack.name, set[str]()
    while name not in sections and name and name not in seen:
        seen.add(name)
        name = stacks()[name].parent if name in stacks() else stack.parent
    name = name if name in sections else _EVERY
    given = sections[name]
    choices: dict[str, tuple[Any, ...]] = {
        "schedule": tuple(given["schedules"]),
        "zero_stage": tuple(given["zero_stages"]),
        "recompute": tuple(given["recompute"]),
        "precision": tuple(given["precisions"]),
        "compression": tuple(given["compressions"]),
        "two_level": (0, 1) if given["two_level"] else (0,),
        "sequence": (0, 1) if given["sequence"] else (0,),
    }
    for column in OFFLOADED:
        choices[column] = tuple(given[column])
    choices |= {column: (1,) for column in ("tensor", "context", "expert", "pipeline") if not given[column]}
    return Abilities(
        name,
        choices,
        zero_in_pipelines=tuple(given["zero_in_pipelines"]),
        hybrid_shard=given["hybrid_shard"],
        source=str(given["source"]),
        refuses=tuple(rule_of(text) for text in given.get("refuses", ())),
    )
