"""Statistics by simulation: intervals cover, comparisons rarely cry wolf and mostly see a real change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.statistics import (
    Ratio,
    bootstrap_median,
    find_outliers,
    find_warm_up,
    ratio_of_medians,
)
from trine.record.errors import UsageError

times = st.lists(st.floats(1e3, 1e12), min_size=1, max_size=60)


def simulate(
    generator: np.random.Generator, runs: int, run_deviation: float, level: float = 1e8, steps: int = 60
) -> list[np.ndarray]:
    """Runs whose medians scatter by ``run_deviation``, with steps of 3 % noise that lean to the right."""
    medians = level * (1 + run_deviation * generator.standard_normal(runs))
    noise = np.exp(0.03 * generator.standard_normal((runs, steps)))
    return list(medians[:, None] * noise)


def compare_many(runs: int, run_deviation: float, change: float, tries: int = 400) -> list[Ratio]:
    generator = np.random.default_rng(7)
    return [
        ratio_of_medians(
            simulate(generator, runs, run_deviation, level=1e8 * change),
            simulate(generator, runs, run_deviation),
            resamples=500,
            seed=attempt,
        )
        for attempt in range(tries)
    ]


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


@given(times)
def test_the_median_lies_in_its_interval_and_is_numpys(samples: list[float]) -> None:
    median, low, high = bootstrap_median(samples, resamples=200)
    assert median == float(np.median(samples))
    assert min(samples) <= low <= median <= high <= max(samples)


@given(times, st.integers(0, 5))
def test_the_same_seed_gives_the_same_interval(samples: list[float], seed: int) -> None:
    assert bootstrap_median(samples, seed=seed) == bootstrap_median(list(reversed(samples)), seed=seed)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 41])
def test_order_statistics_draw_the_same_distribution_as_resampling(count: int) -> None:
    samples = np.random.default_rng(1).lognormal(size=count)
    generator = np.random.default_rng(2)
    plain = np.median(samples[generator.integers(count, size=(20_000, count))], axis=1)
    # The mean of the quantiles over all levels is the mean of the distribution, and their mean
    # distance its spread: equal for both ways, whatever atoms the distribution has.
    levels = np.linspace(0.005, 0.995, 100)
    intervals = np.array([bootstrap_median(samples, confidence=c, resamples=20_000)[1:] for c in levels])
    expected = np.array([np.quantile(plain, [(1 - c) / 2, (1 + c) / 2]) for c in levels])
    assert intervals.mean() == pytest.approx(expected.mean(), rel=0.02)
    spread = np.diff(intervals, axis=1).mean()
    assert spread == pytest.approx(np.diff(expected, axis=1).mean(), rel=0.05, abs=1e-9)


def test_the_interval_of_a_median_covers_the_truth() -> None:
    generator = np.random.default_rng(3)
    covered = []
    for attempt in range(600):
        _, low, high = bootstrap_median(generator.lognormal(0.0, 0.1, size=40), seed=attempt, resamples=500)
        covered.append(low <= 1.0 <= high)
    assert 0.91 <= share(covered) <= 0.98


@pytest.mark.parametrize(("deviation", "most"), [(0.02, 0.01), (0.05, 0.07)])
def test_three_runs_a_side_rarely_cry_wolf(deviation: float, most: float) -> None:
    assert share([ratio.slower for ratio in compare_many(3, deviation, change=1.0)]) <= most


def mann_whitney_calls_slower(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """The usual test on steps as if each were a witness of its own: one-sided, at 2.5 %, large samples."""
    one, other = np.concatenate(first), np.concatenate(second)
    ranks = np.concatenate([one, other]).argsort().argsort()[: len(one)] + 1
    statistic = ranks.sum() - len(one) * (len(one) + 1) / 2
    deviation = np.sqrt(len(one) * len(other) * (len(one) + len(other) + 1) / 12)
    return bool((statistic - len(one) * len(other) / 2) / deviation > 1.96)


def test_a_test_that_takes_steps_for_witnesses_cries_wolf() -> None:
    generator = np.random.default_rng(7)
    called = [
        mann_whitney_calls_slower(simulate(generator, 3, 0.02), simulate(generator, 3, 0.02))
        for _ in range(400)
    ]
    assert share(called) > 0.25  # why runs are resampled first


def test_one_run_a_side_would_cry_wolf_and_says_that_it_is_not_several() -> None:
    ratios = compare_many(1, 0.05, change=1.0)
    assert share([ratio.slower for ratio in ratios]) > 0.15  # why one run never fails a check
    assert not any(ratio.several for ratio in ratios)


def test_a_real_slow_down_is_seen() -> None:
    assert share([ratio.slower for ratio in compare_many(3, 0.02, change=1.12)]) >= 0.95
    assert share([ratio.faster for ratio in compare_many(3, 0.02, change=1 / 1.12)]) >= 0.95


def test_intervals_of_five_runs_cover_the_truth() -> None:
    ratios = compare_many(5, 0.03, change=1.1)
    assert 0.9 <= share([ratio.low <= 1.1 <= ratio.high for ratio in ratios]) <= 0.99


def test_the_smallest_change_is_what_would_have_been_shown() -> None:
    promised = float(np.median([ratio.smallest_change for ratio in compare_many(5, 0.02, change=1.0)]))
    seen = share([ratio.slower for ratio in compare_many(5, 0.02, change=1 + promised)])
    assert 0.65 <= seen <= 0.95
    assert promised > 0.05


def test_a_sure_but_small_change_is_no_regression() -> None:
    generator = np.random.default_rng(5)
    ratio = ratio_of_medians(
        simulate(generator, 5, 0.001, level=1.03e8, steps=500), simulate(generator, 5, 0.001, steps=500)
    )
    assert ratio.low > 1 and not ratio.slower and ratio.conclusive
    tight = ratio_of_medians([[103.0] * 9] * 3, [[100.0] * 9] * 3, minimum_effect=0.02)
    assert tight.slower and tight.ratio == pytest.approx(1.03)


def test_noise_that_hides_the_minimum_effect_is_inconclusive() -> None:
    ratios = compare_many(3, 0.2, change=1.0, tries=100)
    assert share([ratio.conclusive for ratio in ratios]) < 0.5
    assert np.median([ratio.smallest_change for ratio in ratios]) > 0.3
    assert share([ratio.conclusive for ratio in compare_many(5, 0.005, change=1.0, tries=100)]) > 0.95


def test_samples_that_cannot_be_compared_are_refused_in_one_line() -> None:
    for first in ([], [[]], [[0.0, 1.0]], [[float("nan")]]):
        with pytest.raises(UsageError) as caught:
            ratio_of_medians(first, [[1.0]])
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="confidence"):
        bootstrap_median([1.0], confidence=95)


def test_warm_up_ends_where_steps_settle() -> None:
    generator = np.random.default_rng(8)
    steady = 100 + generator.standard_normal(40)
    assert find_warm_up(steady) == 0
    assert find_warm_up(np.concatenate([[900.0, 300.0], steady])) == 2
    assert find_warm_up(np.concatenate([[900.0, 101.0, 250.0], steady])) == 3  # a fast step between
    assert find_warm_up([100.0, 100.0, 100.0, 100.0, 500.0]) == 0  # slow at the end is no warm-up
    assert find_warm_up([500.0, 100.0, 100.0]) == 0  # too few to tell


def test_the_first_steps_are_warm_up_or_ordinary_but_never_outliers() -> None:
    """Where the second half scatters more than the rest, the start may lie within its spread and yet stand out."""
    steady = [100.0, 100.5, 99.5, 100.2, 99.8, 100.1, 99.9, 100.3, 99.7, 100.4]
    restless = [100.0, 110.0, 90.0, 112.0, 88.0, 105.0, 95.0, 108.0, 92.0, 100.0, 101.0, 99.0]
    samples = np.array([130.0, 128.0, *steady, *restless])
    assert find_warm_up(samples) == 2
    assert not {0, 1} & set(find_outliers(samples[find_warm_up(samples) :]))


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=40))
def test_no_steady_step_at_the_start_is_slow(samples: list[float]) -> None:
    warm_up = find_warm_up(samples)
    if warm_up < len(samples) // 2:
        steady = np.array(samples[warm_up:])
        assert not (0 in find_outliers(steady) and steady[0] > np.median(steady))


@given(st.lists(st.floats(1, 1e9), max_size=40))
def test_warm_up_never_takes_more_than_half(samples: list[float]) -> None:
    assert 0 <= find_warm_up(samples) <= len(samples) // 2


def test_outliers_are_named_and_regular_noise_is_not() -> None:
    generator = np.random.default_rng(9)
    steps = 100 + generator.standard_normal(200)
    assert find_outliers(steps) == ()
    steps[[3, 77, 150]] = [180.0, 30.0, 140.0]
    assert find_outliers(steps) == (3, 77, 150)
    assert find_outliers([100.0] * 20 + [104.0]) == ()  # a perfectly regular run: 4 % is jitter
    assert find_outliers([100.0] * 20 + [106.0]) == (20,)
    assert find_outliers([1.0, 1.0, 9.0]) == ()
