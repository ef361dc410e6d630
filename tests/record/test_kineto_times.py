"""The time parser against decimal arithmetic."""

from __future__ import annotations

import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.record.model import MISSING
from trine.record.readers._kineto_times import nanoseconds, nanoseconds_of, nanoseconds_of_numbers, whole

numbers = st.from_regex(r"\A-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2})?\Z")


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=30))
def test_a_column_is_parsed_as_each_of_its_numbers(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    assert nanoseconds(encoded).tolist() == [nanoseconds_of(text) for text in encoded]


@settings(deadline=None)
@given(st.integers(-(2**61), 2**61), st.integers(0, 3))
def test_whole_nanoseconds_come_back_exactly(value: int, zeros: int) -> None:
    sign, (whole_part, rest) = "-" * (value < 0), divmod(abs(value), 1000)
    text = f"{sign}{whole_part}.{rest:03}{'0' * zeros}".encode()
    assert nanoseconds([text, b"1", text]).tolist() == [value, 1000, value]


@settings(deadline=None)
@given(numbers)
def test_one_number_is_the_decimal_rounded_half_to_even(text: str) -> None:
    exact = (Decimal(text) * 1000).to_integral_value()
    found = nanoseconds_of(text.encode())
    assert found == (int(exact) if abs(Decimal(text)) <= 2**62 // 1000 else MISSING)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20))
def test_anything_else_is_missing_and_never_raises(texts: list[bytes]) -> None:
    texts = [text.replace(b"\0", b"x") for text in texts]
    assert nanoseconds(texts).tolist() == [nanoseconds_of(text) for text in texts]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_doubles_are_enough_for_three_decimals(values: list[tuple[int, int]]) -> None:
    """Kineto's own times are below 2**43 microseconds; neighbours a nanosecond apart must stay apart."""
    exact = [value // 10**cut * 10**cut for value, cut in values]
    decoded = [
        json.loads(f"{value / 1000:.3f}") if abs(value) < 2**52 else float(Decimal(value) / 1000)
        for value in exact
    ]
    found = nanoseconds_of_numbers(decoded)
    assert found is not None and found.tolist() == exact


@settings(deadline=None)
@given(st.lists(st.one_of(numbers, st.sampled_from(["null", '"5"', "[1]", "{}"])), min_size=1, max_size=10))
def test_doubles_are_refused_where_they_are_not_enough(texts: list[str]) -> None:
    exact = nanoseconds([text.encode() for text in texts])
    found = nanoseconds_of_numbers([json.loads(text) for text in texts])
    if found is not None:
        # More than three decimals round half a double's step away from here: never two nanoseconds.
        assert np.abs(found - exact).max() <= (
            1 if any(len(text.partition(".")[2]) > 3 for text in texts) else 0
        )


def test_absolute_times_with_decimals_are_refused() -> None:
    assert nanoseconds_of_numbers([1712195495519695.8]) is None
    assert nanoseconds_of_numbers([1.2345]) is None
    assert nanoseconds_of_numbers([2**53 + 1]) is None
    assert nanoseconds_of_numbers([1706850122846038, 1.5]).tolist() == [1706850122846038000, 1500]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1712195495519695.8", 1712195495519695800),  # a double would say ...695750
        (b"4458676522690.655", 4458676522690655),
        (b"1706850122846038", 1706850122846038000),
        (b"0.0005", 0),
        (b"0.0015", 2),
        (b"-0.5", -500),
        (b'"1606910596297023"', 1606910596297023000),
        (b"1.7e15", 1700000000000000000),
        (b"null", MISSING),
        (b"", MISSING),
        (b"9223372036854775807", MISSING),
        (b"1e9999999", MISSING),
        (b"1e-9999999", 0),
        (b"Infinity", MISSING),
        (b"1.2.3", MISSING),
        (b"--1", MISSING),
    ],
)
def test_known_numbers(text: bytes, expected: int) -> None:
    assert nanoseconds_of(text) == expected
    assert nanoseconds([text, b"1"]).tolist() == [expected, 1000]


def test_no_numbers_at_all() -> None:
    assert nanoseconds([]).shape == (0,)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.integers(),
            st.floats(),
            st.booleans(),
            st.text(max_size=5),
            st.lists(st.integers(), max_size=2),
        ),
        max_size=10,
    )
)
def test_integers_of_any_json(values: list[object]) -> None:
    found = whole(values).tolist()
    assert len(found) == len(values)
    for value, got in zip(values, found, strict=True):
        if type(value) is int:
            assert got == (value if -(2**63) <= value < 2**63 else MISSING)
