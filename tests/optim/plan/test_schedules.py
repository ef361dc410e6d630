"""Orders of a pipeline's work: by hand, beside PyTorch's own, and for times and memory that are given."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trine.optim.plan.layouts import SCHEDULES
from trine.optim.plan.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Shape, Work, order_of, schedules
from trine.optim.plan.schedules.automatic import automatic
from trine.optim.plan.simulator import simulate
from trine.record.errors import UsageError

CHUNKS = {"interleaved": 2, "interleaved-zb": 2, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2}


def letters(name: str, shape: Shape, rank: int) -> str:
    """A rank's order: a letter an action, small for the second chunk."""
    actions = order_of(name, shape).actions[rank]
    found = ["FBIW"[kind] for kind, _, _ in actions]
    return "".join(
        letter.lower() if chunk else letter for letter, (_, chunk, _) in zip(found, actions, strict=True)
    )


def test_every_schedule_that_a_layout_can_name_has_an_order() -> None:
    assert set(SCHEDULES) <= set(schedules())
    assert set(schedules()) - set(SCHEDULES) == {"zb-1p", "zb-2p"}


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("gpipe", 0, "FFFFFFBBBBBB"),
        ("1f1b", 0, "FFFBFBFBFBBB"),
        ("1f1b", 2, "FBFBFBFBFBFB"),
        ("zb-h1", 0, "FFFIWFIWFIWFIWIWIW"),  # as 1F1B; W at once
        ("zb-h1", 2, "FIFIFIWFIWFIWFIWWW"),  # two gradients of the input before the first W
        ("zb-h2", 0, "FFFFFIWFIWIWIWIWIW"),  # twice the forwards of 1F1B, less one
        ("zb-h2", 2, "FIFIFIFIFIWFIWWWWW"),
        ("looped-bfs", 1, "FFFFFFffffffbbbbbbBBBBBB"),
        (
            "interleaved",
            2,
            "FFFfbfbfbFBFBFBfbfbfbBBB",
        ),  # Narayanan 2021, figure 4: v - 1 rounds ahead on the last rank
    ],
)
def test_orders_by_hand(name: str, rank: int, expected: str) -> None:
    assert letters(name, Shape(3, CHUNKS.get(name, 1), 6), rank) == expected


@pytest.mark.parametrize("name", sorted(schedules()))
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (2, 6), (3, 9), (4, 8), (4, 16)])
def test_every_piece_of_work_is_done_once_and_no_rank_waits_for_ever(
    name: str, ranks: int, microbatches: int
) -> None:
    shape = Shape(ranks, CHUNKS.get(name, 1), microbatches)
    order = order_of(name, shape)
    order.check()
    result = simulate(order, Work.even(shape.stages, 1.0, 1.1, 0.9, 0.05))  # raises on a deadlock
    assert len(result.work["rank"]) >= shape.stages * microbatches * 2


#: Ours, and what ``torch.distributed.pipelining`` calls the same.
THEIRS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "looped-bfs": "looped_bfs",
    "interleaved-zb": "interleaved_zero_bubble",
    "zb-v": "zbv",
    "dualpipe-v": "dualpipev",
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_orders_are_those_that_pytorch_runs(name: str, ranks: int, microbatches: int) -> None:
    pytest.importorskip("torch")
    from trine.optim.runtime.pipelining.schedules import Times, ideal_bubble, orders_of, schedule_of

    chunks = CHUNKS.get(name, 1)
    order = order_of(name, Shape(ranks, chunks, microbatches))
    theirs = schedule_of(THEIRS[name], None)
    kinds = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}
    for rank, expected in enumerate(orders_of(theirs, ranks, chunks, microbatches)):
        found = [(kind, order.stage_of(rank, chunk), index) for kind, chunk, index in order.actions[rank]]
        assert found == [(kinds[str(kind)], stage, index) for kind, stage, index in expected]
    if name != "dualpipe-v":  # whose pairs hand on what they made together, as PyTorch runs them
        result = simulate(order, Work.even(ranks * chunks, 1.0, 1.2, 0.7))
        times = Times(1.0, 1.2, 0.7)
        assert result.bubble_ratio == pytest.approx(ideal_bubble(theirs, ranks, chunks, microbatches, times))


