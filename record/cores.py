"""Processor cores as Linux lists them (``0-3,8``, cpuset(7), "List format"): short, and exact about which."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["core_list", "cores_in", "own_cores"]

_LIST = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")
#: More cores than any machine has: a longer range is damage.
_MOST = 1 << 16


def own_cores() -> str | None:
    """The cores that this process may use; None where the system does not say which."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return core_list(os.sched_getaffinity(0))


def core_list(cores: Iterable[int]) -> str:
    """``0-3,8`` for the cores 0, 1, 2, 3 and 8."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def cores_in(text: object) -> frozenset[int]:
    """The cores of a list; empty where ``text`` is none."""
    if not isinstance(text, str) or not _LIST.fullmatch(text):
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) - int(first) >= _MOST:
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
