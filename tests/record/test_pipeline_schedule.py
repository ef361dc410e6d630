"""Files of pipeline schedules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.record.errors import UnreadableInput
from trine.record.readers import pipeline_schedule
from trine.record.readers.pipeline_schedule import open_job, open_paths

ENTRY = {
    "total": 40.0,
    "fwd_start": [0.0, 10.0],
    "fwd_end": [10.0, 20.0],
    "bwd_start": [20.0, 30.0],
    "bwd_end": [30.0, 40.0],
}


def written(folder: Path, *contents: Any) -> list[Path]:
    paths = [folder / f"pp_rank_{rank}.json" for rank in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_the_real_schedule(data: Path) -> None:
    folder = data / "traces" / "pipeline_schedule" / "pp8"
    assert all(pipeline_schedule.recognizes(path) for path in folder.iterdir())
    job = open_paths(sorted(folder.iterdir()), folder)
    assert job.rank_ids == tuple(range(8)) and job.world_size == 8
    for rank in job:
        assert rank.microbatches is not None and rank.steps is not None
        assert len(rank.microbatches) == 20 * 16 * 2
        assert rank.steps["index"].tolist() == list(range(1, 21))
        assert set(rank.microbatches["stage"].tolist()) == {rank.rank}
        # Iterations follow each other on one clock, and each micro-batch lies in its own.
        place = rank.microbatches["step"] - 1
        assert (rank.microbatches["start_ns"] >= rank.steps["start_ns"][place]).all()
        assert (rank.microbatches["end_ns"] <= rank.steps["end_ns"][place]).all()
    first = job.rank(0).microbatches
    assert first is not None
    # 2746.57470703125 ms is the second forward's start as the file has it.
    assert 2_746_574_707 in first["start_ns"].tolist()


def test_times_that_run_on_are_left_where_they_are(tmp_path: Path) -> None:
    later = {key: [value + 100 for value in values] for key, values in ENTRY.items() if key != "total"}  # type: ignore[attr-defined]
    (path,) = written(tmp_path, {"1": ENTRY, "2": later})
    rank = open_job(path).rank(0)
    assert rank.steps is not None
    assert rank.steps["start_ns"].tolist() == [0, 100_000_000]
    assert rank.steps["end_ns"].tolist() == [40_000_000, 140_000_000]


def test_each_iterations_own_clock_begins_after_the_one_before(tmp_path: Path) -> None:
    job = open_paths(
        written(tmp_path, {"1": ENTRY, "2": ENTRY}, {"1": {**ENTRY, "total": 55.0}, "2": ENTRY}), tmp_path
    )
    for rank in job:
        assert rank.steps is not None
        assert rank.steps["start_ns"].tolist() == [0, 55_000_000]


def test_chunks_split_backwards_and_units(tmp_path: Path) -> None:
    entry = {
        "fwd_start": [[0, 1], [2, 3]],
        "fwd_end": [[1, 2], [3, 4]],
        "dgrad_start": [[4], [5]],
        "dgrad_end": [[5], [6]],
        "wgrad_start": [[6], [7]],
        "wgrad_end": [[7], [8]],
    }
    content = {"unit": "s", "stage": 1, "iterations": [entry]}
    other = {**content, "stage": 0}
    job = open_paths(written(tmp_path, content, other), tmp_path)
    table = job.rank(1).microbatches
    assert table is not None
    assert table["stage"].tolist() == [1, 1, 3, 3, 1, 3, 1, 3]  # chunk × 2 stages + the rank's own
    assert (
        table.text("direction").tolist() == ["forward"] * 4 + ["backward_input"] * 2 + ["backward_weight"] * 2
    )
    assert table["end_ns"].max() == 8 * 10**9


def test_odd_times_are_left_out_and_said(tmp_path: Path) -> None:
    entry = {**ENTRY, "fwd_end": [10.0, None], "bwd_end": [float("nan"), 20.0]}
    (path,) = written(tmp_path, {"1": entry})
    rank = open_job(path).rank(0)
    assert rank.microbatches is not None and len(rank.microbatches) == 1
    assert [note.id for note in rank.quality] == ["pipeline-times-odd"]


def test_damaged_files_are_read_in_part_or_refused_in_one_line(data: Path, tmp_path: Path) -> None:
    original = (data / "traces" / "pipeline_schedule" / "pp8" / "pp_rank_3.json").read_bytes()
    chance = random.Random(3)
    path = tmp_path / "pp_rank_3.json"
    seen = {True: 0, False: 0}
    for _ in range(60):
        content = bytearray(original)
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(b"0123456789-.eN]}x\x00")
        path.write_bytes(content[: chance.randrange(len(content))] if chance.random() < 0.2 else content)
        try:
            rank = open_paths([path], tmp_path).rank(3)
            assert rank.microbatches is not None
            assert np.all(rank.microbatches["end_ns"] >= rank.microbatches["start_ns"])
            seen[True] += 1
        except UnreadableInput as error:
            assert "\n" not in str(error)
            seen[False] += 1
    assert all(seen.values()), seen


@pytest.mark.parametrize("content", ["{}", "[]", '{"1": {"fwd_start": [], "fwd_end": []}}', '{"1": 3}'])
def test_files_without_an_iteration_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pp_rank_0.json"
    path.write_text(content)
    with pytest.raises(UnreadableInput, match="holds no iteration"):
        open_job(path)


@pytest.mark.parametrize("memory", [10**400, "x", None, [1]], ids=["huge", "text", "none", "list"])
def test_memory_that_is_no_amount_is_left_out(tmp_path: Path, memory: Any) -> None:
    (path,) = written(tmp_path, {"1": {**ENTRY, "memory": memory}, "2": {**ENTRY, "memory": 84.5}})
    assert open_job(path).rank(0).metadata["pipeline"]["memory_as_written"] == {2: 84.5}
