"""What kind of exchange a collective is: who must enter, and how many bytes cross the links."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["Pattern", "bus_factor", "canonical_operation", "pattern_of"]

#: ``all``: every rank must enter before any can leave. ``from_root``: the others wait for the root.
#: ``to_root``: the root waits for the others. ``pair``: two ranks, point to point.
Pattern = Literal["all", "from_root", "to_root", "pair"]

#: Order matters: the first pattern found in the lower-case name, punctuation removed, wins.
_NAMES: tuple[tuple[str, str], ...] = (
    ("alltoall", "all_to_all"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("barrier", "barrier"),
    ("broadcast", "broadcast"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("sendrecv", "send_recv"),
    ("recv", "recv"),
    ("send", "send"),
    ("reduce", "reduce"),
)
_PATTERNS: dict[str, Pattern] = {
    "broadcast": "from_root",
    "scatter": "from_root",
    "reduce": "to_root",
    "gather": "to_root",
    "send": "pair",
    "recv": "pair",
}


def canonical_operation(name: str | None) -> str:
    """One spelling for each operation: ``_allgather_base``, ``nccl:all_gather`` → ``all_gather``.

    What is not known keeps its name; ``None`` becomes ``unknown``.
    """
    if name is None:
        return "unknown"
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((operation for part, operation in _NAMES if part in plain), name)


def pattern_of(operation: str) -> Pattern:
    """Who waits for whom. An operation that is not known counts as one that all must enter."""
    return _PATTERNS.get(operation, "all")


def bus_factor(operation: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth for a group of ``size`` ranks.

    Source: nccl-tests, ``doc/PERFORMANCE.md``: what each link must carry for a byte of the buffer.
    """
    if size < 2:
        return 1.0
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 1.0
