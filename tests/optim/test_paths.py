"""Ranks that run different modules: every rank raises with the module's name, and those that agree train on."""

from __future__ import annotations

from typing import Any

import path_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.optim.runtime.path_store import END, Place, _compare

Z2, Z3 = {"zero.stage": 2}, {"zero.stage": 3}
PLAIN: dict[str, Any] = {}

HEALTHY = (Z3, {}, {})
ALL_SKIP = (Z3, {2: {0: [0, 1, 3], 1: [0, 1, 3]}, 4: {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}}, {})
ONE_SKIPS = (Z3, {3: {1: [0, 1, 2]}}, {})


def assert_named(by_rank: list[dict[str, Any]], step: int, *words: str) -> None:
    for said in (each["said"] for each in by_rank):
        assert said.startswith(f"TrainingError: optimizer step {step}: ")
        assert all(word in said for word in words)
        assert "\n" not in said


def test_a_skipped_block_is_named_on_all_ranks_and_agreed_ones_are_not() -> None:
    runs = [HEALTHY, ALL_SKIP, ONE_SKIPS]
    by_rank = path_cases.on_ranks(2, "case", runs)
    for each in by_rank:
        assert [len(each[0]["losses"]), len(each[1]["losses"]), len(each[2]["losses"])] == [5, 5, 3]
        assert not each[0]["said"]
        assert not each[1]["said"]
    last = [each[2] for each in by_rank]
    assert_named(last, 3, "after blocks.2 rank 1 ended its forward and rank 0 entered blocks.3")
    assert all(each["seconds"] < 30 for each in last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "step", "words"),
    [
        ((Z3, {3: {0: [0, 1, 3], 1: [0, 1, 2]}}, {}), 3, "after blocks.1 rank 0 entered blocks.3 and rank 1"),
        (
            (Z3, {0: {0: [0, 1, 3]}}, {}),
            0,
            "after blocks.1 rank 0 entered blocks.3 and rank 1 entered blocks.2",
        ),
        ((Z2, {2: {0: [0, 2, 1, 3]}}, {}), 2, "after blocks.0 rank 0 entered blocks.2 and rank 1 entered"),
        ((PLAIN, {3: {1: [0, 1, 2]}}, {}), 3, "rank 0 ran blocks.3 and rank 1 did not"),
        ((Z3, {}, {"evaluates": 2}), 3, "rank 0 runs a forward for evaluation and rank 1 one for training"),
    ],
    ids=["each another", "first step", "another order", "replicas", "evaluation alone"],
)
def test_other_ways_apart(run: Any, step: int, words: str) -> None:
    by_rank = path_cases.on_ranks(2, "case", [run])
    assert_named([each[0] for each in by_rank], step, words)


@pytest.mark.slow
def test_what_is_no_harm_trains_on() -> None:
    """Replicas may run blocks in another order, leave out what they look for themselves, and evaluate alone."""
    runs = [
        (PLAIN, {3: {1: [3, 1, 2, 0]}}, {}),
        (PLAIN, {3: {1: [0, 1, 2]}}, {"finds_unused": True}),
        (PLAIN, {}, {"evaluates": 2}),
    ]
    for each in path_cases.on_ranks(2, "case", runs):
        assert [(run["said"], len(run["losses"])) for run in each] == [("", 5)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "failure"),
    [(Z3, ValueError), (PLAIN, ValueError), (PLAIN, SystemExit)],
    ids=["zero 3", "replicas", "it ends itself"],
)
def test_the_others_learn_of_an_exception_on_one_rank(
    changes: dict[str, Any], failure: type[BaseException]
) -> None:
    options = {"fails_at": (3, 1), "fails_in": 1, "fails_with": failure, "lingers_s": 6.0}
    first, second = (each[0] for each in path_cases.on_ranks(2, "case", [(changes, {}, options)]))
    assert second["said"] == f"{failure.__name__}: a block that fails"
    assert first["said"].startswith(
        "TrainingError: optimizer step 3: rank 1 failed, after it entered blocks.0"
    )
    assert "a block that fails" in first["said"]


@pytest.mark.slow
def test_the_guard_costs_less_than_a_hundredth_of_a_step() -> None:
    guard, step = path_cases.on_ranks(2, "cost", Z3, 10)[0]
    assert guard < 0.01 * step


# --- what is compared --------------------------------------------------------------------------

PATHS = st.lists(st.integers(0, 5), max_size=6)


@given(PATHS, PATHS, st.booleans())
def test_paths_are_apart_where_they_differ_and_open_where_one_is_behind(
    ours: list[int], theirs: list[int], ended: bool
) -> None:
    mine = Place(4, "training", [*ours, END], {})
    other = Place(4, "training", [*theirs, END] if ended else theirs, {})
    state = _compare(mine, Place.from_json(other.to_json()).at(4), 4, ordered=True)
    if ended:
        assert state == ("alike" if ours == theirs else "apart")
    elif ours[: len(theirs)] == theirs:
        assert state == "open"
    else:
        assert state == "apart"


@given(PATHS, PATHS)
def test_replicas_compare_what_they_ran_and_not_its_order(ours: list[int], theirs: list[int]) -> None:
    def place(path: list[int], ended: bool) -> Place:
        return Place(1, "training", [*sorted(set(path)), END] if ended else path, {})

    mine = place(ours, True)
    assert _compare(mine, place(theirs, False), 1, ordered=False) == "open"
    alike = set(ours) == set(theirs)
    assert _compare(mine, place(theirs, True), 1, ordered=False) == ("alike" if alike else "apart")


@given(
    st.dictionaries(st.integers(1, 9), st.tuples(st.sampled_from(["training", "evaluation"]), PATHS)), PATHS
)
def test_places_are_read_as_they_were_written(
    before: dict[int, tuple[str, list[int]]], path: list[int]
) -> None:
    written = Place(10, "training", path, before)
    read = Place.from_json(written.to_json())
    assert (read.forward, read.kind, read.path) == (10, "training", path)
    for forward, (kind, known) in before.items():
        at = read.at(forward)
        assert at is not None
        assert (at.kind, at.path) == (kind, known)
    assert read.at(11) is None
