from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.intervals import (
    EMPTY,
    Spans,
    clip,
    complement,
    covered,
    difference,
    intersection,
    measure,
    union,
)

#: Short lines collide often; the offset puts them where a double would lose the nanosecond.
OFFSET = 1_706_850_122_846_038_001
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 12)), max_size=25)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([OFFSET + start for start, _ in pairs], dtype=np.int64)
    return start, start + np.array([length for _, length in pairs], dtype=np.int64)


def times(pairs: list[tuple[int, int]]) -> set[int]:
    """The slow, exact way: every nanosecond by itself."""
    return {time for start, length in pairs for time in range(OFFSET + start, OFFSET + start + length)}


def held(spans: Spans) -> set[int]:
    return {t for a, b in zip(spans.start.tolist(), spans.end.tolist(), strict=True) for t in range(a, b)}


def check(spans: Spans, expected: set[int]) -> None:
    assert held(spans) == expected
    assert measure(spans) == len(expected)
    assert (spans.end > spans.start).all()
    assert (spans.start[1:] > spans.end[:-1]).all(), "spans must be sorted, disjoint and not touching"
    assert spans.start.dtype == spans.end.dtype == np.int64


@given(intervals)
def test_union_holds_every_nanosecond_once(pairs: list[tuple[int, int]]) -> None:
    check(union(*columns(pairs)), times(pairs))


@given(intervals, st.randoms(use_true_random=False))
def test_the_order_of_intervals_changes_nothing(pairs: list[tuple[int, int]], random) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)
    one, other = union(*columns(pairs)), union(*columns(shuffled))
    assert one.start.tolist() == other.start.tolist() and one.end.tolist() == other.end.tolist()


@given(intervals, intervals)
def test_intersection_difference_and_union_of_two(first, second) -> None:
    one, other = union(*columns(first)), union(*columns(second))
    check(intersection(one, other), times(first) & times(second))
    check(difference(one, other), times(first) - times(second))
    check(one | other, times(first) | times(second))
    assert measure(one) == measure(one & other) + measure(one - other)


@given(intervals, st.integers(-5, 60), st.integers(-5, 60))
def test_complement_and_clip_partition_a_window(pairs, low, high) -> None:
    spans = union(*columns(pairs))
    low, high = OFFSET + low, OFFSET + high
    inside = set(range(low, high))
    check(complement(spans, low, high), inside - times(pairs))
    assert held(clip(spans, low, high)) == inside & times(pairs)


@given(intervals, intervals)
def test_covered_measures_each_query_by_itself(pairs, queries) -> None:
    start, end = columns(queries)
    found = covered(union(*columns(pairs)), start, end).tolist()
    assert found == [len(times([query]) & times(pairs)) for query in queries]


def test_touching_spans_are_one_and_do_not_overlap() -> None:
    one = union(np.array([0, 10]), np.array([10, 20]))
    assert one.start.tolist() == [0] and one.end.tolist() == [20]
    other = union(np.array([20]), np.array([30]))
    assert measure(one & other) == 0


def test_nothing_stays_nothing() -> None:
    some = union(np.array([5]), np.array([9]))
    for empty in (EMPTY & some, some & EMPTY, EMPTY - some, clip(some, 9, 5), complement(some, 9, 9)):
        assert measure(empty) == 0 and len(empty.start) == 0
    assert measure(some - EMPTY) == 4
    assert covered(EMPTY, np.array([1]), np.array([4])).tolist() == [0]


@pytest.mark.parametrize("count", [1_000_000])
def test_a_million_intervals_take_a_fraction_of_a_second(count: int) -> None:
    from time import process_time

    generator = np.random.default_rng(0)
    start = generator.integers(0, 10**12, count)
    end = start + generator.integers(1, 10**6, count)
    before = process_time()
    spans = union(start, end)
    first = process_time() - before
    before = process_time()
    np.sort(start)
    assert measure(spans) > 0
    # A ratio, since the machine's speed is not ours to test: a union is a sort and a little more.
    assert first < 20 * (process_time() - before) + 0.1
