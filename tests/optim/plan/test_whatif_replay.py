"""Replay by hand: lanes, waits, transfers that start once all ranks are there, and computing that slows beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.optim.plan.whatif.graph import LINK, RankStep, Step, Task
from trine.optim.plan.whatif.operators import Operator
from trine.optim.plan.whatif.replay import replay
from trine.record.errors import UsageError

WAIT = Operator("wait", None, None, 0, "fp32")
TRANSFER = Operator("transfer", None, None, 0, "fp32")


def step_of(*ranks: list[Task]) -> Step:
    return Step(0, tuple(RankStep(rank, tuple(tasks), 0.0) for rank, tasks in enumerate(ranks)))


def exchanging(before: float, beside: float, transfer: float, after: float = 0.0) -> list[Task]:
    """A rank that issues a transfer, computes beside it, waits, and goes on."""
    first = Task(before, "forward")
    sent = Task(transfer, "backward", LINK, TRANSFER, after=(first.number,), key="gradients")
    second = Task(beside, "backward")
    return [
        first,
        sent,
        second,
        Task(0.0, "backward", operator=WAIT, after=(sent.number,)),
        Task(after, "optimizer"),
    ]


def test_a_host_runs_its_tasks_one_after_another() -> None:
    found = replay(step_of([Task(1.0, "forward"), Task(2.0, "backward"), Task(0.0, "other")]))
    assert found.seconds == pytest.approx(3.0) and found.waited_s == (pytest.approx(0.0),)


@pytest.mark.parametrize(("beside", "whole", "waited"), [(5.0, 6.0, 0.0), (1.0, 4.0, 2.0)])
def test_a_transfer_hides_behind_computing_or_is_waited_for(
    beside: float, whole: float, waited: float
) -> None:
    found = replay(step_of(exchanging(1.0, beside, 3.0), exchanging(1.0, beside, 3.0)))
    assert found.seconds == pytest.approx(whole) and found.waited_s[0] == pytest.approx(waited)


def test_a_transfer_begins_when_the_last_rank_is_there() -> None:
    found = replay(step_of(exchanging(1.0, 0.0, 2.0), exchanging(4.0, 0.0, 2.0)))
    assert found.rank_s == (pytest.approx(6.0), pytest.approx(6.0))
    assert found.waited_s == (pytest.approx(5.0), pytest.approx(2.0))


def test_computing_beside_a_transfer_slows_by_what_was_calibrated() -> None:
    # 2 s of transfer at half speed do 1 s of the 3 s of work; the other 2 s follow.
    found = replay(step_of(exchanging(0.0, 3.0, 2.0)), slowdown=0.5)
    assert found.seconds == pytest.approx(4.0)


def test_streams_run_beside_the_host_after_their_launches() -> None:
    launch = Task(1.0, "forward")
    kernel = Task(5.0, "forward", "stream 7", after=(launch.number,))
    host = Task(2.0, "forward")
    second = Task(1.0, "forward", "stream 7", after=(host.number,))
    assert replay(step_of([launch, kernel, host, second])).seconds == pytest.approx(7.0)


def test_a_circle_is_named() -> None:
    one = Task(1.0, "forward", number=-5, after=(-6,))
    other = Task(1.0, "forward", "stream 7", number=-6, after=(-5,))
    with pytest.raises(UsageError, match="wait for each other, rank 0"):
        replay(step_of([one, other]))


@given(
    st.lists(st.floats(0, 5), min_size=3, max_size=3),
    st.lists(st.floats(0, 5), min_size=3, max_size=3),
    st.floats(0, 0.9),
)
def test_a_step_is_no_shorter_than_any_lane_and_no_longer_than_all(
    one: list[float], other: list[float], slowdown: float
) -> None:
    step = step_of(exchanging(*one), exchanging(one[0], other[1], one[2]))
    found = replay(step, slowdown)
    longest = max(one[0] + max(beside, one[2]) for beside in (one[1], other[1]))
    assert found.seconds >= longest - 1e-6
    assert found.seconds <= one[0] + max(one[1], other[1]) + one[2] + 1e-6


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0.01, 3), st.floats(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_the_longest_path_is_the_fluid_that_nothing_slows(
    ranks: list[tuple[float, float, float, float]],
) -> None:
    step = step_of(*(exchanging(*each) for each in ranks))
    path, fluid = replay(step), replay(step, 1e-12)
    assert path.seconds == pytest.approx(fluid.seconds, abs=1e-6)
    assert path.rank_s == pytest.approx(fluid.rank_s, abs=1e-6)


@given(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3))
def test_shorter_work_never_makes_a_longer_step(before: float, beside: float, transfer: float) -> None:
    whole = replay(step_of(exchanging(before, beside, transfer))).seconds
    assert replay(step_of(exchanging(before, beside / 2, transfer))).seconds <= whole + 1e-9
    assert replay(step_of(exchanging(before, beside, transfer / 2))).seconds <= whole + 1e-9
