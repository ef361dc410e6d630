"""Phases: an exact partition, by the rules of the module's docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.profiler.phases import (
    BACKWARD,
    COPY,
    DATA,
    EVALUATION,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    Spans,
    classify,
    partition,
)
from trine.record.model import PHASES

CODES = st.sampled_from([DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION])
SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=12)


@given(SPANS, st.integers(0, 250), st.integers(0, 60))
def test_covered_counts_every_nanosecond_once(spans: list[tuple[int, int]], start: int, length: int) -> None:
    union = Spans([s for s, _ in spans], [s + n for s, n in spans])
    inside = {t for s, n in spans for t in range(s, s + n)}
    assert union.covered(start, start + length) == len(inside & set(range(start, start + length)))


@given(
    st.lists(st.tuples(CODES, st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=12),
    SPANS,
    st.booleans(),
)
def test_phases_sum_to_the_step_and_none_is_negative(
    rows: list[tuple[int, int, int]], spans: list[tuple[int, int]], has_backward: bool
) -> None:
    times = [7]
    for _, wall, _ in rows:
        times.append(times[-1] + wall)
    codes = classify([code for code, _, _ in rows], has_backward=has_backward, host_batch=True)
    union = Spans([s for s, _ in spans], [s + n for s, n in spans])
    phases = partition(codes, times, [busy for _, _, busy in rows], union)
    assert len(phases) == len(PHASES)
    assert sum(phases) == times[-1] - times[0]
    assert min(phases) >= 0
    assert partition(codes, times, None, union)[EXPOSED] == 0


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        # The loss, between the model's forward and backward, is forward.
        ([OTHER, DATA, OTHER, FORWARD, OTHER, BACKWARD], [OTHER, DATA, OTHER, FORWARD, FORWARD, BACKWARD]),
        # Without a forward that was seen, all between the batch and backward is.
        ([DATA, OTHER, BACKWARD, OTHER, OPTIMIZER], [DATA, FORWARD, BACKWARD, OTHER, OPTIMIZER]),
        # Evaluation is none of it.
        (
            [FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, OTHER],
            [FORWARD, BACKWARD, OPTIMIZER, OTHER, OTHER, OTHER],
        ),
        # What follows an evaluation is not its loss.
        ([FORWARD, EVALUATION, OTHER, BACKWARD], [FORWARD, OTHER, OTHER, BACKWARD]),
    ],
)
def test_what_lies_between_is_given_by_its_neighbours(codes: list[int], expected: list[int]) -> None:
    assert classify(codes, has_backward=True, host_batch=False) == expected


def test_inference_is_forward() -> None:
    assert classify([DATA, OTHER, EVALUATION], has_backward=False, host_batch=False) == [DATA, OTHER, FORWARD]


def test_a_batch_in_host_memory_is_copied_before_forward() -> None:
    codes = [OTHER, DATA, OTHER, FORWARD, OTHER, BACKWARD]
    assert classify(codes, has_backward=True, host_batch=True)[2] == COPY
    assert classify(codes, has_backward=True, host_batch=False)[2] == OTHER


def test_exposure_needs_both_a_collective_and_a_thread_that_does_not_run() -> None:
    spans = Spans([0], [60])
    waiting = partition([BACKWARD], [0, 100], [30], spans)  # 70 not running, 60 of collectives
    assert (waiting[EXPOSED], waiting[BACKWARD]) == (60, 40)
    overlapped = partition([BACKWARD], [0, 100], [100], spans)  # it computed all the while
    assert overlapped[EXPOSED] == 0
    asleep = partition([BACKWARD], [0, 100], [30], Spans())  # it slept, and no collective ran
    assert asleep[EXPOSED] == 0
    loading = partition(
        [DATA], [0, 100], [0], spans
    )  # waiting for the loader is not waiting for a collective
    assert loading[EXPOSED] == 0
