from __future__ import annotations

from analysis_tables import step_table

from trine.analyzers.steps import job_step_statistics, phase_sums, sampled_steps, step_statistics
from trine.record.model import MISSING, PHASES, Strings

MS = 1_000_000


def steps(durations: list[int], first: int = 0, phases=None):
    edges = [0]
    for duration in durations:
        edges.append(edges[-1] + duration)
    spans = [(first + i, edges[i], edges[i + 1]) for i in range(len(durations))]
    return step_table(Strings(), spans, phases)


def test_median_with_its_interval_over_the_steady_steps() -> None:
    times = [900 * MS, 400 * MS] + [100 * MS + i * 100_000 for i in range(20)]
    found = step_statistics(steps(times, first=5))
    assert found is not None
    assert found.warm_up == (5, 6) and found.count == 22
    assert found.low_ns <= found.median_ns <= found.high_ns <= found.p95_ns
    assert found.median_ns == 100 * MS + 950_000
    assert all(type(value) is int for value in (found.median_ns, found.low_ns, found.high_ns, found.p95_ns))


def test_outliers_are_named_and_not_dropped() -> None:
    times = [100 * MS] * 20
    times[13] = 500 * MS
    found = step_statistics(steps(times, first=100))
    assert found is not None and found.outliers == (113,) and found.count == 20


def test_the_job_takes_as_long_as_its_slowest_rank() -> None:
    fast, slow = [100 * MS] * 6, [100 * MS, 300 * MS] * 3
    found = job_step_statistics([steps(fast), steps(slow), None])
    assert found is not None and found.median_ns == 200 * MS and found.count == 6


def test_only_steps_that_all_ranks_recorded_count_for_the_job() -> None:
    found = job_step_statistics([steps([100] * 8), steps([200] * 4, first=2)])
    assert found is not None and (found.count, found.median_ns) == (4, 200)
    apart = job_step_statistics([steps([100] * 3), steps([200] * 3, first=10)])
    assert apart is not None and apart.count == 6


def test_nothing_is_said_of_no_steps_or_steps_of_no_length() -> None:
    assert step_statistics(None) is None
    assert step_statistics(steps([])) is None
    assert step_statistics(steps([0, 0])) is None
    assert job_step_statistics([None, steps([])]) is None


def test_phases_are_summed_where_they_are_known() -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7], [MISSING] * 7, [10, 20, 30, 40, 50, 60, 70]]
    assert phase_sums(steps([28, 28, 280], phases=rows)) == dict(
        zip(PHASES, (11, 22, 33, 44, 55, 66, 77), strict=True)
    )
    assert phase_sums(steps([28])) is None and phase_sums(None) is None


def test_slow_steps_that_a_roll_up_kept_are_no_sample_of_the_run() -> None:
    table = steps([900 * MS] * 5 + [100 * MS] * 20)
    sampled = sampled_steps(table, {"rolled_up": {"first": 0, "last": 4}})
    assert sampled is not None and sampled["index"].tolist() == list(range(5, 25))
    found = step_statistics(sampled)
    assert found is not None and (found.median_ns, found.warm_up) == (100 * MS, ())
    assert sampled_steps(table, {}) is table
    assert sampled_steps(table, {"rolled_up": {"first": 0, "last": 99}}) is table
    assert sampled_steps(None, {}) is None
