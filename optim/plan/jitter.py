"""How much steps vary at scale: jitter and stragglers as measured on clusters of 64 to 10,240 devices.

    jitter_of(10_240, "hopper")                    quantiles of a step's time over its median, on an ordinary cluster
    interval(0.93, 10_240)                         what a step takes there, and what a run's mean is, with their spread

A synchronous step ends with its slowest device, so its time varies the more the more devices there are. ``jitter.csv`` holds the
steps' quantiles of published logs (MLPerf Training, GPT-3 and Llama 3.1 405B). The distance of each quantile from the median
grows as a power of the number of devices; around that, clusters differ severalfold (network, hosts, software), which is drawn
too. What is not here: an error of the predicted step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trine.optim.plan._tables import packaged_rows
from trine.optim.plan.nccl import Floats
from trine.record.errors import UsageError

__all__ = [
    "Interval",
    "Jitter",
    "JitterModel",
    "MeasuredSteps",
    "fitted",
    "interval",
    "jitter_of",
    "measured",
]

#: Quantiles of a log that the model is made of: below the median, and above it.
_BELOW, _ABOVE = ("p5", "minimum"), ("p95", "p99", "maximum")
#: Levels they stand for; a log of about 250 steps has its extremes at 1/250 and 1 − 1/250.
_LEVELS = {"p5": 0.05, "minimum": 1 / 250, "p95": 0.95, "p99": 0.99, "maximum": 1 - 1 / 250}
#: Logs print milliseconds: no distance is known to be smaller.
_LEAST = 1e-5
#: A family's own level counts as much as its clusters against this many of all families.
_PRIOR_CLUSTERS = 4.0
#: Beyond so many times the largest cluster that was measured nothing is known; what was known there is kept.
_BEYOND = 4.0
#: No step takes less than this of the median, whatever is drawn.
_FASTEST = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of one published run: quantiles over the median (1 is the median). ``source``: the repository of its log."""

    devices: int
    family: str
    steps: int
    median_s: float
    minimum: float
    p5: float
    mean: float
    p95: float
    p99: float
    maximum: float
    source: str = ""

    def share_within(self, low: float, high: float) -> float:
        """Part of its steps between two multiples of the median, by interpolation between its quantiles."""
        values = [self.minimum, self.p5, 1.0, self.p95, self.p99, self.maximum]
        levels = [0.0, 0.05, 0.5, 0.95, 0.99, 1.0]
        # Equal quantiles would leave interpolation undefined.
        values = list(np.maximum.accumulate(np.asarray(values) + np.arange(6) * 1e-12))
        return float(np.interp(high, values, levels) - np.interp(low, values, levels))


@lru_cache(maxsize=1)
def measured() -> tuple[MeasuredSteps, ...]:
    """The package's: all rows of ``jitter.csv``."""
    quantiles = ("median_s", "minimum", "p5", "mean", "p95", "p99", "maximum")
    return tuple(
        MeasuredSteps(
            devices=int(row["devices"]),
            family=row["family"],
            steps=int(row["steps"]),
            source=row["source"],
            **{name: float(row[name]) for name in quantiles},
        )
        for row in packaged_rows("jitter.csv")
    )


@dataclass(frozen=True, slots=True)
class Jitter:
    """Quantiles of a step's time over its median: ``factors`` at ``levels``, both ascending."""

    levels: tuple[float, ...]
    factors: tuple[float, ...]

    def at(self, level: float) -> float:
        """By interpolation; the ends beyond the outermost."""
        return float(np.interp(level, self.levels, self.factors))


@dataclass(frozen=True, slots=True)
class JitterModel:
    """ln(distance from the median) = ``intercepts`` + slope · ln(devices) + ``spreads`` · z, by quantile.

    z is a cluster's, one below the median and one above, of Student's distribution with ``freedom`` degrees; so is the slope,
    ``below`` and ``above``. ``offsets``: what a family's clusters have above all others' on either side. ``largest``:
    devices of the largest cluster measured. ``slowest``: the slowest step that any had, over its median.
    """

    intercepts: dict[str, float]
    below: float
    above: float
    spreads: dict[str, float]
    offsets: dict[str, tuple[float, float]]
    freedom: int
    largest: int
    slowest: float

    def factors(
        self, levels: Floats, devices: npt.ArrayLike, family: str, below: Floats, above: Floats
    ) -> Floats:
        """A step's time over the median at ``levels``, of clusters whose z are ``below`` and ``above``; all broadcast.

        Between the quantiles it knows, distance grows with the logarithm of what is rarer (exponential tails).
        """
        offset_below, offset_above = self.offsets.get(family, (0.0, 0.0))
        scale = np.log(np.clip(np.asarray(devices, dtype=float), 1, self.largest * _BEYOND))
        down = self._distances(_BELOW, self.below * scale + offset_below, below)
        up = self._distances(_ABOVE, self.above * scale + offset_above, above)
        faster = np.maximum(1 - _tail(2 * levels, down, _BELOW), _FASTEST)
        slower = np.minimum(1 + _tail(2 * (1 - levels), up, _ABOVE), self.slowest)
        return np.where(levels < 0.5, faster, slower)

    def _distances(self, names: tuple[str, ...], level: Floats, z: Floats) -> list[Floats]:
        """At the known quantiles, outwards, each at least the one before."""
        found = [np.exp(self.intercepts[name] + level + self.spreads[name] * z) for name in names]
        return list(np.maximum.accumulate(np.asarray(found), axis=0))


