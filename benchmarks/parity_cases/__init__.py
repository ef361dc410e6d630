"""The cases of ``benchmarks/parity.py``, which are the core of the runtime's tests too.

A case's tolerance is relative, on the loss of every step (``by_last``: on the mean of the last five, for what is only
right on average). 1e-10 in float64 is for what is exact by construction.
"""

from __future__ import annotations

from parity_cases import accumulation, exchange, fused, memory, precision, sequences, zero
from parity_cases.case import Case

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (
    *precision.CASES,
    *fused.CASES,
    *sequences.CASES,
    *accumulation.CASES,
    *exchange.CASES,
    *zero.CASES,
    *memory.CASES,
)
