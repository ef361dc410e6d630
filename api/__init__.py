"""Trine finds what holds a distributed training run back, predicts what each fix would gain, applies it, and proves it.

    with trine.profile("runs/a", model=model, optimizer=optimizer) as prof:
        for batch in prof.steps(loader):
            ...

    analysis = trine.analyze(trine.load("runs/a"))

Importing ``trine`` imports neither torch nor Dash; each is imported when first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trine.analyzers import analyze as analyze
    from trine.optim import Config as Config
    from trine.optim import latest_checkpoint as latest_checkpoint
    from trine.optim import layout_of as layout_of
    from trine.optim import optimize as optimize
    from trine.optim import predict_memory as predict_memory
    from trine.optim.plan.planning import plan as plan
    from trine.optim.plan.whatif import what_if as what_if
    from trine.profiler import profile as profile
    from trine.record import load as load
    from trine.record.errors import TrineError as TrineError

__all__ = [
    "Config",
    "TrineError",
    "__version__",
    "analyze",
    "latest_checkpoint",
    "layout_of",
    "load",
    "optimize",
    "plan",
    "predict_memory",
    "profile",
    "what_if",
]

__version__ = "0.1.0"

_HOMES = {
    "analyze": "trine.analyzers",
    "load": "trine.record",
    "profile": "trine.profiler",
    "latest_checkpoint": "trine.optim",
    "layout_of": "trine.optim",
    "predict_memory": "trine.optim",
    "plan": "trine.optim.plan.planning",
    "optimize": "trine.optim",
    "Config": "trine.optim",
    "what_if": "trine.optim.plan.whatif",
    "TrineError": "trine.record.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trine' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
