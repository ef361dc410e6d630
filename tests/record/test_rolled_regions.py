"""Regions of roll-ups: their time is kept to the nanosecond, however many they are, and the record stays small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from record_rows import START_NS, STEP_NS, step_rows

from trine.record._rolled_regions import MOST_REGIONS, rolled_regions
from trine.record.model import Rank
from trine.record.readers import native
from trine.record.store import RankWriter


def sums(regions: dict[str, np.ndarray]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for kind, name, start, end in zip(
        *(regions[n].tolist() for n in ("kind", "name", "start_ns", "end_ns")), strict=True
    ):
        found[kind, name] = found.get((kind, name), 0) + end - start
    return found


@given(st.integers(1, 5_000), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_time_of_each_kind_stays(count: int, kinds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    edges = np.sort(random.integers(START_NS, START_NS + 10**12, (2 * count,)))
    regions = {
        "kind": random.integers(0, kinds, count),
        "name": random.integers(7, 9, count),
        "start_ns": edges[::2],
        "end_ns": edges[1::2],
    }
    few = rolled_regions(regions)
    assert len(few["start_ns"]) <= max(MOST_REGIONS, MOST_REGIONS // 2 + 2 * kinds)
    assert sums(few) == sums(regions)
    assert (few["end_ns"] >= few["start_ns"]).all() and few["start_ns"].min() >= START_NS
    if count <= MOST_REGIONS:
        assert few is regions


def written(folder: Path, each_step: bool) -> Rank:
    """Forty thousand steps in a record of little room, and an evaluation of 10 ms behind every one, or behind none."""
    writer = RankWriter(folder, 0, 1, max_bytes=400_000)
    for first in range(0, 40_000, 500):
        rows = {"parts": step_rows(first, 500)}
        if each_step:
            end = rows["parts"]["end_ns"]
            rows["regions"] = {
                "kind": ["evaluation"] * 500,
                "name": ["region"] * 500,
                "start_ns": end,
                "end_ns": end + STEP_NS // 5,
            }
        writer.append(rows)
    writer.close({"state": "finished"})
    return native.open_job(folder).rank(0)


def test_a_region_in_every_step_costs_no_history(tmp_path: Path) -> None:
    with_regions, without = written(tmp_path / "with", True), written(tmp_path / "without", False)
    size = sum(path.stat().st_size for path in (tmp_path / "with").rglob("*.trine"))
    assert size < 500_000
    regions = with_regions.regions
    assert regions is not None and without.regions is None
    assert int((regions["end_ns"] - regions["start_ns"]).sum()) == 40_000 * STEP_NS // 5
    finest = [
        max(h["steps"] for h in rank.metadata["rolled_up"]["histograms"]) for rank in (with_regions, without)
    ]
    assert finest[0] <= 10 * finest[1]
