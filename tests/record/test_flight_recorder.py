"""Dumps of the flight recorder: what is read of them, and what is said where they are odd."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flight_dumps import Dump

from trine.record.errors import UnreadableInput
from trine.record.model import MISSING
from trine.record.readers import _flight_dumps, flight_recorder
from trine.record.readers.flight_recorder import open_job, open_paths


@pytest.mark.parametrize("name", ["gloo_desync", "gloo_plain"])
def test_pickle_and_json_of_one_rank_say_the_same_but_for_stacks(data: Path, name: str) -> None:
    folder = data / "traces" / "flight_recorder" / name
    pickles = open_paths(sorted(folder.glob("comm_*")), folder)
    texts = open_paths(sorted(folder.glob("*.json")), folder)
    assert pickles.rank_ids == texts.rank_ids == (0, 1, 2, 3)
    assert pickles.world_size == texts.world_size == 4
    for first, second in zip(pickles, texts, strict=True):
        assert first.flight_recorder is not None and second.flight_recorder is not None
        assert len(first.flight_recorder) > 20
        for column in ("sequence", "record", "created_ns", "started_ns", "is_peer"):
            assert np.array_equal(first.flight_recorder[column], second.flight_recorder[column])
        for column in ("operation", "in_shapes", "out_types", "group"):
            assert list(first.flight_recorder.text(column)) == list(second.flight_recorder.text(column))
        assert all(first.flight_recorder.text("stack")) and not any(second.flight_recorder.text("stack"))
        assert (first.flight_recorder["completed_ns"] == MISSING).all()


def test_a_rank_with_both_is_read_once_and_it_is_said(data: Path) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_desync"
    job = open_paths(sorted(folder.iterdir()), folder)
    assert [source.path.name for source in job.sources] == [
        f"comm_lib_trace_rank_{rank}" for rank in range(4)
    ]
    assert [note.id for note in job.quality] == ["flight-recorder-several-dumps"]


def test_dumps_of_two_runs_are_not_one_job(data: Path) -> None:
    """The sound run of one folder must not speak for the hung one of the other."""
    folder = data / "traces" / "flight_recorder"
    job = open_paths(sorted(folder.glob("*/*")), folder)
    assert {source.path.parent.name for source in job.sources} == {"gloo_desync"}
    note = next(note for note in job.quality if note.id == "mixed-runs")
    assert note.severity == "warning" and "left out is gloo_plain" in note.message


@pytest.mark.parametrize("apart", ["by rank", "by format"])
def test_folders_by_rank_or_by_format_are_one_run(data: Path, tmp_path: Path, apart: str) -> None:
    for path in (data / "traces" / "flight_recorder" / "gloo_desync").iterdir():
        name = path.stem.rpartition("_")[2] if apart == "by rank" else path.suffix or "pickle"
        (tmp_path / f"of_{name}").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / f"of_{name}")
    job = open_paths(sorted(tmp_path.glob("*/*")), tmp_path)
    assert job.rank_ids == (0, 1, 2, 3)
    assert "mixed-runs" not in {note.id for note in job.quality}
    assert all(source.path.name.startswith("comm_lib") for source in job.sources)


def test_status_and_groups_come_under_the_groups_name(tmp_path: Path) -> None:
    """NCCL numbers its status by the process's own count of groups, which is no name."""
    dump = Dump(2, 4, groups={"hash": ("tp", [2, 3])}).calls(3)
    dump.call("all_gather", group="hash", state="scheduled")
    rank = open_job(dump.write(tmp_path)).rank(2)
    assert rank.metadata["flight_status"] == {
        "0": {"last_enqueued": 3, "last_started": 3, "last_completed": 3},
        "hash": {"last_enqueued": 1, "last_started": None, "last_completed": None},
    }
    assert {group.id: (group.description, group.ranks) for group in rank.groups} == {
        "0": ("default_pg", (0, 1, 2, 3)),
        "hash": ("tp", (2, 3)),
    }
    assert rank.world_size == 4
    table = rank.flight_recorder
    assert table is not None
    assert list(table.text("state")) == ["completed"] * 3 + ["scheduled"]
    assert (
        table.text("stack")[0]
        == "/v/site-packages/torch/distributed/c10d.py(1): all_reduce;/job/me/train.py(10): train"
    )
    assert table["timeout_ns"][0] == 600 * 10**9


def test_a_retired_entry_of_nccl_is_not_thereby_completed(tmp_path: Path) -> None:
    """Its watchdog retires what failed as well; gloo retires only what is done, and never sets the state."""
    for backend, expected in (("nccl", "started"), ("gloo", "completed")):
        dump = Dump(0, 1, backend=backend).calls(1).call("barrier", state="started")
        dump.entries[-1]["retired"] = True
        table = open_job(dump.write(tmp_path)).rank(0).flight_recorder
        assert table is not None and table.text("state")[-1] == expected


def test_a_ring_that_overflowed_and_is_unsorted(tmp_path: Path) -> None:
    dump = Dump(0, 1).calls(9)
    del dump.entries[:4]
    random.Random(1).shuffle(dump.entries)
    rank = open_job(dump.write(tmp_path)).rank(0)
    assert rank.flight_recorder is not None
    assert rank.flight_recorder["record"].tolist() == [4, 5, 6, 7, 8]
    (note,) = (note for note in rank.quality if note.id == "flight-recorder-overflow")
    assert "4 older entries are lost and 5 remain" in note.message


