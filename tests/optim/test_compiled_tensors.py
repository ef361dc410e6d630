"""Compiled blocks that lie on a tensor group train as the same blocks uncompiled."""

from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.mark.slow
def test_rows_of_several_lengths(two_ranks: RankPool) -> None:
    """PyTorch would make lengths dynamic from the second on, and fail on DTensors of unknown sizes."""
    for differences in two_ranks.run("compiled_tensor_cases:differences"):
        assert max(map(abs, differences)) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch says that it gives up
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_compiled_the_same_blocks_before(two_ranks: RankPool, rank: int) -> None:
    """PyTorch would run them uncompiled on that rank alone, whose collectives would pair with others there."""
    for differences in two_ranks.run("compiled_tensor_cases:differences", rank):
        assert max(map(abs, differences)) < 1e-5
