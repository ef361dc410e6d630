"""Measures a training run and writes its record.

Importing this package does not import torch; its public names do, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session as Session
    from .session import profile as profile

__all__ = ["Session", "profile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".session", __name__), name)
