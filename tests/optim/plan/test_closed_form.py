"""Bubbles and activations by formula: the papers' own numbers, and the simulator on whatever shapes and times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trine.optim.plan.closed_form import bubble_s, busiest_s, in_flight
from trine.optim.plan.layouts import SCHEDULES
from trine.optim.plan.schedules import Shape, Work, order_of
from trine.optim.plan.simulator import simulate

CHUNKS = {"interleaved": 3, "interleaved-zb": 3, "looped-bfs": 3, "zb-v": 2, "dualpipe-v": 2}
#: How far the formula may be from the simulator's span, with equal ranks and with an embedding and a head.
EVEN = {"zb-h1": 0.005, "zb-h2": 0.005, "1f1b": 0.01, "zb-v": 0.02, "dualpipe-v": 0.02}


def code(name: str) -> int:
    return SCHEDULES.index(name)


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("gpipe", 1, 7 * 8.0),  # (p − 1) t
        ("1f1b", 1, 7 * 8.0),
        ("interleaved", 2, 7 * 8.0 / 2),  # (p − 1) t / v
        ("looped-bfs", 2, 7 * 8.0 / 2),
        ("zb-h1", 1, 7 * (3 + 3 - 2)),  # (p − 1)(F + B − W)
        ("interleaved-zb", 2, 7 * (3 + 3 - 2) / 2),
    ],
)
def test_without_messages_it_is_the_papers_formula(schedule: str, chunks: int, expected: float) -> None:
    assert bubble_s(code(schedule), 8, chunks, 32, 3.0, 3.0, 2.0, 0.0) == pytest.approx([expected])


def test_zb_h2_without_a_common_end_is_the_papers_formula() -> None:
    """(p − 1)(F + B − 2W), nothing where W takes as long; with a common end the last rank's late start is paid."""
    own = bubble_s(code("zb-h2"), 8, 1, 32, 3.0, 3.0, [1.0, 3.0], 0.0, bypassed=True)
    assert own == pytest.approx([7 * (3 + 3 - 2), 0.0])
    assert bubble_s(code("zb-h2"), 8, 1, 32, 3.0, 3.0, 3.0, 0.0) == pytest.approx([7 * 3.0])


#: Qi et al. 2023: profiled times of a stage in µs (F, B, W, message) of the 6.2B model on 8 ranks with 24 micro-batches,
#: and of the 28.3B model on 32 ranks with 96; bubble rates of table 5.
PROFILED = [
    (8, 24, 4, (29718, 29444, 19927, 527), {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698}),
    (32, 96, 2, (10419, 10207, 7715, 408), {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}),
]


@pytest.mark.parametrize(("pipeline", "microbatches", "chunks", "times", "rates"), PROFILED)
def test_with_messages_it_gives_the_published_rates(
    pipeline: int, microbatches: int, chunks: int, times: tuple[int, ...], rates: dict[str, float]
) -> None:
    work = microbatches * sum(times[:3])
    for schedule, expected in rates.items():
        found = bubble_s(code(schedule), pipeline, 1, microbatches, *times, bypassed=True)[0]
        assert found / (found + work) == pytest.approx(expected, abs=1e-4), schedule


