"""Files that no reader takes: named where they lie beside traces, told one by one where nothing else is there."""

from __future__ import annotations

import gzip
import json
import pickle
import tarfile
from pathlib import Path

import pytest

import trine
from trine.record.errors import UnreadableInput
from trine.record.model import Job

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}


def trace(path: Path) -> Path:
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [EVENT]}))
    return path


def unread(job: Job) -> list[str]:
    return [note.message for note in job.quality if note.id == "unread-files"]


def refused(*paths: Path) -> str:
    with pytest.raises(UnreadableInput) as caught:
        list(trine.load(list(paths) if len(paths) > 1 else paths[0]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- beside traces -------------------------------------------------------------------------------


def test_a_file_of_no_known_kind_is_named_with_its_folder(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "notes.txt").write_text("slow since Tuesday")
    job = trine.load(tmp_path)
    assert unread(job) == [f"deep/notes.txt in {tmp_path} is in no format that is read, and was left out"]
    assert next(note.severity for note in job.quality if note.id == "unread-files") == "info"


def test_many_are_one_note_with_the_first_five(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    for number in range(8):
        (tmp_path / f"part{number}.dat").write_text("x")
    (said,) = unread(trine.load(tmp_path))
    assert (
        said.startswith("8 files in ")
        and "part0.dat, part1.dat" in said
        and said.endswith("part4.dat and 3 more")
    )
    assert "part5.dat" not in said


@pytest.mark.parametrize(
    "name", ["README", "README.txt", "LICENSE", "a.md", "train.log", "train.py", "c.yaml", ".hidden"]
)
def test_what_people_keep_beside_traces_is_not_told(tmp_path: Path, name: str) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / name).write_text("x")
    assert unread(trine.load(tmp_path)) == []


def test_what_the_user_names_is_told_whatever_it_is(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("x")
    (said,) = unread(trine.load([trace(tmp_path / "rank0.json"), log]))
    assert "train.log" in said


# --- nothing else there --------------------------------------------------------------------------


def test_every_file_that_was_given_is_told_with_what_it_is(tmp_path: Path) -> None:
    empty, settings = tmp_path / "nothing.json", tmp_path / "config.json"
    empty.write_bytes(b"")
    settings.write_text('{"lr": 0.1}')
    said = refused(empty, settings)
    assert f"{empty} is empty" in said and f"{settings} has no traceEvents in it" in said
    assert f"{tmp_path} holds no trace" not in said, "the folder was not given"
    folder = refused(tmp_path)
    assert folder.startswith(f"{tmp_path} holds no trace (") and "config.json has no traceEvents" in folder


def test_of_many_files_the_first_are_told(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(9)]
    for file in files:
        file.write_text("{}")
    said = refused(*files)
    assert "3.json" in said and "4.json" not in said and "and more" in said


def test_files_of_no_format_at_all_are_each_told(tmp_path: Path) -> None:
    text, empty = tmp_path / "notes.txt", tmp_path / "void.bin"
    text.write_text("hello")
    empty.write_bytes(b"")
    said = refused(text, empty)
    assert f"{text} is in no known format" in said and f"{empty} is empty" in said and "kineto" in said


def test_a_compressed_trace_that_is_cut_before_its_events_is_said_to_end_early(tmp_path: Path) -> None:
    head = ",".join(str(number * 7919 % 100_003) for number in range(60_000))
    packed = gzip.compress(f'{{"more": [{head}], "traceEvents": [{json.dumps(EVENT)}]}}'.encode())
    cut, other = tmp_path / "cut.json.gz", tmp_path / "other.json.gz"
    cut.write_bytes(packed[: len(packed) // 3])
    other.write_bytes(gzip.compress(b'{"lr": 0.1}'))
    assert "ends early" in refused(cut) and "copy it again" in refused(cut)
    # A whole file that is no trace is not damaged.
    assert "ends early" not in refused(other) and "not a trace" in refused(other)
    both = refused(cut, other)
    assert f"{cut} ends early" in both and f"{other} has no traceEvents" in both


# --- archives ------------------------------------------------------------------------------------


def test_members_of_an_archive_are_called_by_it_and_not_by_where_they_were_unpacked(tmp_path: Path) -> None:
    snapshot = tmp_path / "rank0.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": "nonsense"}))
    archive = tmp_path / "job.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(trace(tmp_path / "rank0.json"), "t/rank0.json")
        packed.add(snapshot, "t/rank0.pickle")
    job = trine.load(archive)
    rank = job.rank(0)
    said = [note.message for note in (*job.quality, *rank.quality)] + [
        rank.source,
        *(one.name for one in job.sources),
    ]
    assert any(f"{archive}:t/rank0.pickle" in one for one in said), said
    assert not any("trine-" in one.replace(str(archive), "") for one in said), said


def test_a_refusal_of_a_member_names_the_archive(tmp_path: Path) -> None:
    broken = tmp_path / "rank0.pickle"
    broken.write_bytes(pickle.dumps({"segments": [], "device_traces": []})[:-8])
    archive = tmp_path / "job.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(broken, "rank0.pickle")
    said = refused(archive)
    assert str(archive) in said and "trine-" not in said
