"""Stages of a pipeline whose gradients are unlike: one overflows alone, one has none, one counts no token."""

from __future__ import annotations

from typing import Any

import pytest
import stage_agreement_cases
from rank_pool import RankPool

pytest.importorskip("torch")


def test_an_overflow_on_one_stage_is_left_out_on_all(two_ranks: RankPool) -> None:
    assert two_ranks.run("stage_agreement_cases:overflowed") == [[False, True], [False, True]]


@pytest.mark.parametrize("changes", [{}, {"precision.dtype": "fp16"}])
def test_a_stage_that_is_frozen_takes_part_in_clipping_and_scaling(
    changes: dict[str, Any], two_ranks: RankPool
) -> None:
    first, last = two_ranks.run("stage_agreement_cases:with_a_frozen_stage", changes)
    assert first == last
    assert last[-1] == last[-1]  # a number


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
def test_a_microbatch_that_counts_nothing_adds_nothing(schedule: str, two_ranks: RankPool) -> None:
    plain = stage_agreement_cases.empty_microbatch_plain()
    for losses in two_ranks.run("stage_agreement_cases:empty_microbatch", {"parallel.schedule": schedule}):
        assert losses == pytest.approx(plain, rel=1e-10)
