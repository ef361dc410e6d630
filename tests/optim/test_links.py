"""Measured latency and bandwidth: the same on every rank, bounded in time, a matching calibration first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trine.record import hardware

pytest.importorskip("torch")

from trine.optim.runtime.links import CALIBRATED, ON_THE_SPOT, Link


def test_links_are_measured_inside_and_across_and_agreed(four_ranks: Any, tmp_path: Path) -> None:
    operations = ("all_reduce", "broadcast", "shift")
    by_rank = four_ranks.run("link_cases:measured", 4, str(tmp_path), operations)
    first, _ = by_rank[0]
    for found, again_s in by_rank:
        assert found == first, "ranks measured different numbers"
        assert again_s < 0.05
    for links in first.values():
        assert (links.whole.ranks, links.inside.ranks, links.across.ranks) == (4, 2, 2)
        for link in (links.whole, links.inside, links.across):
            assert link.source == ON_THE_SPOT
            assert link.backend == "gloo"
            assert 0 < link.alpha_s < 1
            assert 0 < link.bytes_per_s < 1e12
            assert link.seconds(2**20) > link.seconds(0) == link.alpha_s


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "calibrated"
    monkeypatch.setenv("TRINE_CACHE", str(folder))
    collective: dict[str, Any] = {"backend": "gloo", "ranks": 2, "alpha_s": 1.25e-4, "bytes_per_s": 2.5e9}
    hardware.store_calibration(
        hardware.Peaks(
            hardware.processor_name(), {}, None, None, None, "test", True, 1, collective=collective
        )
    )
    return str(folder)


def test_a_matching_calibration_is_taken(two_ranks: Any, calibration: str, tmp_path: Path) -> None:
    expected = Link(1.25e-4, 2.5e9, "gloo", 2, CALIBRATED)
    assert two_ranks.run("link_cases:calibrated_by_some", [calibration, calibration]) == [expected] * 2
    # The first rank's counts, also where another user's cache on the same machine has none.
    empty = str(tmp_path / "empty")
    assert two_ranks.run("link_cases:calibrated_by_some", [calibration, empty]) == [expected] * 2
    one, other = two_ranks.run("link_cases:calibrated_by_some", [empty, calibration])
    assert one == other
    assert one.source == ON_THE_SPOT


def test_a_calibration_of_other_ranks_is_not_taken(four_ranks: Any, calibration: str) -> None:
    found = four_ranks.run("link_cases:calibrated_by_some", [calibration] * 4)
    assert {link.source for link in found} == {ON_THE_SPOT}
    assert len(set(found)) == 1


def test_a_slow_network_is_measured_in_bounded_time(two_ranks: Any) -> None:
    """50 ms a message: three sizes, six messages each, and no more."""
    for link, took_s in two_ranks.run("link_cases:slow_measured", 0.05):
        assert 0.04 < link.alpha_s < 0.15
        assert took_s < 2.5


def test_a_link_says_where_it_comes_from() -> None:
    link = Link(50e-6, 1.5e9, "gloo", 4, ON_THE_SPOT)
    assert str(link) == "α 50 µs, β 1.50 GB/s (gloo, 4 ranks, measured on the spot)"
    assert replace(link, alpha_s=0.0).seconds(1.5e9) == 1.0
