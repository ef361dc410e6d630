"""``expected.json`` to the last digit it prints, through the whole analysis."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import trine
from trine.analyzers import Analysis, conclude, parse_selection, summarize
from trine.record.model import Rank, Table

SETS = (
    "megatron_tp8_a100",
    "torchrec_straggler_v100",
    "single/a100_nccl_metadata.json.gz",
    "single/v100_ns_resolution.json.gz",
    "single/mi300x_resnet_act_checkpoint.json.gz",
)
SELECTIONS = {"all": "all_events", "complete": "complete_steps"}


@cache
def reference(data: Path, name: str) -> dict[str, Any]:
    return json.loads((data / "traces" / "expected.json").read_text())[f"kineto/{name}"]


@cache
def ranks_of(data: Path, name: str) -> tuple[Rank, ...]:
    return tuple(trine.load(data / "traces" / "kineto" / name))


def analysed(
    data: Path, name: str, steps: str, change: Callable[[Rank], Rank] = lambda rank: rank
) -> Analysis:
    job = trine.load(data / "traces" / "kineto" / name)
    selection = parse_selection(steps)
    return conclude(job, [summarize(change(rank), selection) for rank in ranks_of(data, name)], selection)


def times(analysis: Analysis, rank: int) -> dict[str, int]:
    breakdown = analysis.ranks[rank].summary.breakdown
    assert breakdown is not None
    return {
        "span_us": breakdown.window_ns,
        "busy_us": breakdown.busy.any,
        "idle_us": breakdown.idle_ns,
        "compute_us": breakdown.compute_ns,
        "communication_us": breakdown.busy.communication,
        "memory_us": breakdown.busy.copy,
        "overlap_us": breakdown.overlap_ns,
        "exposed_communication_us": breakdown.exposed_communication_ns,
    }


@pytest.mark.parametrize("steps", SELECTIONS)
@pytest.mark.parametrize("name", SETS)
def test_breakdowns_are_the_references_to_the_last_digit(data: Path, name: str, steps: str) -> None:
    analysis = analysed(data, name, steps)
    for rank in analysis.ranks:
        expected = reference(data, name)["ranks"][str(rank.rank)][SELECTIONS[steps]]
        found = times(analysis, rank.rank)
        assert found == {key: round(expected[key] * 1000) for key in found}
        breakdown = rank.summary.breakdown
        assert breakdown is not None
        kernels = [one for one in rank.summary.kernels if one.kind != "copy"]
        if len(rank.summary.kernels) < 100:  # the table of names is not cut
            assert sum(one.calls for one in kernels) == expected["kernels"]
        idle = breakdown.idle
        causes = (idle.data, idle.host, idle.sync, idle.dependency, idle.bubble, idle.other)
        assert sum(causes) == breakdown.idle_ns


@pytest.mark.parametrize("name", ["megatron_tp8_a100", "torchrec_straggler_v100"])
def test_collectives_are_the_references_to_the_printed_digits(data: Path, name: str) -> None:
    expected = reference(data, name)["collectives"]
    shares = {r.rank: r.communication for r in analysed(data, name, "all").ranks}
    for rank, share in shares.items():
        assert share is not None
        key = str(rank)
        assert share.matched == expected["matched_per_rank"]
        assert round(share.transfer_ns / 1e6, 3) == expected["transfer_ms"]
        assert round(share.lateness_ns / 1e6, 3) == expected["lateness_ms"][key]
        assert share.last_in == expected["last_in"][key]
        assert round(share.wait_ns / 1e6, 1) == expected["wait_ms"][key]


@pytest.mark.parametrize("steps", ["all", "complete"])
def test_rank_2_is_the_cause_in_torchrec(data: Path, steps: str) -> None:
    """One rank sleeps in Python before its forward pass, and every other waits a second a step."""
    analysis = analysed(data, "torchrec_straggler_v100", steps)
    caused = {r.rank: r.communication.caused_wait_ns for r in analysis.ranks if r.communication}
    assert caused[2] > 0 and caused[0] == caused[1] == caused[3] == 0
    share = analysis.ranks[2].communication
    assert share is not None and share.late_doing[0].activity == "python"
    assert share.late_doing[0].total_ns > 0.9 * share.lateness_ns


def test_torchrecs_shorter_rank_is_aligned_from_the_end_and_that_is_said(data: Path) -> None:
    notes = {note.id: note.message for note in analysed(data, "torchrec_straggler_v100", "all").data_quality}
    assert "from the end" in notes["collectives-aligned"]


def test_ranks_0_and_6_are_the_causes_in_megatron(data: Path) -> None:
    analysis = analysed(data, "megatron_tp8_a100", "complete")
    caused = {r.rank: r.communication.caused_wait_ns for r in analysis.ranks if r.communication}
    assert sorted(caused, key=lambda rank: -caused[rank])[:2] == [0, 6]
    assert caused[0] + caused[6] > 0.9 * sum(caused.values())
    assert all(abs(rank.clock_offset_ns or 0) < 100_000 for rank in analysis.ranks)


@pytest.mark.parametrize("name", ["megatron_tp8_a100", "torchrec_straggler_v100"])
@pytest.mark.parametrize("shift", [3_000_000_000, -7_123_456_789])
@pytest.mark.slow
def test_another_clock_changes_the_offset_and_what_the_skew_hides(data: Path, name: str, shift: int) -> None:
    """Real ends scatter by some 10 µs, which no correction can tell from clocks: lateness may move by as
    much a call. Transfer and waits come from durations alone and must not move at all."""

    def shifted(rank: Rank) -> Rank:
        if rank.rank != 2:
            return rank
        changes = {}
        for kind in ("steps", "device", "host", "collectives"):
            table = getattr(rank, kind)
            moved = {
                c: v + shift for c, v in table.columns.items() if c in ("start_ns", "end_ns", "issued_ns")
            }
            changes[kind] = Table(kind, {**table.columns, **moved}, table.strings)
        return replace(rank, **changes)

    before, after = analysed(data, name, "all"), analysed(data, name, "all", shifted)
    for one, other in zip(before.ranks, after.ranks, strict=True):
        assert one.summary.breakdown == other.summary.breakdown
        first, second = one.communication, other.communication
        assert first is not None and second is not None
        assert (first.transfer_ns, first.wait_ns, first.matched) == (
            second.transfer_ns,
            second.wait_ns,
            second.matched,
        )
        assert abs(first.lateness_ns - second.lateness_ns) <= 30_000 * first.matched
    assert before.ranks[2].clock_offset_ns is not None
    assert after.ranks[2].clock_offset_ns == before.ranks[2].clock_offset_ns - shift
    assert "clock-disagreement" in {note.id for note in after.data_quality}