def simulated(
    schedule: str, pipeline: int, chunks: int, microbatches: int, times: tuple[float, ...], ends: Any
) -> tuple[float, float]:
    """Seconds of the span, by the formula and by the simulator; ``ends``: what first and last stage take more."""
    columns = []
    for each, more, behind in zip(times[:3], *ends, strict=True):
        column = [each / chunks] * (pipeline * chunks)
        column[0] += more
        column[-1] += behind
        columns.append(tuple(column))
    order = order_of(schedule, Shape(pipeline, chunks, microbatches))
    span = simulate(order, Work(columns[0], columns[1], columns[2], times[3])).span_s()
    first, last = (tuple(np.add(times[:3], end)) for end in ends)
    bubble = bubble_s(code(schedule), pipeline, chunks, microbatches, *times, first=first, last=last)
    longest = busiest_s(code(schedule), pipeline, *times[:3], first=first, last=last)
    return float((bubble + microbatches * longest)[0]), span


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 6])
def test_it_is_near_the_simulator(schedule: str, pipeline: int) -> None:
    random = np.random.default_rng(pipeline)
    for rounds in (2, 3):
        shape = (pipeline, CHUNKS.get(schedule, 1), pipeline * rounds)
        times = tuple(random.uniform((1.0, 1.0, 0.6, 0.0), (1.4, 1.4, 1.1, 0.05)).tolist())
        formula, span = simulated(schedule, *shape, times, ((0.0,) * 3, (0.0,) * 3))
        assert formula == pytest.approx(span, rel=EVEN.get(schedule, 1e-9))
        embedding, head = random.uniform(0, 0.1), random.uniform(0, 0.4)
        formula, span = simulated(schedule, *shape, times, ((embedding, 0.0, embedding), (head,) * 3))
        assert formula == pytest.approx(span, rel=0.05)


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"zb-v", "dualpipe-v"}))
@pytest.mark.parametrize(
    ("pipeline", "microbatches"), [(4, 1), (4, 2), (4, 3), (8, 2), (8, 5), (8, 10), (8, 12)]
)
def test_few_microbatches_fill_no_pipeline(schedule: str, pipeline: int, microbatches: int) -> None:
    """Fewer than ranks, than a warm-up, or not a multiple: further chunks wait until the first has come round."""
    shape = (pipeline, CHUNKS.get(schedule, 1), microbatches)
    formula, span = simulated(schedule, *shape, (1.0, 1.1, 0.9, 0.02), ((0.0,) * 3, (0.0,) * 3))
    assert formula == pytest.approx(span, rel=0.02)
    for rank in range(pipeline):
        held = order_of(schedule, Shape(*shape)).most_held(rank)
        assert in_flight(code(schedule), *shape, rank)[0] == pytest.approx(held)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize(("pipeline", "rounds"), [(2, 2), (3, 2), (4, 4), (8, 2), (8, 3)])
def test_activations_in_flight_are_those_of_the_order(
    schedule: str, share: float, pipeline: int, rounds: int
) -> None:
    chunks, microbatches = CHUNKS.get(schedule, 1), pipeline * rounds
    order = order_of(schedule, Shape(pipeline, chunks, microbatches))
    # Formulas of the folded and interleaved orders hold W's part in full: an upper bound for smaller shares.
    exact = share == 1.0 or chunks == 1
    for rank in range(pipeline):
        found = in_flight(code(schedule), pipeline, chunks, microbatches, rank, share)[0]
        held = order.most_held(rank, share)
        assert found == pytest.approx(held) if exact else found >= held - 1e-9


def test_activations_of_known_schedules() -> None:
    """First rank of 4 with 16 micro-batches: all of GPipe's, p of 1F1B's, p + (p − 1)/v interleaved (Korthikanti 2022)."""
    names = ["gpipe", "1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe-v"]
    codes = [code(name) for name in names]
    found = in_flight(codes, 4, [CHUNKS.get(name, 1) for name in names], 16, 0)
    assert found == pytest.approx([16, 4, 4 + 3 / 3, 7, 4, 4.5])
    assert in_flight(code("1f1b"), 4, 1, 2, 0) == pytest.approx([2])  # no more than there are
    assert in_flight(code("1f1b"), 1, 1, 16, 0) == pytest.approx([1])


def test_columns_are_rows_of_their_own() -> None:
    """A table of all schedules gives what each row alone gives, and one rank has no bubble."""
    codes = np.arange(len(SCHEDULES)).repeat(2)
    pipeline = np.tile([1, 4], len(SCHEDULES))
    chunks = np.array([CHUNKS.get(SCHEDULES[each], 1) for each in codes])
    together = bubble_s(codes, pipeline, chunks, 16, 1.0, 1.1, 0.9, 0.01, last=(1.2, 1.3, 1.1))
    alone = [
        bubble_s(*row, 16, 1.0, 1.1, 0.9, 0.01, last=(1.2, 1.3, 1.1))[0]
        for row in zip(codes, pipeline, chunks, strict=True)
    ]
    assert together == pytest.approx(alone)
    assert (together[pipeline == 1] == 0).all()
    assert (together[pipeline == 4] > 0).all()
    longest = busiest_s(codes, pipeline, 1.0, 1.1, 0.9, last=(1.2, 1.3, 1.1))
    assert longest == pytest.approx([3.6] * len(codes))
