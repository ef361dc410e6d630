"""Rules: each module here that does not begin with an underscore is one finding.

A rule module has

``ID``
    the finding's id, ``KIND`` its kind (``fault`` or ``opportunity``);
``find(facts) -> Finding | None``
    the finding, or None where its condition does not hold or its signal is missing;
``healthy(facts) -> str | None`` (optional)
    a sentence with a number that says the run is *not* bound by this, None where that cannot be said.

Its thresholds are the constants at its head. The registry finds it by its file; nothing else is
touched to add one, but its test and its line in ``docs/findings.md``.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Literal, Protocol, cast

from trine.analyzers.results import Finding

from ._facts import Facts, gather

__all__ = ["Facts", "Rule", "gather", "rules"]


class Rule(Protocol):
    """What a module of this folder offers."""

    ID: str
    KIND: Literal["fault", "opportunity"]

    def find(self, facts: Facts) -> Finding | None:
        """The finding, or None."""
        ...


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, faults first, then by id."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [import_module(f"{__name__}.{name}") for name in names if not name.startswith("_")]
    found = [cast(Rule, module) for module in modules]
    return tuple(sorted(found, key=lambda rule: (rule.KIND != "fault", rule.ID)))
