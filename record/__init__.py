"""The ground floor: the model's tables, the readers of every format, and what rooms say to each other.

job = load("traces/")        a folder of ranks, a file, a glob, an archive, a record
for rank in job: ...         each read when its turn comes
"""

from __future__ import annotations

from .loading import load
from .model import (
    DEVICE_KINDS,
    HOST_KINDS,
    MISSING,
    PHASES,
    SCHEMAS,
    DeviceInfo,
    Group,
    Job,
    Quality,
    Rank,
    RankSource,
    Strings,
    Table,
)

__all__ = [
    "DEVICE_KINDS",
    "HOST_KINDS",
    "MISSING",
    "PHASES",
    "SCHEMAS",
    "DeviceInfo",
    "Group",
    "Job",
    "Quality",
    "Rank",
    "RankSource",
    "Strings",
    "Table",
    "load",
]
