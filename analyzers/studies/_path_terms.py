"""What a piece of a path can be."""

from __future__ import annotations

import numpy as np

from trine.record.model import DEVICE_KINDS, HOST_KINDS

__all__ = [
    "CATEGORIES",
    "COMMUNICATION",
    "GAP",
    "LAUNCH",
    "LONGEST_GAP_NS",
    "OF_HOST",
    "OF_KIND",
    "PYTHON",
    "SYNCHRONIZATION",
    "UNEXPLAINED",
]

#: ``operator``, ``python`` and ``loader`` are the host's own time.
CATEGORIES = (
    "operator",
    "python",
    "loader",
    "synchronization",
    "launch",
    "kernel",
    "copy",
    "communication",
    "gap",
    "unexplained",
)
PYTHON, SYNCHRONIZATION, LAUNCH, COMMUNICATION, GAP, UNEXPLAINED = (
    CATEGORIES.index(name)
    for name in ("python", "synchronization", "launch", "communication", "gap", "unexplained")
)

_WORK = {"compute": "kernel"}
#: Device kind → category.
OF_KIND = np.array([CATEGORIES.index(_WORK.get(kind, kind)) for kind in DEVICE_KINDS])

_HOST = {"operator": "operator", "runtime": "operator", "sync": "synchronization", "loader": "loader"}
#: Host kind → category; everything that is neither an operator nor the loader is Python's.
OF_HOST = np.array([CATEGORIES.index(_HOST.get(kind, "python")) for kind in HOST_KINDS])

#: What stands between two pieces of work that follow each other is the machine's; from here on nothing
#: recorded explains it.
LONGEST_GAP_NS = 20_000
