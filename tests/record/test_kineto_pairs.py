"""Begins and ends (``B``, ``E``) are read as the complete events (``X``) that they stand for, and about as fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trine.record.model import Table
from trine.record.readers._kineto_times import nanoseconds
from trine.record.readers.kineto import read_file

Events = list[dict[str, Any]]


def host(path: Path, events: Events) -> Table:
    path.write_text(json.dumps({"traceEvents": events}))
    table = read_file(path).host
    assert table is not None
    return table


def both_forms(spans: list[tuple[int, int, int]]) -> tuple[Events, Events]:
    """(thread, start, length), each inside or behind the one before it on its thread, lengths in eighths of 1 us."""
    marks, whole = [], []
    for number, (thread, start, length) in enumerate(spans):
        common = {"cat": "cpu_op", "name": f"op{number % 5}", "pid": 1, "tid": thread}
        whole.append({"ph": "X", "ts": start, "dur": length / 8, **common})
        marks.append((start, 1, number, {"ph": "B", "ts": start, **common}))
        marks.append((start + length / 8, 0, -number, {"ph": "E", "ts": start + length / 8, **common}))
    return [mark[-1] for mark in sorted(marks, key=lambda mark: mark[:3])], whole


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7)), min_size=1, max_size=30))
def test_pairs_are_the_spans_they_stand_for(tmp_path_factory: Any, spans: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    placed = [(thread, 1000 + 2 * number, length) for number, (thread, length) in enumerate(spans)]
    pairs, whole = (
        host(folder / f"{form}.json", events) for form, events in zip("bx", both_forms(placed), strict=True)
    )
    for column in ("start_ns", "end_ns"):
        assert sorted(pairs[column].tolist()) == sorted(whole[column].tolist())
    assert (pairs["end_ns"] - pairs["start_ns"]).sum() == sum(length for _, length in spans) * 125


def test_pairs_are_read_about_as_fast_as_whole_events(tmp_path: Path) -> None:
    """One conversion of times a chunk: with one a pair this is 85 times as long."""
    pairs, whole = both_forms([(1, 1000 + 2 * number, 7) for number in range(20_000)])
    taken = {}
    for form, events in (("x", whole), ("b", pairs)):
        path = tmp_path / f"{form}.json"
        host(path, events)
        began = time.process_time()
        read_file(path)
        taken[form] = time.process_time() - began
    assert taken["b"] < 20 * taken["x"] + 0.1


def test_a_time_of_a_megabyte_costs_itself_alone() -> None:
    texts = [b"1.5"] * 20_000 + [b"1" * (1 << 20), b"2.25000" + b"0" * 100]
    found = nanoseconds(texts)
    assert found[:20_000].tolist() == [1500] * 20_000
    assert found[-2] == np.iinfo(np.int64).min and found[-1] == 2250
