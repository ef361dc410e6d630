"""The cases of ``benchmarks/parity.py``, which are the core of the runtime's tests too.

A case's tolerance is relative, on the loss of every step (``by_last``: on the mean of the last five, for what is only
right on average). 1e-10 in float64 is for what is exact by construction. A module here with ``CASES`` is found by itself.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from parity_cases.case import Case

__all__ = ["CASES", "Case"]


def _found() -> tuple[Case, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "case")
    return tuple(case for name in names for case in import_module(f"{__name__}.{name}").CASES)


CASES: tuple[Case, ...] = _found()
