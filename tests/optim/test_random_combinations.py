"""Configurations drawn at random are refused in one line, with nothing touched, or train as the plain run does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from random_combinations import Drawn, draw, faults_of
from rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DRAWN = 25


@pytest.mark.parametrize("seed", range(DRAWN))
def test_two_ranks(seed: int, two_ranks: RankPool, tmp_path: Path) -> None:
    drawn = draw(random.Random(seed))
    answers = two_ranks.run("random_combinations:attempt", dict(drawn), 2, str(tmp_path))
    plain = _plain(two_ranks, drawn)
    fault = faults_of(drawn, answers, plain)
    assert not fault, f"{drawn}: {fault}"
    assert not list(tmp_path.iterdir()), "files were left"


_PLAIN: dict[tuple[Any, ...], list[list[float]]] = {}


def _plain(pool: RankPool, drawn: Drawn) -> list[list[float]]:
    kind = tuple(drawn[name] for name in ("data", "optimizer", "clip_norm", "dropout"))
    if kind not in _PLAIN:
        _PLAIN[kind] = pool.run("random_combinations:plain", dict(drawn), 2)
    return _PLAIN[kind]
