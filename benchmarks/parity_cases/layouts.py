"""Several kinds of parallelism in one mesh."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = ()
