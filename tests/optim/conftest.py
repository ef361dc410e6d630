"""Ranks that stay alive across the runtime's tests: starting them costs more than most cases take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(tmp_path_factory, 4)


@pytest.fixture(scope="session")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(tmp_path_factory, 8)


def _pool(tmp_path_factory: pytest.TempPathFactory, ranks: int) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp(f"ranks{ranks}"), ranks)
    yield pool
    pool.close()
