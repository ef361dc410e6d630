"""Statistics of step times: intervals, ratios of runs, warm-up and outliers. numpy only, deterministic.

Steps of one run are not independent samples of the program: runs differ by more than their steps do
(placement, clocks, neighbours). So a comparison resamples runs first and steps within them, and asks
for a minimum effect besides. Without any real change, this rule raises a false alarm in at most 1 of 100
comparisons of 3 runs a side whose medians scatter by 2 %, and in at most 7 of 100 at 5 %; a Mann–Whitney
test on the steps does in more than a quarter (``tests/analyzers/test_statistics.py`` simulates both).

The bootstrap of a median needs no resampling of all samples. The j-th order statistic of a resample
of size n is the sorted sample at index floor(n · U), where U is the j-th order statistic of n
uniform numbers and follows Beta(j, n − j + 1). Drawing U gives exactly the bootstrap's distribution
(Efron 1979, "Bootstrap methods: another look at the jackknife", section 3) in constant time a draw,
so ten steps and ten million cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.errors import UsageError

__all__ = [
    "MINIMUM_EFFECT",
    "Ratio",
    "bootstrap_median",
    "find_outliers",
    "find_warm_up",
    "ratio_of_medians",
]

Floats = npt.NDArray[np.float64]

#: A change below this is not called a regression or an improvement, however sure it is.
MINIMUM_EFFECT = 0.05

#: MAD × this estimates the standard deviation of normal data (Rousseeuw and Croux 1993).
_MAD_TO_DEVIATION = 1.4826

#: Deviations beyond which a step is named. Step times lean to the right, so this is wider than the
#: 2.5 to 3 that Leys et al. 2013 advise for symmetric data.
_OUTLIER_DEVIATIONS = 5.0

#: Spread below which steps count as equal: a perfectly regular run must not name each jitter.
_SMALLEST_SPREAD = 0.01

#: Steps in a row that must be steady before warm-up is over: compilation and the first bucket
#: rebuild leave a fast step between two slow ones.
_SETTLED = 2


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two sides' medians (first over second) with its bootstrap interval.

    ``runs`` counts the runs a side. ``several`` is false when a side has one run: then the interval
    holds only what varies inside a run, and nothing may be concluded from it alone.
    ``smallest_change`` is the relative slow-down that this data would have shown with probability
    ``power``; with one run a side it is a lower bound.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    minimum_effect: float
    runs: tuple[int, int]
    smallest_change: float
    power: float

    @property
    def several(self) -> bool:
        """Whether both sides have at least two runs."""
        return min(self.runs) >= 2

    @property
    def slower(self) -> bool:
        """The interval lies above 1 and the effect exceeds the minimum (on the first side)."""
        return self.low > 1.0 and self.ratio > 1.0 + self.minimum_effect

    @property
    def faster(self) -> bool:
        """The interval lies below 1 and the effect exceeds the minimum, as a ratio the other way round."""
        return self.high < 1.0 and self.ratio < 1.0 / (1.0 + self.minimum_effect)

    @property
    def conclusive(self) -> bool:
        """Whether the data could have shown a change of the minimum effect: the interval either
        decides, or rules out a slow-down of more than the minimum effect."""
        return self.slower or self.faster or self.high <= 1.0 + self.minimum_effect


def bootstrap_median(
    samples: npt.ArrayLike, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Median of ``samples`` and its percentile bootstrap interval: ``(median, low, high)``.

    ``samples``: shape (n,), any unit; the result has the same unit. The samples are taken as
    exchangeable: where neighbouring steps resemble each other, the interval is too narrow. One
    sample gives an interval of no width. Raises ``UsageError`` when there is none, or on NaN.
    """
    values = _sorted(samples)
    medians = _resampled_medians(values, resamples, np.random.default_rng(seed))
    low, high = _interval(medians, confidence)
    median = float(np.median(values))
    # The percentile interval of a small sample can miss its own centre by rounding.
    return median, min(low, median), max(high, median)


