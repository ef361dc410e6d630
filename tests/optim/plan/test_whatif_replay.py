"""Replay by hand: lanes, waits, transfers that start once all ranks are there, and computing that slows beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whatif_steps import calibration

from trine.optim.plan.whatif._names import Name, Names
from trine.optim.plan.whatif.build import Steady, _matched
from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Step, Task
from trine.optim.plan.whatif.operators import Operator
from trine.optim.plan.whatif.predict import replayed
from trine.optim.plan.whatif.replay import replay
from trine.record.errors import UsageError
from trine.record.model import MISSING, Group, Rank, Strings

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


# --- messages -----------------------------------------------------------------------------------


def message(seconds: float, channel: str, number: int, after: Task) -> Task:
    return Task(
        seconds, "forward", LINK, TRANSFER, after=(after.number,), key=f"{channel} {number}", channel=channel
    )


def until(*transfers: Task) -> Task:
    return Task(0.0, "forward", operator=WAIT, after=tuple(task.number for task in transfers))


def two_stages(work: float, transfer: float) -> Step:
    """1F1B of two micro-batches: the second goes out before the first's gradient comes back, and neither holds the other."""
    first, second, last = (Task(work, "forward") for _ in range(3))
    out = [message(transfer, "0>1", number, after) for number, after in ((1, first), (2, second))]
    back = [message(transfer, "1>0", number, second) for number in (1, 2)]
    ahead = [first, out[0], second, out[1], *back, until(back[0]), last, until(back[1])]
    begin = Task(0.0, "forward")
    forward = [message(transfer, "0>1", number, begin) for number in (1, 2)]
    works = [Task(2 * work, "forward") for _ in range(2)]
    gradients = [message(transfer, "1>0", number, works[number - 1]) for number in (1, 2)]
    behind = [begin, *forward, until(forward[0]), works[0], gradients[0], until(forward[1]), works[1], gradients[1],
              until(*gradients)]  # fmt: skip
    return step_of(ahead, behind)


@pytest.mark.parametrize("slowdown", [0.0, 1e-9])
def test_messages_pass_by_sender_and_receiver_and_hold_no_others(slowdown: float) -> None:
    # The second stage: a micro-batch's work, its message, two works, and the last gradient's message.
    found = replay(two_stages(1.0, 0.25), slowdown)
    assert found.seconds == pytest.approx(1.0 + 0.25 + 2 * 2.0 + 0.25, rel=1e-6)


def names_of(rank: int, *groups: Group) -> Names:
    return Names(Rank(rank, "", "kineto", Strings(), groups=groups))


def test_messages_are_named_alike_by_both_ranks() -> None:
    first, second = names_of(0), names_of(1)
    sent = [first.next("send", None, 1, 0) for _ in range(2)]
    assert sent == [second.next("recv", None, 0, 0) for _ in range(2)]
    assert sent == [Name("0>1 1", channel="0>1"), Name("0>1 2", channel="0>1")]
    assert first.next("recv", None, 1, 0) == second.next("send", None, 0, 0) == Name("1>0 1", channel="1>0")
    assert first.next("send", None, MISSING, 0).channel == ""  # to whom is not on record


def test_collectives_are_counted_by_group_and_by_size_where_none_is_named() -> None:
    pair, other, world = (
        Group("tp", None, None, (0, 1)),
        Group("tp", None, None, (2, 3)),
        Group("0", None, None, (0, 1, 2, 3)),
    )
    first, third = names_of(0, world, pair), names_of(2, world, other)
    assert first.next("all_reduce", "tp", MISSING, 8).key != third.next("all_reduce", "tp", MISSING, 8).key
    assert first.next("all_reduce", "0", MISSING, 8) == third.next("all_reduce", "0", MISSING, 8)
    assert first.next("all_reduce", "0", MISSING, 8).group == (0, 1, 2, 3)
    assert first.next("all_reduce", None, MISSING, 8) != third.next("all_reduce", None, MISSING, 4)
    assert first.next("all_gather", None, MISSING, 8) == third.next("all_gather", None, MISSING, 4)


def test_a_message_takes_two_ranks_and_lasts_as_long_as_on_the_later() -> None:
    begin = [Task(0.0, "forward") for _ in range(3)]
    sent, received = message(0.1, "0>1", 1, begin[0]), message(0.7, "0>1", 1, begin[1])
    alone = message(0.2, "2>3", 1, begin[2])  # rank 3 was not recorded
    step = _matched(0, [RankStep(rank, tasks, 1.0) for rank, tasks in enumerate(
        ((begin[0], sent), (begin[1], received, until(received)), (begin[2], alone, until(alone)))
    )])  # fmt: skip
    assert [[task.seconds for task in each.tasks if task.lane == LINK] for each in step.ranks] == [
        [0.1],
        [0.1],
        [],
    ]
    assert replay(step).seconds == pytest.approx(0.1)


def test_a_pipeline_refuses_what_takes_ranks_to_be_alike() -> None:
    step = two_stages(1.0, 0.25)
    steps = (replace(step, ranks=tuple(replace(each, measured_s=5.5) for each in step.ranks)),)
    run = replayed(Graph(steps, "operators", 2, {}, recorded=steps), Steady(np.empty(0), {}), calibration())
    assert run.what_if({"link_speed": 2}).gain.mid == pytest.approx(0.25, rel=1e-6)
    for change in ({"straggler": False}, {"ranks": 4}, {"accumulation.steps": 2}):
        with pytest.raises(UsageError, match=r"this record is a pipeline's"):
            run.what_if(change)
