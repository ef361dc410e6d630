"""``blocking-calls`` and ``host-bound`` on simulated loops: the fault, a healthy control beside it, and no double count."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_simulator import Host, Launch, Step, Sync, simulate

import trine
from trine.analyzers.analysis import analyze
from trine.analyzers.findings import gather
from trine.analyzers.findings.blocking_calls import _beside_the_table
from trine.analyzers.results import Analysis, Finding
from trine.analyzers.studies import result_of
from trine.analyzers.studies.critical_path import CriticalPath
from trine.analyzers.units import duration
from trine.record.model import Job, RankSource

LAYER = [Launch(25_000, operator="aten::mm"), Host(4_000, "aten::view")]


def analysed(body: list[object], count: int = 5) -> Analysis:
    rank = simulate([Step(tuple(body))] * count)
    source = RankSource(0, Path("simulated"), lambda _: rank)
    return analyze(Job(Path("simulated"), "kineto", (source,), 1), steps="complete", workers=1)


def found(analysis: Analysis) -> dict[str, Finding]:
    return {finding.id: finding for finding in analysis.findings}


def step_ns(analysis: Analysis) -> float:
    breakdown = analysis.ranks[0].summary.breakdown
    assert breakdown is not None
    return breakdown.window_ns / len(breakdown.steps)


def test_reading_a_value_after_every_layer_is_found_and_its_gain_foretold() -> None:
    ask = [Sync(name="cudaStreamSynchronize", operator="aten::item"), Host(20_000, "python", "python")]
    with_it = analysed(LAYER * 40 + (LAYER * 2 + ask) * 60)
    finding = found(with_it)["blocking-calls"]
    assert "aten::item (cudaStreamSynchronize)" in finding.title
    assert finding.evidence["calls_per_step"] == pytest.approx(60, abs=1)
    assert "Read values back" in finding.recommendation.why
    # The table of idle time counts the stall under the host: a reader of both is told why.
    idle = with_it.ranks[0].summary.breakdown.idle
    assert idle.sync < 0.5 * finding.evidence["gain_share"] * with_it.ranks[0].summary.breakdown.window_ns
    assert "counts this mostly under the host (rank 0: " in finding.recommendation.why
    assert (
        duration(idle.host) in finding.recommendation.why
        and duration(idle.sync) in finding.recommendation.why
    )
    # The same loop that never waits, its other work unchanged.
    without = analysed(
        LAYER * 40 + (LAYER * 2 + [Host(500, "aten::item"), Host(20_000, "python", "python")]) * 60
    )
    real = step_ns(with_it) - step_ns(without)
    foretold = finding.recommendation.predicted.gain_ns
    assert foretold.high == pytest.approx(real, rel=0.2) and foretold.low < real
    # What the waits explain is not told again.
    assert "host-bound" not in found(with_it)
    assert not {"blocking-calls", "host-bound"} & set(found(without))


def test_where_the_table_of_idle_time_shows_the_stall_itself_nothing_is_added() -> None:
    ask = [Sync(name="cudaStreamSynchronize", operator="aten::item"), Host(20_000, "python", "python")]
    analysis = analysed(LAYER * 40 + (LAYER * 2 + ask) * 60)
    facts = gather(analysis)
    rank = facts.ranks[0]
    seen = rank.breakdown
    assert seen is not None
    per_step = seen.idle.sync / len(seen.steps)
    assert per_step > 0, "the control needs idle time under blocking calls"
    assert _beside_the_table(facts, 0, round(per_step / 0.49)) != ""
    assert _beside_the_table(facts, 0, round(per_step / 0.51)) == ""
    assert _beside_the_table(facts, 7, 10**9) == "", "no such rank"


def test_one_value_a_step_is_no_fault() -> None:
    healthy = analysed([*LAYER * 100, Sync(operator="aten::item")])
    assert not {"blocking-calls", "host-bound"} & set(found(healthy))
    assert any(
        one.id == "blocking-calls" and "Blocking calls" in one.statement for one in healthy.not_bound_by
    )


def test_a_slow_host_that_never_blocks_is_host_bound_with_what_its_queue_says() -> None:
    slow = analysed([Launch(6_000, operator="aten::mm"), Host(15_000, "aten::view")] * 120)
    finding = found(slow)["host-bound"]
    assert "blocking-calls" not in found(slow)
    assert finding.evidence["queue_empty_share"] > 0.4 and finding.evidence["launch_to_start_ns"] < 10_000
    gain = finding.recommendation.predicted.gain_ns
    assert gain.high <= finding.evidence["gain_without_host_ns"]


def test_a_fed_device_is_not_host_bound() -> None:
    fed = analysed([Launch(25_000), Host(4_000, "aten::view")] * 120)
    assert not {"blocking-calls", "host-bound"} & set(found(fed))


def test_a_queue_that_is_never_empty_silences_host_bound() -> None:
    """The gaps end in work that was launched late, yet other work was queued all along and could not start (it
    waited for a peer, say): the host is not what the device waited for."""
    body = tuple([Launch(6_000, operator="aten::mm"), Host(15_000, "aten::view")] * 120)
    rank = simulate([Step((Launch(1_000, 20, "queued"), *body))] * 5)
    assert rank.device is not None
    queued = rank.device["name"] == rank.strings.find("queued")
    for number in range(5):
        mine = rank.device["step"] == number
        rank.device["end_ns"][queued & mine] = rank.device["end_ns"][mine].max() + 2_000
        rank.device["start_ns"][queued & mine] = rank.device["end_ns"][mine].max() - 1_000
    source = RankSource(0, Path("simulated"), lambda _: rank)
    analysis = analyze(Job(Path("simulated"), "kineto", (source,), 1), workers=1)
    breakdown = analysis.ranks[0].summary.breakdown
    assert breakdown is not None and breakdown.idle.host > 0.3 * breakdown.window_ns
    assert "host-bound" not in found(analysis)


def test_a_straggler_gives_back_no_more_than_the_next_rank_lets_it(data: Path) -> None:
    """Ranks 0 and 6 make the others wait for half the step, yet all hosts take about as long; rank 2 of the
    other job sleeps, and nothing else holds that job up."""
    traces = data / "traces" / "kineto"
    megatron = trine.analyze(trine.load(traces / "megatron_tp8_a100"), workers=1)
    first, second = megatron.findings[:2]
    assert (first.id, second.id) == ("host-bound", "straggler")
    assert second.evidence["cost_ns"] > 0.4 * 626e6 and second.evidence["replayed_gain_ns"] < 0.05 * 626e6
    assert second.recommendation.predicted.gain_ns.high <= second.evidence["replayed_gain_ns"]
    assert "next ranks" in second.recommendation.why
    # Every host needs nearly the whole step by itself: had a late rank been alone, there would be a faster one.
    path = result_of(megatron, "critical_path", CriticalPath)
    assert path is not None
    hosts = [sum(rank.segments_ns.get(name, 0) for name in ("operator", "python")) for rank in path.ranks]
    assert sorted(hosts)[1] > 0.75 * path.ranks[0].length_ns

    sleeping = found(trine.analyze(trine.load(traces / "torchrec_straggler_v100"), workers=1))
    assert "host-bound" not in sleeping
    gain = sleeping["straggler"].recommendation.predicted.gain_ns
    assert gain.high == pytest.approx(1e9, rel=0.05)
