"""Memory timelines of ``export_memory_timeline``: the raw form, sums by category, and the picture that is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.errors import UnreadableInput
from trine.record.model import Rank, Table
from trine.record.readers import memory_timeline

NS = 1_700_000_000_000_000_000
RAW = [
    [-1, 1, 1000, 0],  # a parameter that was there before
    [NS, 2, 500, 4],
    [NS + 5000, 3, -500, 4],  # the same tensor, changed: it becomes a gradient
    [NS + 5000, 3, 500, 5],
    [NS + 9000, 4, -500, 5],
]


def sizes_of(raw: list[list[int]]) -> list[Any]:
    """What ``export_memory_timeline("it.json")`` writes for the same events (torch/profiler/_memory_profiler.py)."""
    times: list[int] = []
    sizes: list[list[int]] = []
    for when, _, amount, category in raw:
        us = when if when == -1 else when // 1000
        if not times or us != times[-1]:
            times.append(us)
            sizes.append(list(sizes[-1]) if sizes else [0] * 9)
        sizes[-1][category + 1] += amount
    first = min(us for us in times if us > 0)
    return [[first if us < 0 else us for us in times], sizes]


def read(path: Path) -> Rank:
    assert memory_timeline.recognizes(path)
    return memory_timeline.open_job(path).rank(0)


def memory(rank: Rank) -> Table:
    assert rank.memory is not None
    return rank.memory


def write(path: Path, form: Any) -> Path:
    text = json.dumps(form).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["it.raw.json", "it.raw.json.gz"])
def test_raw_events(tmp_path: Path, name: str) -> None:
    table = memory(read(write(tmp_path / name, RAW)))
    assert table["allocated_bytes"].tolist() == [1000, 1500, 1000, 1500, 1000]
    assert table["time_ns"].tolist() == [NS, NS, NS + 5000, NS + 5000, NS + 9000]
    assert table.text("category").tolist() == [
        "parameters",
        "activations",
        "activations",
        "gradients",
        "gradients",
    ]
    assert table.text("action").tolist() == ["held", "alloc", "free_requested", "alloc", "free_requested"]


@pytest.mark.parametrize("name", ["it.json", "it.json.gz"])
def test_sums_by_category_give_the_same_curve(tmp_path: Path, name: str) -> None:
    table = memory(read(write(tmp_path / name, sizes_of(RAW))))
    by_time = {}
    for when, total in zip(table["time_ns"].tolist(), table["allocated_bytes"].tolist(), strict=True):
        by_time[when - NS] = total
    assert by_time == {0: 1500, 5000: 1500, 9000: 1000}
    assert table["allocated_bytes"].max() == 1500


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 1 << 30), st.integers(0, 7), st.integers(1, 60)),
        min_size=1,
        max_size=40,
    )
)
def test_both_forms_agree_on_any_history(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[int, int, int, int]]
) -> None:
    rows = [[NS + 1000 * start, 2, amount, category] for start, amount, category, _ in tensors]
    rows += [[NS + 1000 * (start + life), 4, -amount, category] for start, amount, category, life in tensors]
    rows.sort(key=lambda row: row[0])
    folder = tmp_path_factory.mktemp("both")
    raw = memory(read(write(folder / "raw.json", rows)))
    sums = memory(read(write(folder / "sums.json", sizes_of(rows))))
    for when in np.unique(sums["time_ns"]):
        last = [table["allocated_bytes"][table["time_ns"] <= when][-1] for table in (raw, sums)]
        assert last[0] == last[1]


@pytest.mark.parametrize("form", [list, sizes_of])
@pytest.mark.parametrize(("grain", "device"), [(512, 0), (4, -1)])
def test_a_timeline_of_the_host_is_known_by_its_sizes(
    tmp_path: Path, form: Any, grain: int, device: int
) -> None:
    """A device's allocator rounds up all that is allocated; tensors from before are counted as they are."""
    rows = [[-1, 1, 1004, 0]]
    for number in range(20):
        rows += [
            [NS + 20000 * number, 2, (number + 1) * grain, 4],
            [NS + 20000 * number + 9000, 4, -(number + 1) * grain, 4],
        ]
    rank = read(write(tmp_path / "it.json", form(rows)))
    assert set(memory(rank)["device"].tolist()) == {device}
    note = next(note for note in rank.quality if note.id == "memory-tensors-only")
    assert ("the host" in note.message) == (device < 0)


def test_a_cut_file_gives_its_complete_rows(tmp_path: Path) -> None:
    path = tmp_path / "it.raw.json"
    path.write_text(json.dumps(RAW)[:-8])
    rank = read(path)
    assert len(memory(rank)) == 4
    assert "truncated" in {note.id for note in rank.quality}


def test_the_picture_is_refused_with_what_to_export(tmp_path: Path) -> None:
    path = tmp_path / "it.html"
    path.write_text(
        '<html>\n<head><meta charset="utf-8" /><title>GPU Memory Timeline HTML</title></head>\n<body>'
    )
    assert memory_timeline.recognizes(path)
    with pytest.raises(UnreadableInput, match=r"raw\.json\.gz"):
        memory_timeline.open_job(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "[[]]", "[1, 2]", '{"a": 1}', '[{"ph": "X"}]', "[[1, 2], [3, 4]]", "\x80\x04"]
)
def test_strangers_are_not_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    assert not memory_timeline.recognizes(path)
    assert not memory_timeline.recognizes(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '[[-1, 1, 5, 0], [2, "x", 5, 0]]',
        "[[-1, 1, 5, 0], [2, 1, 5]]",
        "[[-1, 1, 5, 0], [2, 1, 5, --3]]",
        "[[1700000000], [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0]]]",
    ],
)
def test_what_begins_as_a_timeline_and_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(UnreadableInput, match="no whole memory timeline"):
        read(path)


def test_a_real_timeline(data: Path) -> None:
    rank = read(data / "traces" / "memory_snapshot" / "memory_timeline.raw.gz")
    table = memory(rank)
    rows = json.loads(gzip.decompress(Path(rank.source).read_bytes()))
    assert len(table) == len(rows)
    assert int(table["allocated_bytes"][-1]) == sum(row[2] for row in rows)
    assert int(table["allocated_bytes"].max()) / 2**30 == pytest.approx(2.871, abs=0.001)
