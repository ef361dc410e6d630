"""Layouts: arithmetic of ranks, degrees that fit or are refused, what the engine checks of the batches it is given."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trine
from trine.optim.layout import DATA_DIMENSIONS, DIMENSIONS, Layout, layout_of
from trine.record.errors import UsageError

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in DIMENSIONS})


@given(SIZES)
def test_places_are_mixed_radix_digits_with_tensor_innermost(sizes: dict[str, int]) -> None:
    ranks = Layout(0, **sizes).ranks
    expected = list(product(*(range(sizes[name]) for name in DIMENSIONS)))
    assert [
        tuple(Layout(rank, **sizes).place(name) for name in DIMENSIONS) for rank in range(ranks)
    ] == expected


@given(SIZES)
def test_every_batch_goes_to_as_many_ranks_as_share_it(sizes: dict[str, int]) -> None:
    layouts = [Layout(rank, **sizes) for rank in range(Layout(0, **sizes).ranks)]
    given_to = Counter(layout.data_rank for layout in layouts)
    assert sorted(given_to) == list(range(layouts[0].data_ranks))
    assert set(given_to.values()) == {layouts[0].size("pipeline", "context", "tensor")}
    assert layouts[0].data_ranks == layouts[0].size(*DATA_DIMENSIONS)


def laid_out(changes: dict[str, Any], ranks: int, rank: int = 0) -> Layout:
    return layout_of(trine.Config().with_changes(changes), rank, ranks)


def test_what_is_left_over_is_data_parallel() -> None:
    layout = laid_out({"parallel.tensor": 2, "parallel.pipeline": 2}, 8, rank=6)
    assert (layout.pipeline, layout.replicate, layout.tensor) == (2, 2, 2)
    assert (layout.place("pipeline"), layout.data_rank, layout.place("tensor")) == (1, 1, 0)
    assert str(layout) == "pipeline 2 × replicate 2 × tensor 2"
    assert layout.is_hybrid


def test_zero_shards_over_what_is_left_over() -> None:
    layout = laid_out({"parallel.tensor": 2, "zero.stage": 3}, 8)
    assert (layout.replicate, layout.shard, layout.tensor) == (1, 4, 2)
    layout = laid_out({"parallel.tensor": 2, "zero.stage": 3, "parallel.shard": 2}, 8)
    assert (layout.replicate, layout.shard) == (2, 2)


def test_data_parallelism_alone_is_no_hybrid() -> None:
    for changes in ({}, {"zero.stage": 3}, {"zero.stage": 3, "parallel.shard": 2}):
        assert not laid_out(changes, 4).is_hybrid
        assert laid_out(changes, 4).data_ranks == 4


def test_the_launcher_says_rank_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    layout = trine.layout_of({"parallel.tensor": 2})
    assert (layout.data_rank, layout.data_ranks, layout.place("tensor")) == (1, 2, 1)


@pytest.mark.parametrize(("rank", "ranks"), [(4, 4), (-1, 4), (0, 0)])
def test_a_rank_that_there_is_not_samples_nothing(rank: int, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"there is no rank {rank} of {ranks}"):
        laid_out({}, ranks, rank)


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"parallel.tensor": 2}, 1, "parallel.tensor = 2 must divide the 1 rank: start 2 ranks"),
        ({"parallel.tensor": 4}, 6, "parallel.tensor = 4 must divide the 6 ranks: start 4 or 8 ranks"),
        (
            {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.data": 4},
            8,
            'write parallel.data = 2 or "auto"',
        ),
        (
            {"parallel.tensor": 2, "zero.stage": 3, "parallel.data": 3},
            8,
            "parallel.data = 3 does not divide the 4 ranks that parallel.tensor = 2 leave",
        ),
        (
            {"parallel.tensor": 2, "zero.stage": 3, "parallel.shard": 3},
            8,
            "must make the 4 ranks that parallel.tensor = 2 leave: use one of 2 × 2, 1 × 4",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused(changes: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        laid_out(changes, ranks)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
