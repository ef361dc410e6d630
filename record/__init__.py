"""The ground floor: the model's tables, the readers of every format, and what rooms say to each other.

    job = load("traces/")        a folder of ranks, a file, a glob, an archive, a record
    for rank in job: ...         each read when its turn comes

Importing this package imports none of it, numpy neither: the command line needs the errors alone to start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import load as load
    from .model import Job as Job
    from .model import Rank as Rank
    from .model import Table as Table

__all__ = ["Job", "Rank", "Table", "load"]

_HOMES = {"load": ".loading", "Job": ".model", "Rank": ".model", "Table": ".model"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
