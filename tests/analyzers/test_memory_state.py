"""The state that a host's window of events lacks: known from the record, and part of what a change frees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trine.analyzers.results import MemorySummary
from trine.analyzers.studies._memory_state import with_state
from trine.analyzers.studies.memory_owners import MemoryOwners, RankMemory, join

MIB = 2**20
#: Bytes of a window's events: activations come and go, gradients are freed after each step.
ACTIVATIONS, GRADIENTS = (0, 40 * MIB, 10 * MIB), (0, 1 * MIB, 12 * MIB)
STATE = {
    "parameters": 12 * MIB,
    "gradients": 12 * MIB,
    "optimizer_state": 24 * MIB,
    "unattributed": 500 * MIB,
}


def window(rank: int, kind: Any = "host") -> RankMemory:
    totals = tuple(map(sum, zip(ACTIVATIONS, GRADIENTS, strict=True)))
    return RankMemory(
        rank=rank, kind=kind, device=-1, peak_bytes=max(totals), peak_ns=1, reserved_at_peak_bytes=None,
        lower_bound=False, categories=("gradients", "activations"), times_ns=(0, 1, 2), levels=(GRADIENTS, ACTIVATIONS),
        totals=totals, owners=(), others_bytes=0, lowest={}, fragmentation=None, retries=None, pending_peak_bytes=None,
        segments_allocated=0, segments_released=0, failures=(), leaks=(), steps=0,
    )  # fmt: skip


def joined(parts: list[RankMemory], peaks: list[int], at_peak: dict[str, int] = STATE) -> MemoryOwners:
    summaries = {
        part.rank: SimpleNamespace(
            memory=MemorySummary(peak, None, None, at_peak, False, None, part.kind),
            metadata={"data_parallel": {"kind": "ddp"}},
            world_size=len(parts),
        )
        for part, peak in zip(parts, peaks, strict=True)
    }
    whole: Any = SimpleNamespace(summaries=summaries, job=SimpleNamespace(world_size=len(parts)))
    found = join({part.rank: part for part in parts}, whole)
    assert isinstance(found, MemoryOwners)
    return found


def test_the_fullest_rank_is_the_one_that_its_samples_say() -> None:
    found = joined([window(0), window(1)], [580 * MIB, 649 * MIB])
    assert [part.rank for part in found.ranks] == [1, 0]
    assert [part.rank for part in joined([window(0), window(1)], [649 * MIB] * 2).ranks] == [0, 1]


def test_what_shards_free_is_of_the_state_that_is_older_than_the_window() -> None:
    found = joined([window(0), window(1)], [580 * MIB, 649 * MIB])
    frees = {each.change: each.freed_bytes for each in found.frees}
    assert frees["ZeRO-1"] == 12 * MIB and frees["ZeRO-3"] == int(18.5 * MIB)
    assert frees["offload optimizer state"] == 24 * MIB
    part = found.ranks[0]
    assert part.peak_bytes == 77 * MIB == max(part.totals) and part.lower_bound
    assert {owned.owner for owned in part.owners} == {None}
    assert [(owned.category, owned.bytes) for owned in part.owners] == [
        ("optimizer_state", 24 * MIB),
        ("parameters", 12 * MIB),
    ]
    assert part.totals == tuple(np.sum(part.levels, axis=0))


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_device_knows_its_totals_and_a_record_without_sizes_adds_nothing(kind: Any) -> None:
    part = replace(window(0), kind=kind)
    known = STATE if kind == "device" else {"unattributed": 500 * MIB}
    assert joined([part], [580 * MIB], known).ranks == (part,)


def test_what_the_curve_has_at_its_highest_is_not_added_again() -> None:
    levels = np.array([GRADIENTS, ACTIVATIONS])
    curve = with_state(("gradients", "activations"), levels, {"gradients": 14 * MIB, "activations": 99 * MIB})
    assert curve.before == {"gradients": 2 * MIB} and curve.categories == ("gradients", "activations")
    assert (curve.levels[0] - levels[0] == 2 * MIB).all() and (curve.levels[1] == levels[1]).all()
