"""``goodput``: against a slow reference that asks every nanosecond, over attempts, and from real runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from analysis_tables import rank_of
from hypothesis import given
from hypothesis import strategies as st
from record_rows import START_NS, STEP_NS, step_rows

import trine
from trine.analyzers.findings import checkpoint_stalls, gather, restarts
from trine.analyzers.results import Analysis
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies.goodput import CAUSES, Goodput, reduce, to_json
from trine.analyzers.verdict import _advice
from trine.record.model import PHASES, Rank, Strings, Table
from trine.record.store import RankWriter, attempt_folder

TESTS = Path(__file__).resolve().parents[1]
MS = 1_000_000
Spans = list[tuple[int, int, int]]
Regions = list[tuple[str, int, int]]


def attempt(
    steps: Spans, regions: Regions = (), start: int = 0, end: int = 100, data: int = 0, **metadata: Any
) -> Rank:
    """A native rank: steps (index, start, end), each with ``data`` ns of loading; regions (kind, start, end)."""
    phases = [[data if name == "data" else 0 for name in PHASES] for _ in steps]
    rank = rank_of(steps=steps, phases=phases, format="trine") if steps else rank_of(format="trine")
    strings = Strings()
    rank.regions = Table(
        "regions",
        {
            "kind": [strings.code(kind) for kind, _, _ in regions],
            "name": [strings.code("torch.save") for _ in regions],
            "start_ns": [first for _, first, _ in regions],
            "end_ns": [last for _, _, last in regions],
        },
        strings,
    )
    rank.metadata |= {
        "state": "finished",
        "started_ns": start,
        "run_started_ns": start,
        "ended_ns": end,
        **metadata,
    }
    return rank


def goodput_of(*attempts: Rank, steps: str = "complete") -> Goodput:
    rank = attempts[-1]
    rank.attempts = attempts[:-1]
    selection = parse_selection(steps)
    result = reduce(Scope(rank, selection, select(rank, selection), (), None))
    assert isinstance(result, Goodput), result
    return result


def losses(result: Goodput) -> dict[str, int]:
    return {cause: ns for cause, ns in result.losses_ns.items() if ns}


# --- one attempt -------------------------------------------------------------------------------------


def test_what_lies_around_and_between_steps_has_a_name() -> None:
    result = goodput_of(attempt([(0, 20, 40), (1, 50, 70)], data=3))
    assert losses(result) == {"start_up": 20, "between_steps": 10, "shut_down": 30, "loader": 6}
    assert (result.productive_ns, result.wall_ns, result.goodput) == (34, 100, 0.34)
    assert set(result.losses_ns) == set(CAUSES)


def test_regions_count_in_steps_and_between_them_and_checkpoints_before_evaluation() -> None:
    regions = [
        ("evaluation", 30, 60),
        ("checkpoint", 35, 45),
        ("work", 80, 90),
        ("setup", 0, 5),
        ("checkpoint", 95, 99),
    ]
    result = goodput_of(attempt([(0, 20, 40), (1, 50, 70)], regions))
    assert losses(result) == {
        "setup": 5,
        "start_up": 15,
        "evaluation": 20,
        "checkpoint": 14,
        "shut_down": 16,
    }
    assert result.productive_ns == 10 + 10 + 10
    assert (result.checkpoints, result.checkpoint_ns) == (1, 10), "the last one holds no step up"


def test_warm_up_is_what_the_first_step_took_longer() -> None:
    steps = [(0, 0, 50), *((n, 50 + 5 * (n - 1), 50 + 5 * n) for n in range(1, 9))]
    result = goodput_of(attempt(steps, end=90))
    assert losses(result) == {"warm_up": 45}
    assert result.productive_ns == 45


def test_a_range_of_steps_is_refused_in_words() -> None:
    rank = attempt([(0, 0, 50), (1, 50, 60)])
    selection = parse_selection("0:1")
    assert "whole run" in str(reduce(Scope(rank, selection, select(rank, selection), (), None)))
    selection = parse_selection("all")
    nothing = attempt([])
    assert "no step was completed" in str(
        reduce(Scope(nothing, selection, select(nothing, selection), (), None))
    )


cuts = st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True).map(sorted)
kinds = st.sampled_from(["work", "checkpoint", "evaluation", "profiling", "setup", "other"])
stretches = st.lists(st.tuples(kinds, st.integers(-5, 60), st.integers(0, 25)), max_size=6)


@given(cuts, st.booleans(), stretches, st.integers(0, 20), st.integers(0, 20))
def test_every_nanosecond_counts_once(edges, joined: bool, found, before: int, after: int) -> None:
    """Against the definition asked of each nanosecond. At most three steps: then none is warm-up."""
    pairs = list(pairwise(edges))[:: 1 if joined else 2][:3]
    steps = [(number, first, last) for number, (first, last) in enumerate(pairs)]
    regions = [(kind, first, first + length) for kind, first, length in found]
    start, end = edges[0] - before, edges[-1] + after
    result = goodput_of(attempt(steps, regions, start, end))
    end = max(end, *(last for _, _, last in [*regions, ("", 0, end)]))
    expected: Counter[str] = Counter()
    for t in range(start, end):
        kind = next(
            (
                k
                for k in ("work", "checkpoint", "evaluation", "profiling", "setup", "other")
                if any(k == name and a <= t < b for name, a, b in regions)
            ),
            None,
        )
        if kind is None:
            inside = any(a <= t < b for _, a, b in steps)
            kind = (
                "work"
                if inside
                else "start_up"
                if t < steps[0][1]
                else "shut_down"
                if t >= steps[-1][2]
                else "between_steps"
            )
        expected[kind] += 1
    assert result.productive_ns == expected.pop("work", 0)
    assert losses(result) == dict(expected)
    assert result.wall_ns == end - start == result.productive_ns + sum(result.losses_ns.values())


# --- attempts ----------------------------------------------------------------------------------------


def test_a_failed_attempt_costs_its_gap_and_the_steps_done_twice() -> None:
    first = attempt(
        [(n, 10 * n, 10 * n + 10) for n in range(5)], start=-10, end=55, state="failed", attempt=1
    )
    second = attempt([(n, 10 * n + 50, 10 * n + 60) for n in range(3, 8)], start=70, end=130, attempt=2)
    result = goodput_of(first, second)
    assert losses(result) == {"start_up": 10 + 10, "repeated": 20, "shut_down": 5, "restart": 15}
    assert (result.restarts, result.repeated_steps, result.steps) == (1, 2, 8)
    assert result.wall_ns == 140 == result.productive_ns + sum(result.losses_ns.values())
    assert [one.state for one in result.attempts] == ["failed", "finished"]


@pytest.mark.parametrize(
    ("state", "chained", "gap"),
    [("finished", 1, 0), ("stopped", 2, 0), ("killed", 2, 1000), ("running", 2, 1000)],
)
def test_which_attempts_are_one_run(state: str, chained: int, gap: int) -> None:
    steps = [(n, 10 * n, 10 * n + 10) for n in range(5)]
    later = [(n, 10 * n + 1060, 10 * n + 1070) for n in range(5)]
    result = goodput_of(attempt(steps, end=60, state=state), attempt(later, start=1060, end=1200))
    assert (len(result.attempts), result.losses_ns["restart"]) == (chained, gap)
    if chained == 2:
        assert result.repeated_steps is None, "both number their steps from 0"


def test_resumed_from_step_says_what_was_done_twice() -> None:
    steps = [(n, 10 * n, 10 * n + 10) for n in range(5)]
    later = [(n, 10 * n + 100, 10 * n + 110) for n in range(5)]
    again = attempt(later, start=100, end=200, resumed_from_step=4)
    assert goodput_of(attempt(steps, end=60, state="failed"), again).repeated_steps == 1


def test_trials_of_the_command_line_are_no_restarts() -> None:
    later = [(n, 10 * n + 1060, 10 * n + 1070) for n in range(5)]
    result = goodput_of(attempt([(0, 0, 10)], end=60, state="failed"), attempt(later, start=1060, end=1200))
    assert len(result.attempts) == 1 and not result.restarts


# --- findings ----------------------------------------------------------------------------------------


def analysis_of(result: Goodput, step_ns: int = 100 * MS) -> Analysis:
    from analysis_builders import build

    return build(studies={"goodput": result}, step_ns=step_ns)


def with_checkpoints(each: int, count: int = 4) -> Goodput:
    steps = [(n, 100 * MS * n, 100 * MS * (n + 1)) for n in range(40)]
    regions = [("checkpoint", 1000 * MS * (n + 1) - each, 1000 * MS * (n + 1)) for n in range(count)]
    return goodput_of(attempt(steps, regions, end=4000 * MS))


def test_checkpoints_that_stop_training_are_found_and_short_ones_are_not() -> None:
    found = checkpoint_stalls.find(gather(analysis_of(with_checkpoints(80 * MS))))
    assert found is not None and found.kind == "opportunity"
    assert found.evidence["checkpoints"] == 4 and found.evidence["share"] == 0.08
    assert found.recommendation is not None and "async_save" in found.recommendation.why
    assert found.recommendation.predicted is not None and found.recommendation.predicted.gain_ns is not None
    assert found.recommendation.predicted.gain_ns.mid == 80 * MS * 4 / 40 * 0.8
    for control in (
        with_checkpoints(5 * MS),
        with_checkpoints(80 * MS, count=0),
        with_checkpoints(95 * MS, count=1),
    ):
        assert checkpoint_stalls.find(gather(analysis_of(control))) is None
    assert "0.5 %" in str(checkpoint_stalls.healthy(gather(analysis_of(with_checkpoints(5 * MS)))))


def test_the_share_that_is_promised_is_of_the_step_that_the_gain_is_of() -> None:
    """The usual step is 10 ms, the mean one with its part of a checkpoint 100 ms."""
    analysis = analysis_of(with_checkpoints(80 * MS), step_ns=10 * MS)
    found = checkpoint_stalls.find(gather(analysis))
    assert found is not None
    assert "6.4 ms a step (6.4 %;" in " ".join(
        _advice(gather(analysis), found).replace("6.40", "6.4").split()
    )


def restarted(gap: int, state: str = "failed") -> Goodput:
    first = attempt([(n, 10 * n, 10 * n + 10) for n in range(50)], end=500, state=state)
    later = [(n, 10 * n + gap, 10 * n + 10 + gap) for n in range(50, 100)]
    return goodput_of(first, attempt(later, start=500 + gap, end=1000 + gap))


def test_restarts_that_cost_much_are_a_fault_and_others_are_not() -> None:
    found = restarts.find(gather(analysis_of(restarted(200))))
    assert found is not None and found.kind == "fault"
    assert "broke off 1 time: 17 %" in found.title and found.evidence["gaps_ns"] == 200
    assert found.recommendation is not None and "restart at once" in found.recommendation.why
    for control in (
        restarted(20),
        restarted(200, "stopped"),
        restarted(200, "finished"),
        with_checkpoints(0),
    ):
        assert restarts.find(gather(analysis_of(control))) is None
    assert (
        restarts.healthy(gather(analysis_of(restarted(20))))
        == "Restarts: 1 cost 2.0 % of the run (fault from 5.0 %)"
    )


# --- records -----------------------------------------------------------------------------------------


def test_rolled_up_steps_still_count(tmp_path: Path) -> None:
    """3,000 steps of 50 ms, one in eleven of the time, in the smallest record there is."""
    writer = RankWriter(tmp_path / "run", 0, 1, max_bytes=64 << 10)
    regions = {
        "kind": ["checkpoint"],
        "name": ["torch.save"],
        "start_ns": [START_NS + 60 * MS],
        "end_ns": [START_NS + 90 * MS],
    }
    writer.append({"regions": regions})
    for first in range(0, 3_000, 50):
        writer.append({"parts": step_rows(first, 50)})
    end = START_NS + 2_999 * 11 * STEP_NS + STEP_NS
    writer.close({"state": "finished", "ended_ns": end, "metadata": {"run_started_ns": START_NS - 7 * MS}})
    job = trine.load(tmp_path / "run")
    assert job.rank(0).metadata["rolled_up"]["steps"] >= 300
    description = job.rank(0)
    description.metadata["started_ns"] = START_NS
    result = goodput_of(description)
    assert result.steps == 3_000
    assert result.productive_ns == 3_000 * STEP_NS
    assert losses(result) == {
        "start_up": 7 * MS,
        "checkpoint": 30 * MS,
        "between_steps": end - START_NS - 3_000 * STEP_NS - 30 * MS,
    }


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed, and then started again from an earlier step."""
    pytest.importorskip("torch", reason="recording needs torch; analysing does not")
    path = tmp_path_factory.mktemp("restarted") / "run"
    script = str(TESTS / "killed_training.py")
    process = subprocess.Popen([sys.executable, script, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line.split()[0]) >= 60:
                break
        time.sleep(1.2)  # more than two flushes
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    finally:
        process.kill()
        process.stdout.close()
    again = subprocess.run(
        [sys.executable, str(TESTS / "resumed_training.py"), str(path), "40"],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    return path


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_seen_as_one(broken_off: Path) -> None:
    assert attempt_folder(broken_off, 2).is_dir()
    analysis = trine.analyze(trine.load(broken_off))
    found = result_of(analysis, "goodput", Goodput)
    assert found is not None
    assert [(one.attempt, one.state) for one in found.attempts] == [(1, "killed"), (2, "finished")]
    assert found.repeated_steps is not None and found.repeated_steps >= 20
    assert found.losses_ns["restart"] >= 0 and found.losses_ns["repeated"] > 100 * MS
    assert found.evaluations == 2 and found.checkpoints == 2
    assert found.wall_ns == found.productive_ns + sum(found.losses_ns.values())
    assert "restarts" in {finding.id for finding in analysis.findings}
    written = to_json(found)
    assert written["attempts"][0]["state"] == "killed" and set(written["losses_ns"]) == set(CAUSES)


def test_a_foreign_trace_has_no_goodput_and_says_why(data: Path) -> None:
    analysis = trine.analyze(trine.load(data / "traces" / "kineto" / "odd" / "cpu_only.json.gz"))
    assert "goodput" not in analysis.studies
    assert any(
        note.id == "no-goodput" and "record of the whole run" in note.message
        for note in analysis.data_quality
    )
