"""Buffers in checkpoints: of what ranks hold with other values, the first rank's, which all take over in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool

pytest.importorskip("torch")


@pytest.mark.parametrize("changes", [{}, {"zero.stage": 2}], ids=str)
def test_running_statistics_are_the_first_ranks(
    two_ranks: RankPool, changes: dict[str, Any], tmp_path: Path
) -> None:
    (first, first_loaded), (second, second_loaded) = two_ranks.run(
        "checkpoint_cases:running_statistics", changes, str(tmp_path / "run")
    )
    assert first != second, "the ranks saw the same batch"
    assert first_loaded == second_loaded == first
