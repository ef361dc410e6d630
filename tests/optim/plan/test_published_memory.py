"""Published peaks, scored as ``benchmarks/planner_memory.py`` does."""

from __future__ import annotations

from pathlib import Path

import planner_memory
import planner_memory_rows
import planner_rows
import pytest

from trine.optim.plan.memory_traits import memory_spread


@pytest.fixture(scope="module")
def published_cases(published_runs: list[dict[str, str]], tables: Path) -> dict[str, list[object]]:
    runs, _ = planner_rows.read_rows([row for row in published_runs if row["mem_gib"] or row["oom"]])
    found = [
        *planner_memory_rows.of_runs(runs),
        *planner_memory_rows.recomputation(tables / "korthikanti_2022_memory.csv"),
        *planner_memory_rows.sharding(tables / "zero_memory.csv"),
        *planner_memory_rows.fine_tuning(tables / "litgpt_finetune_memory.csv"),
    ]
    by_table: dict[str, list[object]] = {}
    for case in found:
        by_table.setdefault(case.table, []).append(case)
    return by_table


def test_every_table_is_within_six_percent(published_cases: dict[str, list[object]]) -> None:
    every = [case for cases in published_cases.values() for case in cases]
    constants = planner_memory.shipped()
    assert len(published_cases) >= 7
    for table, cases in published_cases.items():
        score = planner_memory.of_memory(cases, constants)
        assert score["median"] < 0.06, table
        assert score["false_alarms"] <= 0.06 * len(cases), table
        # By constants that the table had no part in.
        left_out = planner_memory.of_memory(cases, planner_memory.left_out(every, table))
        assert left_out["median"] < 0.06, table


def test_out_of_memory_is_foreseen(published_cases: dict[str, list[object]]) -> None:
    constants = planner_memory.shipped()
    runs = [case for cases in published_cases.values() for case in cases if case.counts == "used"]  # type: ignore[attr-defined]
    score = planner_memory.of_memory(runs, constants)
    assert score["oom"] == 6
    # One run of as many bytes as another that went.
    assert score["oom_predicted"] >= 5


def test_formulas_are_met_to_rounding(published_cases: dict[str, list[object]]) -> None:
    constants = planner_memory.shipped()
    for table, most in (
        ("sharding", 0.02),
        ("recomputation: state", 0.003),
        ("recomputation: activations", 0.003),
        ("recomputation: share", 0.02),
    ):
        assert planner_memory.of_memory(published_cases[table], constants)["p90"] < most, table


def test_a_fit_finds_what_made_its_peaks_and_keeps_its_prior_without_any() -> None:
    case = planner_memory_rows.Case
    made = [
        case("t", str(size), "fsdp", "reserved", size * 2**30 * 1.05 + 2.0e9, size * 2**30)
        for size in (10, 20, 40, 60, 80) * 20
    ]
    fragmentation, fixed = planner_memory.fitted(made)["fsdp"]
    assert fragmentation == pytest.approx(0.05, abs=0.005)
    assert fixed == pytest.approx(2.0e9, rel=0.1)
    assert planner_memory.fitted(made)["megatron"] == planner_memory.PRIOR


def test_shipped_constants_are_those_that_the_fit_gives(published_cases: dict[str, list[object]]) -> None:
    every = [case for cases in published_cases.values() for case in cases]
    shipped, fitted = planner_memory.shipped(), planner_memory.fitted(every)
    for kind, (fragmentation, fixed) in fitted.items():
        assert shipped[kind][0] == pytest.approx(fragmentation, abs=0.01), kind
        assert shipped[kind][1] == pytest.approx(fixed, abs=0.2e9), kind
    spread = planner_memory.spread_of(every)
    assert 0.85 < spread["low"] < 1 < spread["high"] < 1.2
    assert memory_spread().low == pytest.approx(spread["low"], abs=0.02)
    assert memory_spread().high == pytest.approx(spread["high"], abs=0.02)
