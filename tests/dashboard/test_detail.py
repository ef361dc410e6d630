"""Level of detail: nothing is lost, nothing is invented, and a million spans become a few thousand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from dashboard_samples import MILLION_LANES, MILLION_SPANS, decode, million
from hypothesis import given
from hypothesis import strategies as st

from trine.dashboard.detail import (
    MERGED,
    Lane,
    encode,
    in_range,
    make_lane,
    nesting_depth,
    pack,
    reduce_lane,
)

spans = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3_000), st.integers(0, 3)), max_size=60)


def lane_of(rows: list[tuple[int, int, int]], origin: int = 0) -> Lane:
    start = np.array([origin + row[0] for row in rows], dtype=np.int64)
    length = np.array([row[1] for row in rows], dtype=np.int64)
    kind = np.array([row[2] for row in rows], dtype=np.uint8)
    name = np.arange(len(rows), dtype=np.uint32)
    return make_lane("stream 7", "device", start, start + length, kind, name, origin)


@given(spans, st.integers(0, 12_000), st.integers(1, 8_000))
def test_without_columns_exactly_the_spans_that_touch_the_range_come(
    rows: list[tuple[int, int, int]], begin: int, length: int
) -> None:
    lane = lane_of(rows)
    shown = reduce_lane(lane, begin, begin + length, None)
    wanted = sorted(
        i for i, (start, size, _) in enumerate(rows) if start <= begin + length and start + size >= begin
    )
    assert sorted(shown.name.tolist()) == wanted
    assert shown.merged == 0 and set(shown.fill.tolist()) <= {255}


@given(spans, st.integers(1, 200))
def test_merging_keeps_long_spans_and_counts_every_short_one(
    rows: list[tuple[int, int, int]], columns: int
) -> None:
    lane = lane_of(rows)
    width = 13_000 / columns
    shown = reduce_lane(lane, 0, 13_000, columns)
    own = shown.name != MERGED
    assert sorted(shown.name[own].tolist()) == sorted(i for i, row in enumerate(rows) if row[1] >= width)
    assert shown.merged == sum(row[1] < width for row in rows)
    assert (np.diff(shown.start) >= 0).all()
    assert len(shown.start) <= own.sum() + columns


@given(spans, st.integers(1, 200))
def test_a_cell_is_as_full_as_its_short_spans(rows: list[tuple[int, int, int]], columns: int) -> None:
    lane = lane_of(rows)
    width = 13_000 / columns
    shown = reduce_lane(lane, 0, 13_000, columns)
    for start, fill, kind in zip(
        shown.start[shown.fill < 255], shown.fill[shown.fill < 255], shown.kind[shown.fill < 255], strict=True
    ):
        column = round(start / width)
        inside = [row for row in rows if row[1] < width and min(int(row[0] / width), columns - 1) == column]
        busy = sum(row[1] for row in inside)
        assert fill == pytest.approx(np.clip(busy / width, 0, 1) * 254, abs=1.01)
        by_kind = [sum(row[1] for row in inside if row[2] == k) for k in range(4)]
        assert by_kind[int(kind)] == max(by_kind)


@given(spans, st.integers(0, 12_000), st.integers(0, 4_000))
def test_a_span_that_began_long_before_is_found(
    rows: list[tuple[int, int, int]], begin: int, length: int
) -> None:
    lane = lane_of(rows)
    found = in_range(lane, begin, begin + length)
    inside = set(range(found.start, found.stop))
    for row in range(len(lane)):
        if lane.start[row] <= begin + length and lane.end[row] >= begin:
            assert row in inside


def test_unix_times_keep_their_last_nanosecond() -> None:
    origin = 1_700_000_000_123_456_789
    lane = lane_of([(0, 3, 0), (7, 1, 0), (11, 2, 0)], origin)
    assert lane.start.tolist() == [0.0, 7.0, 11.0] and lane.end.tolist() == [3.0, 8.0, 13.0]


@given(st.data())
def test_depth_counts_ancestors(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    parent = np.array([data.draw(st.integers(-1, row - 1)) for row in range(count)], dtype=np.int64)
    depth = nesting_depth(parent)
    for row in range(count):
        steps, at = 0, int(parent[row])
        while at >= 0:
            steps, at = steps + 1, int(parent[at])
        assert depth[row] == steps


def test_a_cycle_of_parents_ends() -> None:
    assert nesting_depth(np.array([1, 0, -1], dtype=np.int64)).tolist() == [0, 0, 0]


def test_answers_are_read_as_they_were_written() -> None:
    lanes = [lane_of([(5, 10, 1), (0, 2, 0)]), lane_of([]), lane_of([(3, 1, 2)])]
    parts = [(lane, reduce_lane(lane, 0, 100, None)) for lane in lanes]
    head, columns = decode(encode(parts, ["alpha <b>", "beta", "gamma"], {"rank": 3}, shift_ns=1000.0))
    assert head["rank"] == 3 and [lane["count"] for lane in head["lanes"]] == [2, 0, 1]
    assert columns["start"].tolist() == [1000.0, 1005.0, 1003.0]
    assert columns["duration"].tolist() == [2.0, 10.0, 1.0]
    assert [head["names"][code] for code in columns["name"]] == ["beta", "alpha <b>", "alpha <b>"]
    assert head["names"] == ["alpha <b>", "beta"]  # unused names stay at home


def test_merged_cells_need_no_name() -> None:
    lane = lane_of([(at, 1, 0) for at in range(0, 1000, 2)])
    head, columns = decode(encode([(lane, reduce_lane(lane, 0, 1000, 10))], ["x"] * 500, {}, 0.0))
    assert head["merged"] == 500 and head["names"] == []
    assert columns["name"].tolist() == [MERGED] * 10
    assert columns["fill"].tolist() == pytest.approx([127] * 10, abs=1)


def test_a_million_spans_become_what_a_screen_can_show() -> None:
    lanes = million()
    assert lanes.spans == MILLION_LANES * MILLION_SPANS > 1_000_000
    began = time.perf_counter()
    parts = [(lane, reduce_lane(lane, lanes.begin, lanes.end, 3000)) for lane in lanes.lanes]
    answer = encode(parts, lanes.names, {}, 0.0)
    passed = time.perf_counter() - began
    kept = sum(len(spans.start) for _, spans in parts)
    assert 3000 < kept <= 2 * 3000 * MILLION_LANES
    assert len(answer) < 4_000_000
    # Busy time survives: cells and spans together fill what the kernels fill.
    for lane, spans in parts:
        shown = float((spans.duration * np.where(spans.fill == 255, 1, spans.fill / 254)).sum())
        assert shown == pytest.approx(float((lane.end - lane.start).sum()), rel=0.02)
    # Measured 0.1 s on an idle core; the bound only catches a loop over spans.
    assert passed < 5.0


def test_a_narrow_range_of_a_million_is_exact() -> None:
    lane = million().lanes[0]
    middle = float(lane.start[MILLION_SPANS // 2])
    shown = reduce_lane(lane, middle, middle + 10_000, 3000)
    own = shown.name != MERGED
    assert own.any() and (shown.duration[own] >= 10_000 / 3000).all()
    row = int(np.searchsorted(lane.start, middle))
    assert lane.start[row] in shown.start


@given(spans)
def test_packed_rows_do_not_overlap(rows: list[tuple[int, int, int]]) -> None:
    start = np.array([row[0] for row in rows], dtype=np.int64)
    end = start + np.array([row[1] for row in rows], dtype=np.int64)
    packed = pack(start, end, most=100)
    for level in set(packed.tolist()):
        here = np.flatnonzero(packed == level)
        ordered = here[np.argsort(start[here], kind="stable")]
        assert (start[ordered][1:] >= np.maximum.accumulate(end[ordered])[:-1]).all()
    assert pack(start, end, most=2).max(initial=0) <= 1
