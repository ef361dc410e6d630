"""A run reduced to facts: the steady steps of the slowest rank, the metrics, and why one is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from analysis_builders import (
    GIB,
    METADATA,
    MS,
    breakdown,
    build,
    communication,
    rank_result,
    statistics,
    steps_table,
)
from tiny_traces import write_job

import trine
from trine.analyzers.comparison import compare
from trine.analyzers.results import MemorySummary, Mfu
from trine.analyzers.run_facts import METRICS, RunFacts, measure_run


def parts_of(facts: RunFacts, kind: str) -> dict[str, float]:
    return {part.name: part.ns for part in facts.parts if part.kind == kind}


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    tables = [steps_table(count=10, step_ns=100 * MS), steps_table(count=12, step_ns=120 * MS)]
    facts = measure_run(build([rank_result(rank, steps=table) for rank, table in enumerate(tables)]))
    assert facts.step_ns == (120 * MS,) * 10  # the steps that only one rank has do not count


def test_warm_up_is_left_out_of_everything_that_is_measured_by_step() -> None:
    table = steps_table(count=12)
    table["end_ns"][0] += 900 * MS
    table["phase_other_ns"][0] += 900 * MS
    analysis = build([rank_result(0, steps=table)], step_statistics=statistics(12, warm_up=(0,)))
    facts = measure_run(analysis)
    assert (facts.warm_up, len(facts.step_ns), max(facts.step_ns)) == (1, 11, 100 * MS)
    assert parts_of(facts, "phase")["other"] == pytest.approx(1 * MS)
    without = measure_run(replace(analysis, step_statistics=None))
    assert without.step_ns == facts.step_ns  # detected here, where nobody has said it


def test_the_slowest_steps_that_a_roll_up_left_do_not_count() -> None:
    table = steps_table(count=20)
    table["end_ns"][:4] += 50 * MS  # steps 0 to 3 are what is left of 0 to 99
    table["index"][4:] += 96
    rolled_up = {**METADATA, "rolled_up": {"first": 0, "last": 99, "steps": 96}}
    facts = measure_run(build([rank_result(0, steps=table, metadata=rolled_up)]))
    assert facts.step_ns == (100 * MS,) * 16


def test_phases_are_means_that_add_up_to_the_step() -> None:
    phases = parts_of(measure_run(build()), "phase")
    assert sum(phases.values()) == pytest.approx(100 * MS)
    assert phases["backward"] == pytest.approx(58 * MS)


def test_breakdowns_count_by_step_and_rank_and_add_up() -> None:
    ranks = [rank_result(r, steps=steps_table(), window=breakdown(), part=communication()) for r in (0, 1)]
    facts = measure_run(build(ranks))
    assert sum(parts_of(facts, "breakdown").values()) == pytest.approx(100 * MS)
    assert sum(parts_of(facts, "idle").values()) == pytest.approx(parts_of(facts, "breakdown")["idle"])
    assert facts.metrics["exposed_communication_share"] == pytest.approx(0.03)
    mixed = [ranks[0], rank_result(1, steps=steps_table(), window=breakdown(basis="host"))]
    assert not parts_of(measure_run(build(mixed)), "breakdown")


def test_collectives_count_by_step_and_waits_by_rank() -> None:
    found = parts_of(measure_run(build()), "collective")
    assert found == {
        "all_reduce over 2 ranks: transfer": 3 * MS,
        "all_reduce over 2 ranks: wait for others": 0.5 * MS,
    }


def test_throughput_sums_ranks_and_is_unknown_when_a_step_does_not_say() -> None:
    tables = [steps_table(count=10), steps_table(count=10)]
    for table in tables:
        table["tokens"][:] = 500
    ranks = [rank_result(rank, steps=table) for rank, table in enumerate(tables)]
    assert measure_run(build(ranks)).metrics["tokens_per_s"] == pytest.approx(10_000)
    tables[1]["tokens"][3] = np.iinfo(np.int64).min
    facts = measure_run(build(ranks))
    assert "tokens_per_s" not in facts.metrics and "tokens" in facts.missing["tokens_per_s"]


def test_every_metric_is_either_said_or_excused() -> None:
    memory = MemorySummary(3 * GIB, 4 * GIB, 80 * GIB, {}, False, 0, "device")
    ranks = [rank_result(0, steps=steps_table(), window=breakdown(), memory=memory)]
    mfu = Mfu(0.4, "palm", 1e12, 1e14, "bf16", {"palm": 0.4, "6n": 0.38})
    for analysis in (
        build(),
        build([]),
        build(ranks, mfu=mfu),
        build([rank_result(0)], step_statistics=None),
    ):
        facts = measure_run(analysis)
        assert set(facts.metrics) | set(facts.missing) == set(METRICS)
        assert not set(facts.metrics) & set(facts.missing)
    full = measure_run(build(ranks, mfu=mfu))
    assert full.metrics["peak_bytes"] == 3 * GIB and full.metrics["mfu_6n"] == 0.38


def test_the_environment_and_the_configuration_come_from_the_record() -> None:
    versions = {"torch": "2.13.0", "nccl": "2.27.3", "driver": "580.1"}
    metadata = {**METADATA, "versions": versions, "commit": "4f2a"}
    facts = measure_run(build([rank_result(0, steps=steps_table(), metadata=metadata)]))
    assert facts.environment["device"] == "Test CPU" and facts.environment["world_size"] == 1
    assert {key: facts.environment[key] for key in versions} == versions
    assert facts.commit == "4f2a" and facts.configuration["compile"] is True
    other = measure_run(build([rank_result(0, steps=steps_table(), metadata={**metadata, "compile": False})]))
    assert other.configuration_hash != facts.configuration_hash
    again = measure_run(build([rank_result(0, steps=steps_table(count=9), metadata=metadata)]))
    assert again.configuration_hash == facts.configuration_hash


def test_facts_survive_json() -> None:
    facts = measure_run(build())
    assert msgspec.json.decode(msgspec.json.encode(facts), type=RunFacts) == facts


def test_traces_that_were_read_compare_with_their_cause(tmp_path: Path) -> None:
    sides = []
    for name, step_us in (("new", 12_000), ("old", 10_000)):
        paths = [write_job(tmp_path / f"{name}{n}", step_us, seed=n) for n in range(3)]
        sides.append([measure_run(trine.analyze(trine.load(str(path)), workers=1)) for path in paths])
    result = compare(*sides)
    assert result.verdict == "regression"
    assert result.step_time.ratio == pytest.approx(1.2, rel=0.01)
    kernels = [cause for cause in result.causes if cause.kind == "kernel"]
    assert [cause.name for cause in kernels] == ["ampere_fp16_gemm_backward"]
    assert kernels[0].change_ns == pytest.approx(2e6, rel=0.1)
    assert next(cause for cause in result.causes if cause.kind == "breakdown").name == "compute"


def test_real_traces_are_measured(data: Path) -> None:
    facts = measure_run(
        trine.analyze(trine.load(str(data / "traces/kineto/torchrec_straggler_v100")), workers=1)
    )
    assert facts.environment["device"] == "Tesla V100-SXM2-16GB" and facts.environment["world_size"] == 4
    waits = parts_of(facts, "collective")["all_to_all over 4 ranks: wait for others"]
    assert waits > 0.5 * np.median(facts.step_ns)  # its straggler makes the others wait
