"""Which span encloses which, against a slow reference."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.record.readers._kineto_tables import parents

ROUNDING_NS = 1_000


def reference(thread: list[int], start: list[int], end: list[int]) -> list[int]:
    """A stack a thread: what has ended is taken off when the next span begins."""
    found = [-1] * len(start)
    stacks: dict[int, list[int]] = {}
    for row in sorted(range(len(start)), key=lambda row: (start[row], -end[row], row)):
        stack = stacks.setdefault(thread[row], [])
        while stack and end[stack[-1]] <= start[row]:
            stack.pop()
        if stack and end[stack[-1]] + ROUNDING_NS >= end[row]:
            found[row] = stack[-1]
        else:
            found[row] = next((other for other in reversed(stack) if end[other] >= end[row]), -1)
        stack.append(row)
    return found


SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 30)), max_size=60)


@given(spans=SPANS, unit=st.sampled_from((1, 500, 1000, 5000)))
@settings(deadline=None, max_examples=300)
def test_parents_are_those_of_a_stack(spans: list[tuple[int, int, int]], unit: int) -> None:
    thread = [span[0] for span in spans]
    start = [span[1] * unit for span in spans]
    end = [(span[1] + span[2]) * unit for span in spans]
    found = parents(np.array(thread, np.int64), np.array(start, np.int64), np.array(end, np.int64))
    assert found.tolist() == reference(thread, start, end)


def test_no_depth_of_nesting_is_slow() -> None:
    """Fifty thousand levels that close at once, and as many siblings after them."""
    count = 50_000
    start = np.r_[np.arange(count), np.arange(count) + 10**6]
    end = np.r_[np.arange(3 * count, 2 * count, -1), np.arange(count) + 10**6 + 1]
    begin = time.process_time()
    found = parents(np.zeros(2 * count, np.int64), start, end)
    assert time.process_time() - begin < 5
    assert found[:count].tolist() == [-1, *range(count - 1)] and (found[count:] == -1).all()
