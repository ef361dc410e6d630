"""The optimisation runtime: a configuration, techniques that apply it to a live model, an engine.

Only the configuration is imported here; torch comes with :func:`optimize`, when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.layout import Layout, layout_of
from trine.optim.memory_prediction import MemoryPrediction, predict_memory

if TYPE_CHECKING:
    from trine.optim._persistence import latest_checkpoint as latest_checkpoint
    from trine.optim.engine import Engine as Engine
    from trine.optim.engine import optimize as optimize

__all__ = [
    "Config",
    "Engine",
    "Layout",
    "MemoryPrediction",
    "latest_checkpoint",
    "layout_of",
    "optimize",
    "predict_memory",
]


def __getattr__(name: str) -> Any:
    if name in ("Engine", "optimize"):
        return getattr(import_module("trine.optim.engine"), name)
    if name == "latest_checkpoint":
        return import_module("trine.optim._persistence").latest_checkpoint
    raise AttributeError(f"module 'trine.optim' has no attribute {name!r}")