def test_a_dump_without_a_rank_in_its_name_tells_it_by_its_messages(tmp_path: Path) -> None:
    dump = Dump(3, 4).calls(1).call("send 3->0", peer=True)
    path = dump.write(tmp_path).rename(tmp_path / "dump")
    assert open_job(path).rank_ids == (3,)


def test_a_cut_json_keeps_its_complete_entries(tmp_path: Path) -> None:
    path = Dump(0, 1).calls(8).write_json(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    rank = open_job(path).rank(0)
    assert rank.flight_recorder is not None and 2 < len(rank.flight_recorder) < 8
    assert {note.id for note in rank.quality} >= {"flight-recorder-cut-off"}


def test_gzip_and_strange_elements(tmp_path: Path) -> None:
    content = Dump(0, 1).calls(3).content()
    content["entries"] += [None, 7, "x"]
    path = tmp_path / "fr_rank_0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert flight_recorder.recognizes(path)
    rank = open_job(path).rank(0)
    assert rank.flight_recorder is not None and len(rank.flight_recorder) == 3
    (note,) = (note for note in rank.quality if note.id == "flight-recorder-strange")
    assert note.message.startswith("3 elements")


def test_an_empty_dump_is_a_rank_that_could_not_write(tmp_path: Path) -> None:
    path = tmp_path / "comm_lib_trace_rank_3"
    path.touch()
    assert flight_recorder.recognizes(path)
    with pytest.raises(UnreadableInput, match="is empty: the rank was stopped"):
        open_job(path).rank(3)
    other = tmp_path / "notes"
    other.touch()
    assert not flight_recorder.recognizes(other)
    job = open_paths([Dump(0, 4).calls(1).write(tmp_path), path], tmp_path)
    assert job.rank_ids == (0, 3)


def test_a_large_pickle_is_read_piece_by_piece_to_the_same_table(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_plain"
    paths = sorted(folder.glob("comm_*"))
    whole = list(open_paths(paths, folder))
    monkeypatch.setattr(_flight_dumps, "_LARGE_BYTES", 0)
    for one, other in zip(whole, open_paths(paths, folder), strict=True):
        assert one.flight_recorder is not None and other.flight_recorder is not None
        assert one.groups == other.groups and one.metadata == other.metadata
        assert one.flight_recorder.to_pandas().equals(other.flight_recorder.to_pandas())


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch gotcha",)


def test_no_code_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({**Dump(0, 1).calls(2).content(), "version": Evil()}))
    with pytest.raises(UnreadableInput, match=r"system"):
        open_job(path).rank(0)
    assert not (tmp_path / "gotcha").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1, 2]", b'{"traceEvents": []}', b"\x80\x04N.", b"\xff" * 99]
)
def test_strangers_are_not_taken_for_dumps(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fr_rank_0.json"
    path.write_bytes(content)
    assert not flight_recorder.recognizes(path)


@pytest.mark.parametrize("name", ["comm_lib_trace_rank_1", "fr_rank_1.json"])
def test_damaged_dumps_are_read_in_part_or_refused_in_one_line(data: Path, tmp_path: Path, name: str) -> None:
    original = (data / "traces" / "flight_recorder" / "gloo_desync" / name).read_bytes()
    chance = random.Random(7)
    path = tmp_path / name
    read = refused = 0
    for _ in range(150):
        content = bytearray(original)
        for _ in range(chance.randrange(1, 12)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randrange(len(content))] if chance.random() < 0.3 else content)
        try:
            open_paths([path], tmp_path).rank(1)
            read += 1
        except UnreadableInput as error:
            assert "\n" not in str(error) and str(path) in str(error)
            refused += 1
    assert read and refused


def _within(depth: int, kind: type) -> Any:
    value: Any = kind([1])
    for _ in range(depth):
        value = kind([value, value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "place", ["frames", "input_sizes", "input_dtypes", "process_group", "profiling_name", "state"]
)
def test_a_list_named_over_and_over_is_refused_at_once(tmp_path: Path, place: str, kind: type) -> None:
    content = Dump(0, 1).calls(3).content()
    content["entries"][1][place] = _within(60, kind)
    path = tmp_path / "comm_lib_trace_rank_0"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UnreadableInput, match="over and over"):
        open_job(path).rank(0)


def test_a_list_within_itself_is_refused(tmp_path: Path) -> None:
    content = Dump(0, 1).calls(3).content()
    content["entries"].append(content["entries"])
    path = tmp_path / "comm_lib_trace_rank_0"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UnreadableInput, match="over and over"):
        open_job(path).rank(0)


def test_the_control_frames_that_stacks_share_are_read(tmp_path: Path) -> None:
    content = Dump(0, 1).calls(300).content()
    frame = {"filename": "/a/long/path/of/a/module/train.py", "line": 7, "name": "step"}
    for entry in content["entries"]:
        entry["frames"] = [frame] * 60
    path = tmp_path / "comm_lib_trace_rank_0"
    path.write_bytes(pickle.dumps(content))
    rank = open_job(path).rank(0)
    assert rank.flight_recorder is not None and len(rank.flight_recorder) == 300
