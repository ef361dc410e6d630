"""Layouts and offloading drawn at random beside other keys: refused in one line, or trained as one process does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import layout_combinations
import pytest
import random_combinations
from layout_combinations import draw_layout, faults_of_layout
from random_combinations import Drawn
from rank_pool import RankPool

from trine.optim.config import APPLIED

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_key_can_be_drawn() -> None:
    # Compiling takes too long; a path comes with its disk; the other engine is drawn in tests of its own, too.
    elsewhere = {"compute.compile", "offload.path", "engine"}
    assert {*random_combinations.VALUES, *layout_combinations.VALUES} | elsewhere == APPLIED


def _try(seed: int, pool: RankPool, ranks: int, folder: Path) -> None:
    drawn = draw_layout(random.Random(seed), ranks)
    answers = pool.run("random_combinations:attempt", dict(drawn), ranks, str(folder))
    fault = faults_of_layout(drawn, answers)
    assert not fault, f"{dict(drawn)}: {fault}"
    assert not list(folder.iterdir()), "files were left"


@pytest.mark.parametrize("seed", range(4))
def test_a_few_on_two_ranks(seed: int, two_ranks: RankPool, tmp_path: Path) -> None:
    _try(seed, two_ranks, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 30))
def test_two_ranks(seed: int, two_ranks: RankPool, tmp_path: Path) -> None:
    _try(seed, two_ranks, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5000, 5025))
def test_four_ranks(seed: int, four_ranks: RankPool, tmp_path: Path) -> None:
    _try(seed, four_ranks, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"parallel.expert": 2, "parallel.tensor": 2}, {"parallel.tensor": 2}])
def test_clipped_replicas_keep_the_same_bits(changes: dict[str, Any], four_ranks: RankPool) -> None:
    """The norm's parts are added in one order on all replicas, whatever the groups are called that summed them."""
    drawn = Drawn(
        changes=changes,
        data="windows",
        optimizer="sgd",
        clip_norm=0.5,
        dropout=0.0,
        dtype="float32",
        model={"heads": 4, "experts": 4},
    )
    answers = four_ranks.run("random_combinations:attempt", dict(drawn), 4, "")
    assert not faults_of_layout(drawn, answers)
