"""Bandwidths and sizes that say their unit."""

from __future__ import annotations

import math

import pytest

from trine.optim.plan.units import Bandwidth, parse_bytes, spell_bytes, spell_seconds
from trine.record.errors import UsageError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("450 GB/s", 450e9),
        ("400 Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("1.6 Tb/s", 200e9),
        ("25e3 MB/s", 25e9),
    ],
)
def test_bandwidths_in_bits_and_bytes(text: str, bytes_per_s: float) -> None:
    assert Bandwidth.parse(text).bytes_per_s == pytest.approx(bytes_per_s)


def test_both_directions_and_shared_adapters_are_divided() -> None:
    assert Bandwidth.gigabytes_per_s(900, directions=2) == Bandwidth.gigabytes_per_s(450)
    assert Bandwidth.gigabits_per_s(1600, devices=8) == Bandwidth.gigabytes_per_s(25)


@pytest.mark.parametrize(
    "text", ["450", "fast", "450 GB", "450 GiB/s", "1.2.3 GB/s", "", "-1 GB/s", "1e999 GB/s"]
)
def test_bandwidths_without_a_unit_or_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Bandwidth.parse(text)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True])
def test_only_positive_finite_numbers_are_bandwidths(value: float) -> None:
    with pytest.raises(UsageError):
        Bandwidth(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("24e9", 24 * 10**9),
        (".5kib", 512),
        (12, 12),
        ("2 TiB", 2**41),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80 gigs", "GB", "-3", "1e999", True, "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_bytes(text)


def test_spelling() -> None:
    assert spell_bytes(3 * 2**29) == "1.5 GiB" and spell_bytes(12) == "12 B"
    assert (
        spell_seconds(1.234) == "1.23 s"
        and spell_seconds(0.0456) == "45.6 ms"
        and spell_seconds(1.2e-5) == "12.0 µs"
    )
    for seconds, words in (
        (999.0, "999.00 s"),
        (1200.0, "20.0 min"),
        (-5400.0, "-1.5 h"),
        (7.57e6, "87.6 days"),
    ):
        assert spell_seconds(seconds) == words
