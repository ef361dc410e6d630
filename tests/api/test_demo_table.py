"""The demo's table: two speed-ups that disagree are explained, and warm-up that was left out is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from analysis_builders import MS, build

from trine._demo_changes import Candidate
from trine._demo_table import _sides, _two_ratios, _verdict
from trine.analyzers.results import StepStatistics
from trine.demo import Measured, Outcome


def side(median_ms: float, warm_up: int = 2) -> Any:
    around = [round(median_ms * share * MS) for share in (1.0, 0.98, 1.02)]
    steps = StepStatistics(18, around[0], around[1], around[2], around[2], tuple(range(warm_up)))
    return SimpleNamespace(analysis=build(step_statistics=steps), losses={0: 5.0, 19: 4.0})


def result(plain: Any, tuned: Any, alternated: tuple[float, float, float]) -> Any:
    low, middle, high = alternated
    return SimpleNamespace(plain=plain, tuned=tuned, together_ratio=middle, together_range=(low, high))


def test_ratios_that_disagree_are_both_said_with_the_fair_one() -> None:
    lines = _two_ratios(result(side(1230, 1), side(392, 6), (0.54, 0.57, 0.60)))
    said = " ".join(lines)
    assert "3.14 × as fast (3.01 to 3.27)" in said and "alternated 1.75 × (1.67 to 1.85)" in said
    assert (
        "1 of 20 steps and 6 of 20 steps left out" in said and "the alternated figure is the fair one" in said
    )
    assert all(len(line) <= 100 for line in lines)


def test_ratios_that_agree_need_no_line() -> None:
    assert _two_ratios(result(side(1000), side(570), (0.54, 0.57, 0.60))) == []


def test_the_table_says_how_many_steps_were_left_out() -> None:
    (row,) = [
        line for line in _sides(result(side(1230, 1), side(392, 6), (0.5, 0.6, 0.7))) if "warm-up" in line
    ]
    assert "1 of 20 steps" in row and "6 of 20 steps" in row


@pytest.mark.parametrize(
    ("kept", "on_top", "words"),
    [
        (True, (1.0, 0.98, 1.02), "kept: not slower"),
        (False, (1.02, 0.99, 1.05), "left out: no clear gain"),
        (True, (0.9, 0.88, 0.92), "kept: 10 % faster"),
        (False, (1.1, 1.05, 1.2), "left out: 10 % slower"),
    ],
)
def test_a_verdict_says_why(kept: bool, on_top: tuple[float, float, float], words: str) -> None:
    outcome = Outcome(Candidate("a", {}, None, ""), Measured(0.0, -1.0, 1.0, 5), kept, on_top, ())
    assert _verdict(outcome) == words
