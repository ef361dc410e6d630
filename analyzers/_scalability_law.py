"""The universal scalability law (Gunther 2008, "A general theory of computational scalability based on rational
functions", equation 4): relative capacity C(x) = x / (1 + σ(x − 1) + κ x(x − 1)) with x = n/n₀, and its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FEWEST_COUNTS", "Fit", "fit_law"]

#: The fewest counts for a fit of two parameters to say anything.
FEWEST_COUNTS = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """The universal scalability law through the counts. ``largest_error`` is the largest relative distance of a
    measured throughput from the curve, ``freedom`` the counts beyond the fitted parameters. ``peak_devices`` is
    where more devices stop to help, None where they always do."""

    contention: float
    coherence: float
    largest_error: float
    freedom: int
    peak_devices: float | None
    fewest: int

    def capacity(self, devices: float) -> float:
        """Throughput over that of the fewest devices."""
        x = devices / self.fewest
        return x / (1 + self.contention * (x - 1) + self.coherence * x * (x - 1))


def fit_law(devices: Sequence[int], efficiencies: Sequence[float]) -> Fit | None:
    """Least squares of x/C − 1 = σ(x − 1) + κ x(x − 1), neither below zero; None with fewer than three counts.

    ``devices`` ascend; ``efficiencies`` are over the first count's.
    """
    if len(devices) < FEWEST_COUNTS:
        return None
    fewest = devices[0]
    x = np.array(devices) / fewest
    capacity = np.array(efficiencies) * x
    if (capacity <= 0).any():
        return None
    columns = np.column_stack((x - 1, x * (x - 1)))
    deviation = x / capacity - 1
    # Each count weighs by its capacity, so that errors are relative to the throughput.
    weight = capacity / x
    sigma, kappa = _not_negative(columns * weight[:, None], deviation * weight)
    curve = x / (1 + columns @ np.array([sigma, kappa]))
    peak = float(np.sqrt((1 - sigma) / kappa)) * fewest if kappa > 0 and sigma < 1 else None
    return Fit(
        contention=sigma,
        coherence=kappa,
        largest_error=float(np.abs(curve / capacity - 1).max()),
        freedom=len(devices) - 1 - 2,
        peak_devices=peak,
        fewest=fewest,
    )


def _not_negative(columns: Any, target: Any) -> tuple[float, float]:
    """The least squares of two coefficients that are not below zero: of the few candidates the best."""
    best: tuple[float, tuple[float, float]] | None = None
    for used in ((0, 1), (0,), (1,), ()):
        solution = np.zeros(2)
        if used:
            solution[list(used)] = np.linalg.lstsq(columns[:, list(used)], target, rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(((columns @ solution - target) ** 2).sum())
        if best is None or error < best[0] - 1e-18:
            best = (error, (float(solution[0]), float(solution[1])))
    assert best is not None
    return best[1]
