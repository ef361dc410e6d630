"""The universal scalability law (Gunther 2008, "A general theory of computational scalability based on rational
functions", equation 4): relative capacity C(x) = x / (1 + σ(x − 1) + κ x(x − 1)) with x = n/n₀, and its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["DESCRIBES", "FEWEST_COUNTS", "Fit", "fit_law"]

#: The fewest counts for a fit of two parameters to say anything.
FEWEST_COUNTS = 3
#: A count further from the curve than this share of its throughput is not described by the law.
DESCRIBES = 0.1


@dataclass(frozen=True, slots=True)
class Fit:
    """The universal scalability law through the counts. ``largest_error`` is the largest relative distance of a
    measured throughput from the curve, ``freedom`` the counts beyond the fitted parameters. ``peak_devices`` is
    where more devices stop to help (no fewer than the fewest), None where they always do. ``describes``: whether the
    curve lies within :data:`DESCRIBES` of every count; what does not is no image of the runs."""

    contention: float
    coherence: float
    largest_error: float
    freedom: int
    peak_devices: float | None
    fewest: int

    @property
    def describes(self) -> bool:
        """Whether the law may stand for the runs."""
        return self.largest_error <= DESCRIBES

    def capacity(self, devices: float) -> float:
        """Throughput over that of the fewest devices."""
        x = devices / self.fewest
        return x / (1 + self.contention * (x - 1) + self.coherence * x * (x - 1))


def fit_law(devices: Sequence[int], efficiencies: Sequence[float]) -> Fit | None:
    """Least squares of x/C − 1 = σ(x − 1) + κ x(x − 1) with 0 ≤ σ ≤ 1 and κ ≥ 0; None with fewer than three counts.

    σ is a share of the work, so above one it would mean nothing: where throughput falls faster than that, the bound
    holds and the error says so.

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
    sigma, kappa = _within_bounds(columns * weight[:, None], deviation * weight)
    curve = x / (1 + columns @ np.array([sigma, kappa]))
    peak = max(float(np.sqrt((1 - sigma) / kappa)), 1.0) * fewest if kappa > 0 else None
    return Fit(
        contention=sigma,
        coherence=kappa,
        largest_error=float(np.abs(curve / capacity - 1).max()),
        freedom=len(devices) - 1 - 2,
        peak_devices=peak,
        fewest=fewest,
    )


def _within_bounds(columns: Any, target: Any) -> tuple[float, float]:
    """The least squares of σ in [0, 1] and κ ≥ 0: of the solutions inside and on each edge the best."""
    candidates = [tuple(np.linalg.lstsq(columns, target, rcond=None)[0])]
    candidates += [(sigma, _alone(columns[:, 1], target - sigma * columns[:, 0])) for sigma in (0.0, 1.0)]
    candidates.append((min(_alone(columns[:, 0], target), 1.0), 0.0))
    allowed = [(float(sigma), float(kappa)) for sigma, kappa in candidates if 0 <= sigma <= 1 and kappa >= 0]
    errors = [float(((columns @ np.array(pair) - target) ** 2).sum()) for pair in allowed]
    return allowed[int(np.argmin(errors))]


def _alone(column: Any, target: Any) -> float:
    """The least squares of one coefficient that is not below zero."""
    length = float(column @ column)
    return max(float(column @ target) / length, 0.0) if length else 0.0
