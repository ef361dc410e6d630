"""``benchmarks/effects.py``: techniques change what they exist to change, by the formula, in Trine's own record."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import effect_ranks
import numpy as np
import pytest
from effect_ranks import effects

from trine.record.model import MISSING

#: Of these every quantity has a formula. One round is enough for bytes.
QUICK = ("bf16 master weights", "zero 2 on 2", "bf16 on 2", "accumulation 4, the same micro-batch")
#: Times are for the benchmark; what is left is bytes, counts, and how far buckets overlap.
JUDGED = tuple(row.name for row in effects.ROWS if any(line.expected is not None for line in row.lines))


def test_names_are_unique() -> None:
    names = [row.name for row in effects.ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for result in _results(name, tmp_path, request, rounds=1):
        assert result.holds, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in JUDGED if name not in QUICK])
def test_whole(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for result in _results(name, tmp_path, request, rounds=2):
        assert result.holds, str(result)


def test_a_technique_that_does_nothing_is_off(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    row = effect_ranks.row_of("accumulation 4, the same step")
    idle = replace(row, name="idle", changes={}, steps=2)
    shapes = effects.measure(0, idle, str(tmp_path), 1)
    (result,) = effects.results_of(idle, tmp_path, shapes)
    assert result.optimised == pytest.approx(result.plain)
    assert not result.holds
    assert "OFF" in str(result)


@pytest.mark.parametrize("size", [100, MISSING])
def test_bytes_that_a_record_lacks_are_missing_not_nought(size: int) -> None:
    class Table(dict[str, np.ndarray]):
        def text(self, column: str) -> np.ndarray:
            return self[column]

    columns = {"operation": "all_gather", "group": "0", "bytes": size, "peer": MISSING, "step": 1}
    table = Table({name: np.array([value]) for name, value in columns.items()})
    groups = [SimpleNamespace(id="0", ranks=(0, 1))]
    rank = SimpleNamespace(rank=0, steps={"index": np.arange(2)}, collectives=table, groups=groups)
    records = effects.effect_records.Records.__new__(effects.effect_records.Records)
    records.ranks, records.world = [rank], 1
    found = records.sent_bytes(("all_gather",))
    assert math.isnan(found) if size == MISSING else found == 50  # an all-gather between two sends half


def _results(name: str, folder: Path, request: pytest.FixtureRequest, rounds: int) -> list[effects.Result]:
    row = effect_ranks.row_of(name)
    if row.ranks == 1:
        shapes = effect_ranks.measure(0, name, str(folder), rounds)
    else:
        pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[row.ranks])
        shapes = pool.run("effect_ranks:measure", name, str(folder), rounds)[0]
    return effects.results_of(row, folder, shapes)
