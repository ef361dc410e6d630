"""Where pipelines are cut, by which schedule and in how many micro-batches: arithmetic, and refusals in one line."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from trine.optim.config import Config
from trine.optim.runtime.pipelining.schedules import SHORT, Times, ideal_bubble, orders_of, schedule_of
from trine.optim.runtime.pipelining.split import (
    equal_numbers,
    largest_rank,
    partition,
    rank_of_stage,
    stage_costs,
    stages_of_rank,
)
from trine.record.errors import UsageError

COSTS = st.lists(st.integers(0, 50), min_size=2, max_size=9)


@given(COSTS, st.integers(0, 60), st.integers(0, 60), st.data())
def test_no_cut_has_a_smaller_largest_stage(costs: list[int], before: int, behind: int, data: Any) -> None:
    stages = data.draw(st.integers(2, len(costs)))
    found = partition(costs, stages, before=before, behind=behind)
    ways = [(0, *cut) for cut in combinations(range(1, len(costs)), stages - 1)]
    assert found in ways
    assert max(stage_costs(costs, found, before, behind)) == min(
        max(stage_costs(costs, way, before, behind)) for way in ways
    )


@given(st.lists(st.integers(0, 50), min_size=4, max_size=8), st.booleans())
def test_with_several_stages_a_rank_the_largest_rank_counts(costs: list[int], turned: bool) -> None:
    found = partition(costs, 2, 2, turned=turned, behind=7)
    ways = [(0, *cut) for cut in combinations(range(1, len(costs)), 3)]
    best = min(largest_rank(stage_costs(costs, way, 0, 7), 2, turned) for way in ways)
    assert largest_rank(stage_costs(costs, found, 0, 7), 2, turned) == best


def test_many_blocks_are_cut_by_moving() -> None:
    costs = [1.0] * 60 + [5.0] * 4
    cut = partition(costs, 4, 2, behind=6.0)
    assert largest_rank(stage_costs(costs, cut, 0, 6.0), 4, False) <= 1.1 * (sum(costs) + 6.0) / 4


@given(st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_ranks_and_stages_are_each_others_inverse(ranks: int, chunks: int, turned: bool) -> None:
    held = [stages_of_rank(place, ranks, chunks, turned) for place in range(ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(ranks * chunks))
    assert all(
        rank_of_stage(stage, ranks, turned) == place for place in range(ranks) for stage in held[place]
    )


def test_equal_numbers() -> None:
    assert equal_numbers(7, 3) == (0, 3, 5)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_the_ideal_of_schedules_that_have_a_formula_is_it(ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("looped_bfs", 2)):
        found = ideal_bubble(schedule_of(name, None), p, chunks, m)
        assert found == pytest.approx((p - 1) / (chunks * m + p - 1)), name


def test_schedules_that_split_backward_leave_less() -> None:
    plain = ideal_bubble(schedule_of("interleaved", None), 4, 2, 8)
    for name in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        assert ideal_bubble(schedule_of(name, None), 4, 2, 8) < plain


def test_a_longer_gradient_of_weights_fills_more() -> None:
    schedule = schedule_of("interleaved_zero_bubble", None)
    assert ideal_bubble(schedule, 4, 2, 8, Times(1, 1, 2)) < ideal_bubble(schedule, 4, 2, 8, Times(1, 2, 1))


@pytest.mark.parametrize("name", SHORT)
def test_every_stage_works_on_every_micro_batch_once(name: str) -> None:
    schedule = schedule_of(name, None)
    chunks = schedule.default_chunks()
    orders = orders_of(schedule, 4, chunks, 8)
    for place, order in enumerate(orders):
        stages = stages_of_rank(place, 4, chunks, schedule.turned)
        forwards = sorted((stage, index) for kind, stage, index in order if kind == "F")
        backwards = sorted((stage, index) for kind, stage, index in order if kind in "BI")
        assert forwards == backwards == sorted((stage, index) for stage in stages for index in range(8))


def test_1f1b_holds_as_many_as_stages_follow() -> None:
    for place, order in enumerate(orders_of(schedule_of("1f1b", None), 4, 1, 8)):
        held = most = 0
        for kind, _, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == 4 - place


def test_a_schedule_is_found_by_its_names() -> None:
    assert schedule_of("Interleaved1F1B", None) == schedule_of("interleaved", None)
    assert schedule_of(None, 1).name == "1F1B" and schedule_of(None, 2).name == "Interleaved1F1B"
    with pytest.raises(UsageError, match=r'parallel.schedule = "zbw": it takes "gpipe".*did you mean "zbv"'):
        schedule_of("zbw", None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel.schedule": "zbv"},
            "parallel.schedule says how a pipeline runs, and parallel.pipeline is 1",
        ),
        (
            {"parallel.pipeline": 2, "parallel.split": "evenly"},
            'parallel.split = "evenly": it takes "auto", "layers"',
        ),
        ({"parallel.pipeline": 2, "parallel.split": []}, "parallel.split = [] names no block"),
        ({"parallel.split": []}, "parallel.split = [] names no block"),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    from trine.optim.techniques import refusals

    assert any(said in reason for reason in refusals(Config().with_changes(changes)).values())


def _plan(changes: dict[str, Any], model: Any, ranks: int = 2) -> Any:
    from types import SimpleNamespace

    from trine.optim.runtime.pipelining.plan import plan_of

    config = Config().with_changes({"parallel.pipeline": ranks, **changes})
    return plan_of(config, SimpleNamespace(model=model, example=None))  # type: ignore[arg-type]


def _gpt(layers: int) -> Any:
    from optim_cases import small_gpt

    return small_gpt(layers=layers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel.chunks": 2, "parallel.schedule": "1f1b"},
            "parallel.chunks = 2: the schedule 1F1B runs one stage a rank",
        ),
        (
            {"parallel.chunks": 3, "parallel.schedule": "zbv"},
            "parallel.chunks = 3: ZBVZeroBubble goes along the ranks and back",
        ),
        (
            {"parallel.schedule": "interleaved", "parallel.chunks": 4},
            "makes 8 stages, and blocks has 4 blocks",
        ),
        (
            {"parallel.schedule": "interleaved", "parallel.microbatches": 5},
            "parallel.microbatches = 5: Interleaved1F1B runs them in rounds of the 2 ranks: use 4 or 6",
        ),
        (
            {"parallel.schedule": "dualpipev", "parallel.microbatches": 3},
            "DualPipeV fills both ways at once and needs 4 or more",
        ),
        (
            {"parallel.microbatches": 1},
            "parallel.microbatches = 1: 1F1B needs 2 or more, as many as it has stages",
        ),
        ({"parallel.split": ["blocks.9"]}, "parallel.split: GPT has no module blocks.9"),
        ({"parallel.split": ["blocks.0"]}, "the first stage begins without being named"),
        (
            {"parallel.split": ["blocks.1", "blocks.2"]},
            "names 2 blocks, and 2 stages begin at 1 beside the first",
        ),
        ({"parallel.split": ["norm"]}, "parallel.split: norm stands in a GPT"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        _plan(changes, _gpt(4))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_the_balance_loss_of_transformers_is_refused(nested: bool) -> None:
    from types import SimpleNamespace

    from trine.optim.techniques import pipeline

    def check(weighs: bool) -> None:
        facts: Any = SimpleNamespace(model=_gpt(4), example=None)
        settings = SimpleNamespace(output_router_logits=weighs)
        facts.model.config = SimpleNamespace(text_config=settings) if nested else settings
        pipeline.check(Config().with_changes({"parallel.pipeline": 2}), facts)

    check(False)
    with pytest.raises(
        UsageError, match="output_router_logits=True of the model's configuration cannot be combined"
    ):
        check(True)


def test_models_without_one_list_of_blocks_are_refused() -> None:
    from torch import nn

    with pytest.raises(UsageError, match="has no list of blocks"):
        _plan({}, nn.Linear(2, 2))
    two = nn.Module()
    two.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    two.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    with pytest.raises(UsageError, match=r"two lists of blocks, (encoder and decoder|decoder and encoder)"):
        _plan({}, two)
    assert _plan({"parallel.split": ["decoder.1"]}, two).begins == (0, 1)
    block = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="one block at several places"):
        _plan({}, nn.Sequential(block, block))


def test_the_head_is_a_cost_of_the_last_stage() -> None:
    plan = _plan({}, _gpt(4))
    assert plan.begins == (0, 2)  # 256 tokens by 32: a head of two thirds of a block
    wide = _plan({}, __import__("optim_cases").small_gpt(layers=4, vocab=4096))
    assert wide.begins == (0, 3)
    assert wide.spelled().startswith("blocks.0…2 ")


def test_micro_batches_are_as_few_as_fill_the_pipeline() -> None:
    from trine.optim.runtime.pipelining.plan import LARGEST_BUBBLE, chosen_microbatches

    plan = _plan({}, _gpt(4))
    assert chosen_microbatches(plan, 24) == 4 and plan.ideal(4) <= LARGEST_BUBBLE < plan.ideal(3)
    assert chosen_microbatches(plan, 3) == 3  # the most that three samples can be
    several = _plan({"parallel.schedule": "dualpipev"}, _gpt(4))
    assert chosen_microbatches(several, 8) == 4
    with pytest.raises(UsageError, match="a batch of 2 cannot be cut for its schedule"):
        chosen_microbatches(several, 2)
    with pytest.raises(UsageError, match=r'use larger batches, or parallel\.schedule = "gpipe"'):
        chosen_microbatches(plan, 1)


@pytest.mark.parametrize("changes", [{}, {"parallel.microbatches": 4}, {"parallel.schedule": "dualpipev"}])
def test_a_small_batch_is_evaluated_in_one_piece(changes: dict[str, Any]) -> None:
    import torch

    from trine.optim.runtime.pipelining.plan import Cutter

    cutter, batch = Cutter(_plan(changes, _gpt(4))), torch.zeros(1, 32)
    with torch.no_grad():
        assert [piece.shape for piece in cutter(batch)] == [(1, 32)]
    with pytest.raises(UsageError, match="a batch of 1 cannot be cut"):
        cutter(batch)


@pytest.mark.parametrize(("ignored", "warned"), [((0, 5), 1), ((2, 2), 0)], ids=["uneven", "even"])
def test_targets_that_are_spread_unevenly_without_a_count_are_warned_of_once(
    ignored: tuple[int, int], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from trine.optim.runtime.pipelining.plan import Cutter

    cutter = Cutter(_plan({"parallel.microbatches": 2}, _gpt(4)))
    targets = torch.ones(4, 8, dtype=torch.int64)
    for half, count in enumerate(ignored):
        targets[2 * half, :count] = -100
    for _ in range(2):
        for _ in cutter((torch.zeros(4, 8, dtype=torch.int64), targets)):
            cutter.uncounted()
    assert caplog.text.count("hold different numbers of targets") == warned


def test_a_tensor_that_is_no_samples_is_refused_with_what_a_pipeline_can_do() -> None:
    import torch

    from trine.optim.runtime.pipelining.plan import Cutter

    cutter = Cutter(_plan({"parallel.microbatches": 2}, _gpt(4)))
    with pytest.raises(UsageError, match=r"first dimensions \[4, 7\].*in the model or in loss_fn"):
        cutter((torch.zeros(4, 8), torch.zeros(7)))
