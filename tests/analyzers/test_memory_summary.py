from __future__ import annotations

from typing import Any

import numpy as np
from analysis_tables import rank_of
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.memory import summarize_memory
from trine.record.model import MISSING, DeviceInfo, Rank, Strings, Table

GIB = 2**30


def events(strings: Strings, rows: list[dict[str, Any]]) -> Table:
    columns: dict[str, Any] = {
        name: [row.get(name, MISSING) for row in rows]
        for name in ("time_ns", "bytes", "device", "allocated_bytes", "reserved_bytes")
    }
    columns["category"] = [strings.code(row.get("category")) for row in rows]
    return Table("memory", columns, strings)


def samples(strings: Strings, **metrics: list[tuple[int, float]]) -> Table:
    rows = [(time, f"memory/{name}", value) for name, series in metrics.items() for time, value in series]
    return Table(
        "samples",
        {
            "time_ns": [row[0] for row in rows],
            "metric": [strings.code(row[1]) for row in rows],
            "value": [row[2] for row in rows],
        },
        strings,
    )


def with_memory(rows: list[dict[str, Any]], **others: Any) -> Rank:
    rank = rank_of(**others)
    rank.memory = events(rank.strings, rows)
    return rank


def test_running_totals_give_the_peak_and_what_was_reserved() -> None:
    rows = [
        {"time_ns": 10, "bytes": 100, "device": 0, "allocated_bytes": 1100, "reserved_bytes": 2000},
        {"time_ns": 20, "bytes": 500, "device": 0, "allocated_bytes": 1600, "reserved_bytes": 2500},
        {"time_ns": 30, "bytes": -600, "device": 0, "allocated_bytes": 1000, "reserved_bytes": 2600},
        {"time_ns": 15, "bytes": 9999, "device": -1, "allocated_bytes": 99999},
    ]
    memory = summarize_memory(with_memory(rows, devices=(DeviceInfo(0, "GPU", 16 * GIB),)))
    assert memory is not None
    assert (memory.peak_bytes, memory.reserved_peak_bytes, memory.kind) == (1600, 2600, "device")
    assert (memory.capacity_bytes, memory.lower_bound) == (16 * GIB, False)
    assert memory.at_peak == {"unattributed": 1600, "reserved_but_free": 900}
    assert memory.series == ((10, 1100, 2000), (20, 1600, 2500), (30, 1000, 2600))


def test_without_totals_the_peak_is_a_lower_bound() -> None:
    """What is released without having been allocated was there before."""
    rows = [{"time_ns": t, "bytes": size, "device": 0} for t, size in enumerate((-50, 100, 200, -100, -200))]
    memory = summarize_memory(with_memory(rows))
    assert memory is not None
    assert (memory.peak_bytes, memory.lower_bound, memory.reserved_peak_bytes) == (300, True, None)


def test_categories_are_what_was_alive_at_the_peak() -> None:
    rows = [
        {"time_ns": 1, "bytes": 400, "device": 0, "allocated_bytes": 1000, "category": "parameters"},
        {"time_ns": 2, "bytes": 300, "device": 0, "allocated_bytes": 1300, "category": "activations"},
        {"time_ns": 3, "bytes": -300, "device": 0, "allocated_bytes": 1000, "category": "activations"},
    ]
    memory = summarize_memory(with_memory(rows))
    assert memory is not None
    assert memory.at_peak == {"parameters": 400, "activations": 300, "unattributed": 600}


def test_only_the_asked_times_count() -> None:
    rows = [
        {"time_ns": t, "bytes": 1, "device": 0, "allocated_bytes": size}
        for t, size in ((10, 900), (20, 300), (30, 500))
    ]
    rank = with_memory(rows)
    inside = summarize_memory(rank, 15, 40)
    assert inside is not None and inside.peak_bytes == 500 and len(inside.series) == 2
    assert summarize_memory(rank, 40, 50) is None


def test_a_records_samples_give_host_memory_and_say_what_the_model_holds() -> None:
    rank = rank_of(
        format="trine",
        metadata={"model": {"parameter_bytes": 100, "gradient_bytes": None, "optimizer_bytes": 200}},
    )
    rank.samples = samples(
        rank.strings, resident_bytes=[(1, 900.0), (2, 1000.0)], resident_peak_bytes=[(2, 1200.0)]
    )
    memory = summarize_memory(rank)
    assert memory is not None
    assert (memory.kind, memory.peak_bytes, memory.lower_bound, memory.retries) == ("host", 1200, False, None)
    assert memory.at_peak == {"parameters": 100, "optimizer_state": 200, "unattributed": 900}
    assert memory.series == ((1, 900, None), (2, 1000, None))


def test_a_records_samples_of_a_device() -> None:
    rank = rank_of(format="trine", metadata={"device": {"memory_bytes": 5000}})
    rank.samples = samples(
        rank.strings,
        allocated_bytes=[(1, 700.0), (2, 600.0)],
        reserved_bytes=[(1, 900.0), (2, 1000.0)],
        resident_bytes=[(1, 10**9)],
        allocator_retries=[(1, 0.0), (2, 3.0)],
        peak_bytes=[(1, 750.0), (2, float("nan"))],
    )
    memory = summarize_memory(rank)
    assert memory is not None
    assert (memory.kind, memory.peak_bytes, memory.reserved_peak_bytes) == ("device", 750, 1000)
    assert (memory.retries, memory.capacity_bytes) == (3, 5000)
    assert memory.at_peak == {"unattributed": 750, "reserved_but_free": 250}
    assert memory.series[0] == (1, 700, 900)


def test_parts_that_exceed_the_peak_are_not_believed() -> None:
    rank = rank_of(format="trine", metadata={"model": {"parameter_bytes": 5000}})
    rank.samples = samples(rank.strings, resident_bytes=[(1, 900.0)])
    memory = summarize_memory(rank)
    assert memory is not None and memory.at_peak == {"unattributed": 900} and memory.lower_bound


def test_without_any_source_there_is_none() -> None:
    assert summarize_memory(rank_of()) is None
    rank = rank_of()
    rank.samples = samples(rank.strings, other=[(1, 5.0)])
    assert summarize_memory(rank) is None


@given(st.integers(0, 9000), st.integers(0, 2**31))
def test_a_thinned_curve_keeps_its_peak_and_its_order(count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    total = generator.integers(0, 10**12, count)
    rows = [
        {"time_ns": i, "bytes": 1, "device": 0, "allocated_bytes": int(size)} for i, size in enumerate(total)
    ]
    memory = summarize_memory(with_memory(rows))
    if not count:
        assert memory is None
        return
    assert memory is not None
    assert len(memory.series) <= 2000
    assert max(point[1] for point in memory.series) == memory.peak_bytes == total.max()
    times = [point[0] for point in memory.series]
    assert times == sorted(set(times))