def ratio_of_medians(
    first: Sequence[npt.ArrayLike],
    second: Sequence[npt.ArrayLike],
    *,
    confidence: float = 0.95,
    minimum_effect: float = MINIMUM_EFFECT,
    power: float = 0.8,
    resamples: int = 4000,
    seed: int = 0,
) -> Ratio:
    """Hierarchical bootstrap (runs, then steps) of median(first) / median(second).

    ``first``, ``second``: one array of step times, shape (steps,), a run; positive, one unit. The
    median of a side is the median of its runs' medians, so a long run weighs no more than a short
    one and one bad run of three does not decide. With three runs a side whose medians scatter
    normally, the 95 % interval holds the truth in about 90 of 100 cases, with five in 95: that is
    why a minimum effect is asked for besides. Raises ``UsageError`` on a side without runs, on a run
    without steps, and on step times that are not positive.

    The smallest change: with s the deviation of the resampled log ratios, the interval excludes 1
    with the wanted power from (z_confidence + z_power) s on, and the effect exceeds the minimum with
    it from log(1 + minimum) + z_power s on; both must hold.
    """
    generator = np.random.default_rng(seed)
    sides = [[_sorted(run) for run in side] for side in (first, second)]
    for side in sides:
        if not side:
            raise UsageError("a side of the comparison has no runs; give at least one")
        if any(run[0] <= 0 for run in side):
            raise UsageError("step times to compare must be above zero; the record holds one that is not")
    draws = [_resampled_sides(side, resamples, generator) for side in sides]
    ratios = draws[0] / draws[1]
    centre = _median_of_runs(sides[0]) / _median_of_runs(sides[1])
    low, high = _interval(ratios, confidence)
    spread = float(np.std(np.log(ratios)))
    normal = NormalDist()
    z_confidence, z_power = normal.inv_cdf(0.5 + confidence / 2), normal.inv_cdf(power)
    smallest = max((z_confidence + z_power) * spread, float(np.log1p(minimum_effect)) + z_power * spread)
    return Ratio(
        ratio=centre,
        low=min(low, centre),
        high=max(high, centre),
        confidence=confidence,
        minimum_effect=minimum_effect,
        runs=(len(sides[0]), len(sides[1])),
        smallest_change=float(np.expm1(smallest)),
        power=power,
    )


def find_warm_up(samples: npt.ArrayLike) -> int:
    """How many leading steps are warm-up (compilation, caches, the allocator's first growth).

    The steady level is the median of the second half, its spread the MAD of that half. Warm-up ends
    before the first two steps in a row that lie no more than five deviations above the level, and
    before the first step that does not stand out as slow (:func:`find_outliers`) from those after it:
    what starts a run is never an outlier of it. At most half of the steps are warm-up; with fewer
    than four steps nothing can be told, and it is 0.

    ``samples``: step times in order, shape (steps,), one unit.
    """
    values = np.asarray(samples, dtype=np.float64)
    half = len(values) // 2
    if half < 2:
        return 0
    level, spread = _level_and_spread(values[half:])
    steady = values <= level + _OUTLIER_DEVIATIONS * spread
    start = next((at for at in range(half) if steady[at : at + _SETTLED].all()), half)
    while start < half and 0 in find_outliers(values[start:]) and values[start] > np.median(values[start:]):
        start += 1
    return start


def find_outliers(samples: npt.ArrayLike) -> tuple[int, ...]:
    """Positions of the steps that stand out from the rest, slow or fast, ascending.

    A step stands out when it lies more than five deviations (1.4826 · MAD, at least 1 % of the
    median) from the median: a robust rule, which the outliers themselves cannot hide from (Leys et
    al. 2013, "Detecting outliers: do not use standard deviation around the mean, use absolute
    deviation around the median"). Fewer than four steps name none. Give it the steady steps.

    ``samples``: step times, shape (steps,), one unit.
    """
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < 4:
        return ()
    level, spread = _level_and_spread(values)
    return tuple(int(i) for i in np.flatnonzero(np.abs(values - level) > _OUTLIER_DEVIATIONS * spread))


def _level_and_spread(values: Floats) -> tuple[float, float]:
    level = float(np.median(values))
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(values - level)))
    return level, max(deviation, _SMALLEST_SPREAD * abs(level))


def _sorted(samples: npt.ArrayLike) -> Floats:
    values: Floats = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    if not len(values):
        raise UsageError("the median of no samples was asked for; record at least one step")
    if np.isnan(values[-1]):  # NaN sorts last
        raise UsageError("a sample is not a number; leave out steps whose time is unknown")
    return values


def _resampled_medians(values: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Medians of ``resamples`` bootstrap resamples of sorted ``values``, shape (resamples,)."""
    count = len(values)
    middle = (count + 1) // 2
    first = generator.beta(middle, count - middle + 1, size=resamples)
    medians: Floats = values[_positions(first, count)]
    if count % 2 == 0:
        # The next order statistic, given this one: the least of the uniforms left above it.
        above = generator.beta(1, count - middle, size=resamples)
        medians = (medians + values[_positions(first + (1 - first) * above, count)]) / 2
    return medians


def _positions(uniform: Floats, count: int) -> npt.NDArray[Any]:
    return np.minimum((uniform * count).astype(np.int64), count - 1)


def _resampled_sides(runs: Sequence[Floats], resamples: int, generator: np.random.Generator) -> Floats:
    """Medians over resampled runs of the medians of their resampled steps, shape (resamples,)."""
    picks = generator.integers(len(runs), size=(resamples, len(runs)))
    medians = np.empty(picks.shape, dtype=np.float64)
    for index, run in enumerate(runs):
        picked = picks == index
        medians[picked] = _resampled_medians(run, int(picked.sum()), generator)
    result: Floats = np.median(medians, axis=1)
    return result


def _median_of_runs(runs: Sequence[Floats]) -> float:
    return float(np.median([np.median(run) for run in runs]))


def _interval(draws: Floats, confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must lie between 0 and 1, not {confidence}; 0.95 is usual")
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