def test_stages_of_a_v_come_back_along_the_ranks() -> None:
    order = order_of("zb-v", Shape(4, 2, 8))
    assert [order.stage_of(rank, 1) for rank in range(4)] == [7, 6, 5, 4]
    assert [order.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_v_holds_no_more_than_1f1b_and_leaves_nothing_idle_where_all_take_alike() -> None:
    order = order_of("zb-v", Shape(4, 2, 16))
    assert [order.most_held(rank) for rank in range(4)] == [4.0] * 4
    assert simulate(order, Work.even(8, 1.0, 1.0, 1.0)).bubble_rate() == pytest.approx(0.0)


class TestAutomatic:
    """Made for times and a limit of memory (Qi et al. 2023, section 3)."""

    SHAPE = Shape(4, 1, 12)
    WORK = Work.even(4, 1.0, 1.0, 0.7, 0.02)

    @pytest.mark.parametrize("limit", [2.0, 4.0, 5.5, 8.0])
    def test_memory_is_never_above_the_limit(self, limit: float) -> None:
        order = automatic(self.SHAPE, self.WORK, limit, weight_share=0.6)
        order.check()
        assert max(order.most_held(rank, 0.6) for rank in range(4)) <= limit + 1e-9

    def test_more_memory_never_costs_time(self) -> None:
        costs = [
            simulate(automatic(self.SHAPE, self.WORK, limit, 0.6), self.WORK).longest_rank_s()
            for limit in (2.0, 3.0, 4.0, 6.0, 8.0)
        ]
        assert all(more <= less + 1e-9 for less, more in pairwise(costs))

    def test_with_1f1bs_memory_it_is_as_good_as_h1_and_with_twice_nothing_is_idle(self) -> None:
        """The 6.2B model of table 5: 13.23 % with p, 0.29 % with 2p micro-batches' activations."""
        shape, work = Shape(8, 1, 24), Work.even(8, 29718e-6, 29444e-6, 19927e-6, 527e-6)
        share = 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)
        one, two = (
            simulate(automatic(shape, work, times * 8, share), work).bubble_rate() for times in (1, 2)
        )
        assert one == pytest.approx(0.1323, abs=1e-4)
        assert two <= 0.0030

    def test_unequal_stages_are_scheduled_for(self) -> None:
        """A head on the last rank: the order made for it is no worse than those made without looking."""
        work = Work((1.0, 1.0, 1.0, 1.4), (1.0, 1.0, 1.0, 1.4), (0.7, 0.7, 0.7, 1.0), 0.02)
        made = simulate(automatic(self.SHAPE, work, 8.0), work).longest_rank_s()
        for name in ("zb-h1", "zb-h2"):
            assert made <= simulate(order_of(name, self.SHAPE), work).longest_rank_s() + 1e-9


class TestRefusals:
    """Bad input ends in one line that says what would do."""

    @pytest.mark.parametrize(
        ("name", "shape", "said"),
        [
            ("1f1bb", Shape(2, 1, 4), 'did you mean "1f1b"'),
            ("1f1b", Shape(2, 2, 4), "1f1b runs 1 chunks a rank, not 2"),
            ("zb-v", Shape(4, 2, 4), "use 7 or more"),
            ("dualpipe-v", Shape(4, 2, 7), "use 8 or more"),
            ("interleaved", Shape(4, 2, 9), "use 8 or 10"),
            ("gpipe", Shape(0, 1, 4), "at least one rank"),
        ],
    )
    def test_shapes_that_cannot_run(self, name: str, shape: Shape, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            order_of(name, shape)
        assert "\n" not in str(caught.value)

    def test_times_that_do_not_fit(self) -> None:
        with pytest.raises(UsageError, match="8 stages, and times are given for 4"):
            order_of("interleaved", Shape(4, 2, 8), Work.even(4, 1, 1, 1))
        with pytest.raises(UsageError, match="for each stage, alike"):
            Work((1.0,), (1.0, 1.0), (1.0,))
        with pytest.raises(UsageError, match="negative"):
            Work.even(2, 1.0, -1.0, 1.0)
