"""Jitter: its table, its shape, and clusters that the fit never saw."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.plan.jitter import MeasuredSteps, fitted, interval, jitter_of, measured
from trine.record.errors import UsageError


def clusters(slope: float = 1.0, family: str = "hopper") -> list[MeasuredSteps]:
    """Made up: the 95 % quantile is devices^slope · 1e-5 above the median, the others in proportion."""
    made = []
    for devices in (64, 256, 1024, 4096, 16384):
        size = devices**slope * 1e-5
        made.append(
            MeasuredSteps(
                devices, family, 250, 1.0, 1 - 2 * size, 1 - size, 1.0, 1 + size, 1 + 2 * size, 1 + 4 * size
            )
        )
    return made


def test_the_table_is_the_published_one(tables: Path) -> None:
    with (tables / "mlperf_step_jitter.csv").open(encoding="utf-8", newline="") as file:
        published = {
            (int(row["n_gpus"]), round(float(row["p95_s"]) / float(row["median_s"]), 4))
            for row in csv.DictReader(file)
        }
    assert {(each.devices, round(each.p95, 4)) for each in measured()} <= published


def test_every_log_says_where_it_is_and_its_quantiles_ascend() -> None:
    assert len(measured()) == 20 and max(each.devices for each in measured()) == 10_240
    for each in measured():
        assert each.source.startswith("github.com/mlcommons/")
        quantiles = [each.minimum, each.p5, 1.0, each.p95, each.p99, each.maximum]
        assert quantiles == sorted(quantiles)


def test_a_power_law_is_found_again() -> None:
    model = fitted(clusters(0.7))
    assert model.above == pytest.approx(0.7) and model.below == pytest.approx(0.7)
    quantiles = jitter_of(2048, "hopper", model)
    size = 2048**0.7 * 1e-5
    assert quantiles.at(0.95) == pytest.approx(1 + size, rel=1e-6)
    assert quantiles.at(0.99) == pytest.approx(1 + 2 * size, rel=1e-6)
    assert quantiles.at(0.05) == pytest.approx(1 - size, rel=1e-6)
    assert quantiles.at(0.5) == 1.0
    assert quantiles.at(0.75) == pytest.approx(1 + size * np.log(2) / np.log(10), rel=1e-6)


def test_clusters_that_are_alike_leave_no_spread_between_clusters() -> None:
    found = interval(1.0, 4096, model=fitted(clusters()), samples=50, steps=1000)
    assert found.mean_high_s - found.mean_low_s == pytest.approx(0, abs=1e-3)
    assert found.high_s == pytest.approx(1 + 0.04096, rel=1e-2)


def test_ten_thousand_devices_are_an_interval_that_a_small_job_does_not_have() -> None:
    few, many = interval(0.93, 8), interval(0.93, 10_240, family="hopper")
    assert few.high_s / few.low_s < 1.002
    assert 1.05 < many.high_s / many.low_s < 1.4
    assert many.low_s < many.median_s < many.high_s
    # The log of 10,240 has a mean 0.35 % above its median.
    assert many.mean_s / 0.93 == pytest.approx(1.0035, abs=0.005)
    assert many.mean_low_s < many.mean_s < many.mean_high_s


@settings(max_examples=15, deadline=None)
@given(
    few=st.integers(1, 20_000), factor=st.floats(1, 50), seed=st.integers(0, 1000), step=st.floats(1e-3, 100)
)
def test_more_devices_never_have_a_narrower_interval(few: int, factor: float, seed: int, step: float) -> None:
    found = interval(step, [few, int(few * factor)], samples=40, steps=20, seed=seed)
    assert found.low_s[1] <= found.low_s[0] * (1 + 1e-12)
    assert found.high_s[1] >= found.high_s[0] * (1 - 1e-12)
    for quantile in (0.01, 0.05):
        assert jitter_of(int(few * factor)).at(quantile) <= jitter_of(few).at(quantile) + 1e-12
        assert jitter_of(int(few * factor)).at(1 - quantile) >= jitter_of(few).at(1 - quantile) - 1e-12


def test_columns_are_as_each_alone_and_seeds_repeat() -> None:
    both = interval([1.0, 2.0, 3.0], [64, 4096, 64], seed=3)
    alone = interval(2.0, 4096, seed=3)
    assert both.high_s[1] == alone.high_s and both.low_s[2] == pytest.approx(3 * both.low_s[0])
    assert interval(1.0, 4096, seed=1).high_s != interval(1.0, 4096, seed=2).high_s


def test_held_out_clusters_lie_where_the_others_say() -> None:
    inside, means = [], []
    for one in measured():
        others = fitted([each for each in measured() if each is not one])
        found = interval(1.0, one.devices, family=one.family, model=others)
        inside.append(one.share_within(float(found.low_s), float(found.high_s)))
        means.append(bool(found.mean_low_s <= one.mean <= found.mean_high_s))
    assert np.mean(inside) > 0.8 and np.median(inside) > 0.9
    assert np.mean(means) >= 0.85
    # Not by intervals so wide that anything lies in them.
    assert np.median([interval(1.0, each.devices).high_s for each in measured()]) < 1.05


def test_steps_within_two_multiples_are_counted_between_quantiles() -> None:
    one = MeasuredSteps(64, "hopper", 100, 1.0, 0.8, 0.9, 1.0, 1.2, 1.3, 2.0)
    assert one.share_within(0.9, 1.2) == pytest.approx(0.9)
    assert one.share_within(0.5, 3.0) == pytest.approx(1.0)
    assert one.share_within(1.0, 1.1) == pytest.approx(0.225)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jitter_of(0), "at least one device"),
        (lambda: interval(1.0, 0), "at least one device"),
        (lambda: interval(-1.0, 8), "at least 0 seconds"),
        (lambda: interval(1.0, 8, coverage=1.0), "between 0 and 1"),
        (lambda: fitted(clusters()[:3]), "at least four clusters"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