def _tail(twice: Floats, distances: list[Floats], names: tuple[str, ...]) -> Floats:
    """Distance at a level of which ``twice`` is twice the rarer side: straight lines in the logarithm of rarity."""
    rarity = -np.log(np.clip(twice, 1e-12, 1.0))
    known_at, known = 0.0, np.zeros_like(rarity)
    found = known
    for name, distance in zip(names, distances, strict=True):
        level = _LEVELS[name]
        at = -np.log(2 * min(level, 1 - level))
        share = np.clip((rarity - known_at) / (at - known_at), 0.0, 1.0)
        found = found + share * (distance - known)
        known_at, known = at, distance
    return found


def fitted(clusters: Sequence[MeasuredSteps]) -> JitterModel:
    """By least squares over clusters. Raises ``UsageError`` for fewer than four."""
    if len(clusters) < 4:
        raise UsageError(f"jitter is fitted on at least four clusters, not {len(clusters)}")
    count = np.log([each.devices for each in clusters])
    freedom = len(clusters) - 2
    # A new cluster also has the fit's own uncertainty: 1/n and, at the ends, as much again.
    widened = float(np.sqrt(1 + 2 / len(clusters)))
    intercepts: dict[str, float] = {}
    spreads: dict[str, float] = {}
    slopes, left = [], []
    for names in (_BELOW, _ABOVE):
        distances = {
            name: np.log(np.maximum([abs(getattr(each, name) - 1) for each in clusters], _LEAST))
            for name in names
        }
        mean = np.mean(list(distances.values()), axis=0)
        slope = max(float(np.polyfit(count, mean, 1)[0]), 0.0)
        for name, distance in distances.items():
            intercepts[name] = float(np.mean(distance - slope * count))
            rest = distance - intercepts[name] - slope * count
            spreads[name] = float(np.sqrt((rest**2).sum() / freedom)) * widened
        slopes.append(slope)
        left.append(mean - mean.mean() - slope * (count - count.mean()))
    families = np.asarray([each.family for each in clusters])
    offsets = {
        str(family): (_shrunk(left[0][families == family]), _shrunk(left[1][families == family]))
        for family in np.unique(families)
    }
    largest = max(each.devices for each in clusters)
    slowest = max(each.maximum for each in clusters)
    return JitterModel(intercepts, slopes[0], slopes[1], spreads, offsets, freedom, largest, slowest)


def _shrunk(left: Floats) -> float:
    return float(left.sum() / (len(left) + _PRIOR_CLUSTERS))


@lru_cache(maxsize=1)
def _model() -> JitterModel:
    return fitted(measured())


def jitter_of(devices: int, family: str = "", model: JitterModel | None = None) -> Jitter:
    """Of an ordinary cluster of so many devices; a family without logs has all families' mean. Raises ``UsageError``."""
    if devices < 1:
        raise UsageError(f"jitter is of at least one device, not {devices}")
    levels = np.asarray([0.004, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.996])
    nothing = np.zeros(1)
    factors = (model or _model()).factors(levels, devices, family, nothing, nothing)
    return Jitter(tuple(levels.tolist()), tuple(factors.tolist()))


@dataclass(frozen=True, slots=True)
class Interval:
    """Columns of seconds. One step's: ``low_s``, ``median_s``, ``high_s``. The mean over a run's steps: ``mean_low_s``,
    ``mean_s``, ``mean_high_s``."""

    low_s: Floats
    median_s: Floats
    high_s: Floats
    mean_low_s: Floats
    mean_s: Floats
    mean_high_s: Floats


def interval(
    step_s: npt.ArrayLike,
    devices: npt.ArrayLike,
    *,
    family: str = "",
    coverage: float = 0.9,
    samples: int = 400,
    steps: int = 100,
    seed: int = 0,
    model: JitterModel | None = None,
) -> Interval:
    """What a step of median ``step_s`` takes on ``devices``: ``samples`` clusters are drawn, and ``steps`` on each.

    The same draws serve every number of devices, so more devices never have a narrower interval. Raises ``UsageError``.
    """
    seconds, count = np.broadcast_arrays(np.asarray(step_s, dtype=float), np.asarray(devices))
    if not 0 < coverage < 1 or samples < 2 or steps < 1:
        raise UsageError(
            f"an interval covers between 0 and 1 of at least two clusters' steps, not {coverage} of {samples}"
        )
    if (count < 1).any() or not (seconds >= 0).all():
        raise UsageError(
            f"a step of at least 0 seconds on at least one device is needed, not {seconds.min()} s on {count.min()}"
        )
    generator = np.random.default_rng(seed)
    used = model or _model()
    below, above = generator.standard_t(used.freedom, (2, samples, 1))
    # Strata: a hundred steps have one in each percent, as a run's steps do.
    levels = (np.arange(steps) + generator.random((samples, steps))) / steps
    tail = (1 - coverage) / 2
    rows = []
    sizes, which = np.unique(count, return_inverse=True)
    for size in sizes:
        drawn = used.factors(levels, float(size), family, below, above)
        means = drawn.mean(axis=1)
        rows.append([*np.quantile(drawn, [tail, 0.5, 1 - tail]), *np.quantile(means, [tail, 0.5, 1 - tail])])
    found = np.asarray(rows)[which.reshape(count.shape)]
    return Interval(*(np.asarray(seconds * found[..., column]) for column in range(6)))
