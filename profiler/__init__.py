"""Measures a training run and writes its record.

Importing this package does not import torch; its public names do, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .entry import profile as profile
    from .session import Session as Session

__all__ = ["Session", "profile"]

_HOMES = {"Session": ".session", "profile": ".entry"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
