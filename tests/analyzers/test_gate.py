"""The gate: baselines and budgets, what fails, what is only said, and the files they lie in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_runs import run_facts, side
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.baseline import is_baseline, read_baseline, write_baseline
from trine.analyzers.budget import parse_budget, read_budget
from trine.analyzers.gate import CheckResult, check
from trine.analyzers.run_facts import METRICS
from trine.record.errors import NotComparable, UnreadableInput, UsageError


def states(result: CheckResult) -> dict[str, str]:
    return {outcome.id: outcome.state for outcome in result.outcomes}


def test_a_regression_fails_and_an_equal_run_passes() -> None:
    slow = check(side("new", 115), baseline=side("old", 100))
    assert states(slow)["baseline/step_time_ns"] == "fail" and slow.exit_code() == 1
    assert slow.exit_code(warn_only=True) == 0
    same = check(side("new", 100), baseline=side("old", 100))
    assert set(states(same).values()) == {"pass"} and same.exit_code(strict=True) == 0


def test_one_run_a_side_is_inconclusive_and_fails_only_under_strict() -> None:
    result = check([run_facts("new", 150)], baseline=[run_facts("old", 100)])
    assert states(result)["baseline/step_time_ns"] == "inconclusive"
    assert (result.exit_code(), result.exit_code(strict=True)) == (0, 1)
    assert result.exit_code(strict=True, warn_only=True) == 0


def test_memory_fails_only_where_all_runs_need_more() -> None:
    old = side("old", 100)
    hungry = side("new", 100, metrics={"peak_bytes": 1.2e9})
    assert states(check(hungry, baseline=old))["baseline/peak_bytes"] == "fail"
    mixed = [*hungry, run_facts("new-3", 100, metrics={"peak_bytes": 1e9})]
    assert states(check(mixed, baseline=old))["baseline/peak_bytes"] == "inconclusive"
    little = side("new", 100, metrics={"peak_bytes": 1.02e9})
    assert states(check(little, baseline=old))["baseline/peak_bytes"] == "pass"
    alone = check(hungry[:1], baseline=old[:1])
    assert states(alone)["baseline/peak_bytes"] == "inconclusive"


def test_budgets_are_absolute_and_need_one_run() -> None:
    run = [run_facts("new", 100)]
    result = check(run, budget={"step_time_ns": 90e6, "tokens_per_s": 5000.0, "peak_bytes": 2e9})
    assert states(result) == {
        "budget/step_time_ns": "fail",
        "budget/tokens_per_s": "pass",
        "budget/peak_bytes": "pass",
    }
    assert check(run, budget={"tokens_per_s": 1e6}).exit_code() == 1  # at least, not at most
    assert check(run, budget={"step_time_ns": 110e6}).exit_code() == 0


def test_a_budget_that_cannot_be_said_is_inconclusive_with_the_reason() -> None:
    result = check([run_facts("new", 100)], budget={"mfu": 0.4})
    outcome = result.outcomes[0]
    assert outcome.state == "inconclusive" and "chose no convention" in outcome.reason
    assert (result.exit_code(), result.exit_code(strict=True)) == (0, 1)


def test_nothing_to_check_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to check against"):
        check([run_facts("new", 100)])
    with pytest.raises(UsageError, match="no runs"):
        check([], budget={"mfu": 0.4})


# --- the baseline file -------------------------------------------------------------------------


def test_a_baseline_gives_back_what_was_written(tmp_path: Path) -> None:
    runs = side("old", 100)
    path = tmp_path / "baseline.json"
    write_baseline(path, runs, commit="4f2a")
    assert is_baseline(path)
    found = read_baseline(path)
    assert found.runs == tuple(runs) and found.commit == "4f2a"
    assert found.environment == runs[0].environment
    assert len(path.read_text().splitlines()) < 200  # step times do not take a line each
    assert [p.name for p in tmp_path.iterdir()] == ["baseline.json"]


@given(st.binary(max_size=200))
def test_damaged_baselines_are_one_clear_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    path.write_bytes(data)
    with pytest.raises(UnreadableInput) as caught:
        read_baseline(path)
    assert "\n" not in str(caught.value)


def test_truncated_absent_newer_and_empty_baselines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with pytest.raises(UnreadableInput, match="cannot read the baseline"):
        read_baseline(path)
    write_baseline(path, side("old", 100))
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(UnreadableInput, match="no baseline"):
        read_baseline(path)
    path.write_text(whole.replace("trine.baseline/1", "trine.baseline/9"))
    with pytest.raises(UnreadableInput, match="upgrade Trine"):
        read_baseline(path)
    path.write_text(json.dumps({**json.loads(whole), "runs": []}))
    with pytest.raises(UnreadableInput, match="holds no runs"):
        read_baseline(path)
    path.write_text(whole.replace('"source": "old-0"', '"source": 3'))
    with pytest.raises(UnreadableInput, match=r"\$\.runs\[0\]\.source"):
        read_baseline(path)


def test_a_run_too_short_to_compare_makes_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="too few for a baseline"):
        write_baseline(tmp_path / "b.json", [run_facts("old", 100, steps=3)], minimum_steps=6)
    with pytest.raises(UsageError, match="cannot write the baseline"):
        write_baseline(tmp_path / "absent" / "b.json", side("old", 100))


# --- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_time": 1}, "unknown budget 'step_time'; did you mean 'step_time_ns'"),
        ({"qqqq": 1}, "unknown budget 'qqqq'; known keys: step_time_ns"),
        ({"peak_bytes": "30 GiB"}, r"peak_bytes must be a number \(bytes\), not '30 GiB'"),
        ({"peak_bytes": True}, "must be a number"),
        ({"step_time_ns": -1}, "of at least 0"),
        ({"step_time_ns": float("nan")}, "finite"),
        ({"mfu_palm": 40}, "write 0.4 for 40 %"),
        ({"idle_share": {"x": 1}}, "must be a number"),
        ({}, "sets no limit"),
    ],
)
def test_wrong_budgets_name_the_key_and_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_budget(values, "budget.toml")


def test_a_budget_file_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.toml"
    path.write_text("step_time_ns = 120_000_000\nmfu_palm = 0.4\n")
    assert read_budget(path) == {"step_time_ns": 120e6, "mfu_palm": 0.4}
    path.write_text("step_time_ns = = 3")
    with pytest.raises(UnreadableInput, match="not TOML"):
        read_budget(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UnreadableInput, match="UTF-8"):
        read_budget(path)
    with pytest.raises(UnreadableInput, match="No such file"):
        read_budget(tmp_path / "absent.toml")


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_can_be_a_budget(metric: str) -> None:
    assert parse_budget({metric: 0.5}, "budget.toml") == {metric: 0.5}
