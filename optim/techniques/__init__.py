"""One module a technique: its keys, its checks, its application, the quantity it exists to change.

A technique module has

    KEYS      the configuration keys it answers for
    ORDER     when it is applied among the others (attention before compile before data parallel)
    QUANTITY  what it exists to change, as a name in Trine's record
    NUMERICS  what it does to the numbers, with the tolerance its tests hold it to
    tolerance(config)      how far losses and first gradients may be from the plain run's; None where it is not used
    refusal(config)        why this version cannot apply a value of its keys, or None; no torch
    check(config, facts)   raises UsageError where model, machine or other keys forbid it
    apply(assembly)        does it, and records an Effect

Adding one is one file here, one test and one line of documentation; the registry finds it. A key
that no technique answers for is refused by name, never ignored.
"""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module
from typing import Protocol, cast

from trine.optim.config import Config
from trine.optim.dialects.deepspeed_pairs import BESIDE, SAID
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = [
    "Assembly",
    "Effect",
    "Facts",
    "Technique",
    "refusals",
    "require_applicable",
    "techniques",
    "techniques_of",
    "tolerance_of",
]


class Technique(Protocol):
    """What every module here offers."""

    __name__: str
    KEYS: tuple[str, ...]
    ORDER: int
    QUANTITY: str
    NUMERICS: str

    def refusal(self, config: Config) -> str | None:
        """Why this version cannot apply a value of its keys; starts with or holds the key."""

    def tolerance(self, config: Config) -> Tolerance | None:
        """How far a run with ``config`` may be from the plain one because of its keys; None where they are not set."""

    def check(self, config: Config, facts: Facts) -> None:
        """Raise ``UsageError`` where model, machine or other keys forbid it."""

    def apply(self, assembly: Assembly) -> None:
        """Change the assembly and record an effect."""


@lru_cache(maxsize=1)
def techniques() -> tuple[Technique, ...]:
    """Every technique, in the order of application. Imports no torch."""
    names = (module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    found = [cast(Technique, import_module(f"{__name__}.{name}")) for name in names]
    return tuple(sorted(found, key=lambda technique: technique.ORDER))


def techniques_of(config: Config) -> tuple[Technique, ...]:
    """Those that are applied to ``config``, in their order: all, or with another engine those that stand beside it."""
    if config.engine == "torch":
        return techniques()
    beside = {"engine", *BESIDE}
    return tuple(technique for technique in techniques() if beside.intersection(technique.KEYS))


def refusals(config: Config) -> dict[str, str]:
    """Key path → why this version cannot apply what ``config`` says there. Empty: all of it can be."""
    answered = {key for technique in techniques() for key in technique.KEYS}
    said = config.changes()
    if config.engine == "deepspeed":
        answered |= SAID
    found = {
        key: f"this version has no technique for {key}: take the key out"
        for key in said
        if key not in answered
    }
    for technique in techniques_of(config):
        reason = technique.refusal(config)
        if reason:
            named = [key for key in technique.KEYS if key in reason]
            found[next((key for key in named if key in said), named[0])] = reason
    return found


def require_applicable(config: Config) -> None:
    """Raise ``UsageError`` with the first refusal, before anything is changed."""
    for reason in refusals(config).values():
        raise UsageError(reason)


def tolerance_of(config: Config) -> Tolerance:
    """What all techniques that ``config`` uses state together; nought where it changes nothing."""
    total = Tolerance(0.0, 0.0)
    for technique in techniques():
        stated = technique.tolerance(config)
        total = total if stated is None else total.plus(stated)
    return total
