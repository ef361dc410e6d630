"""``trine.load``: what lies at a path, in every shape that users keep traces in."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
from trace_builders import kernel, small, trace, written

import trine
from trine.record.errors import TrineError, UnreadableInput, UsageError
from trine.record.model import Job


def ids(job: Job) -> set[str]:
    return {quality.id for quality in job.quality}


def message(job: Job, id: str) -> str:
    return next(quality.message for quality in job.quality if quality.id == id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four ranks, one name style a file."""
    for rank in range(4):
        written(tmp_path / "run" / f"rank{rank}.json.gz", small(rank, 4))
    return tmp_path / "run"


# --- shapes ----------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    job = trine.load(folder)
    assert (job.rank_ids, job.world_size, job.quality) == ((0, 1, 2, 3), 4, [])
    assert [rank.rank for rank in job] == [0, 1, 2, 3]


def test_a_path_as_text_a_glob_and_a_list(folder: Path) -> None:
    pattern = str(folder / "rank[12].json.gz")
    for path in (str(folder), pattern, [folder / "rank1.json.gz", str(folder / "rank2.json.gz")], [folder]):
        job = trine.load(path)
        assert {1, 2} <= set(job.rank_ids)
    assert trine.load(pattern).missing_ranks == (0, 3)
    assert message(trine.load(pattern), "missing-ranks").startswith("2 of 4 ranks have no trace (0, 3)")


def test_folders_in_folders(tmp_path: Path) -> None:
    for rank in range(12):
        written(tmp_path / f"rank_{rank}" / "profile" / "trace.json", trace(kernel("k", 1, 1)))
    job = trine.load(tmp_path)
    assert job.rank_ids == tuple(range(12))
    assert [source.path.parts[-3] for source in job.sources] == [f"rank_{rank}" for rank in range(12)]
    assert "taken from file names" in message(job, "rank-unknown")


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.xz"])
def test_an_archive_is_read_without_extracting(folder: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"traces{suffix}"
    with tarfile.open(path, f"w:{ {'.tar': '', '.tar.xz': 'xz'}.get(suffix, 'gz') }") as archive:
        archive.add(folder, "../../outside")
        archive.addfile(tarfile.TarInfo("notes.txt"))
    before = sorted(tmp_path.rglob("*"))
    job = trine.load(path)
    assert [(rank.rank, len(rank.device or ())) for rank in job] == [(rank, 1) for rank in range(4)]
    assert sorted(tmp_path.rglob("*")) == before


def test_rank_at_the_end_of_a_large_file_and_of_a_member(tmp_path: Path) -> None:
    events = ", ".join(json.dumps(kernel(f"kernel number {index}", index, 1)) for index in range(3000))
    for rank in (5, 3):
        content = f'{{"traceEvents": [{events}], "distributedInfo": {{"rank": {rank}, "world_size": 8}}}}'
        written(tmp_path / "plain" / f"a{rank}b.json", content)
        written(tmp_path / "zipped" / f"a{rank}b.json.gz", content)
    with tarfile.open(tmp_path / "both.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain" / "a3b.json", "x.json")
        archive.add(tmp_path / "zipped" / "a5b.json.gz", "y.json.gz")
    for name in ("plain", "zipped", "both.tar.gz"):
        job = trine.load(tmp_path / name)
        assert (job.rank_ids, job.world_size) == ((3, 5), 8), name


def test_sources_travel_to_other_processes(folder: Path) -> None:
    source = pickle.loads(pickle.dumps(trine.load(folder).sources[2]))
    assert source.read(source).rank == 2


# --- whose rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank0.json", "rank1.json"], (0, 1)),
        (["trace_rank_3.json", "trace_rank_7.json"], (3, 7)),
        (["megatron_kineto_0.json.gz", "megatron_kineto_1.json.gz"], (0, 1)),
        (["worker4.pt.trace.json", "worker9.pt.trace.json"], (4, 9)),
        (["0_trace.json", "1_trace.json"], (0, 1)),
        (["node1_rank2/trace.json", "node0_rank5/trace.json"], (2, 5)),
        (
            ["host_21147.1698955063520869240.pt.trace.json", "host_21148.1698955063520869240.pt.trace.json"],
            (0, 1),
        ),
        (["b.json", "a.json"], (0, 1)),
        (["rank1/trace_0.json", "rank0/trace_0.json"], (0, 1)),
        (["rank1.json", "rank1.json.gz"], (0, 1)),  # names that do not tell them apart
    ],
)
def test_ranks_from_names(tmp_path: Path, names: list[str], ranks: tuple[int, ...]) -> None:
    for name in names:
        written(tmp_path / name, trace(kernel("k", 1, 1)))
    job = trine.load(tmp_path)
    assert job.rank_ids == ranks
    assert "rank-unknown" in ids(job)


def test_one_file_alone_is_rank_0_unless_it_says_otherwise(tmp_path: Path) -> None:
    content = trace(kernel("k", 1, 1))
    assert trine.load(written(tmp_path / "model_7.json", content)).rank_ids == (0,)
    assert trine.load(written(tmp_path / "x_rank7.json", content)).rank_ids == (7,)
    assert trine.load(written(tmp_path / "rank7.json", small(3, 4))).rank_ids == (3,)


def test_what_a_file_says_counts_more_than_its_name(tmp_path: Path) -> None:
    written(tmp_path / "rank0.json", small(1, 2))
    written(tmp_path / "rank1.json", small(0, 2))
    job = trine.load(tmp_path)
    assert [source.path.name for source in job.sources] == ["rank1.json", "rank0.json"]


def test_the_same_rank_twice(tmp_path: Path) -> None:
    larger = small(0, 2)
    larger["note"] = "x" * 100
    written(tmp_path / "a.json", larger)
    written(tmp_path / "b.json", small(0, 2))
    written(tmp_path / "c.json", small(1, 2))
    job = trine.load(tmp_path)
    assert [source.path.name for source in job.sources] == ["a.json", "c.json"]
    assert "b.json is rank 0 too; the larger file" in message(job, "duplicate-rank")


# --- mixed -----------------------------------------------------------------------------------------


def test_two_worlds_in_one_folder(tmp_path: Path) -> None:
    for rank in range(4):
        written(tmp_path / f"four_{rank}.json", small(rank, 4))
    for rank in range(2):
        written(tmp_path / f"two_{rank}.json", small(rank, 2))
    job = trine.load(tmp_path)
    assert (job.rank_ids, job.world_size) == ((0, 1, 2, 3), 4)
    assert "shown is four_0.json, four_1.json and 2 more; left out are 2: two_0.json, two_1.json" in message(
        job, "mixed-runs"
    )


def test_several_windows_of_one_run(tmp_path: Path) -> None:
    for window, at in enumerate((0.0, 5e6, 10e6)):
        for rank in range(3 if window == 1 else 2):
            written(tmp_path / f"w{window}" / f"r{rank}.json", small(rank, 3, at=1000 + at + rank))
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1, 2)
    assert {source.path.parent.name for source in job.sources} == {"w1"}
    assert "shown is w1/r0.json, w1/r1.json and 1 more; left out are 4: w0/r0.json" in message(
        job, "mixed-runs"
    )


def test_runs_of_different_days(tmp_path: Path) -> None:
    for rank in range(3):
        written(tmp_path / f"r{rank}.json", small(rank, 4, at=1000 + rank))
    written(tmp_path / "r3.json", small(3, 4, at=86400e6))
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1, 2)
    assert {"mixed-runs", "missing-ranks"} <= ids(job)


def test_other_files_beside_traces(folder: Path) -> None:
    written(folder / "config.json", {"learning_rate": 1})
    written(folder / "notes.txt", "hello")
    written(folder / "empty.json", b"")
    written(folder / ".hidden.json", small(9, 4))
    job = trine.load(folder)
    assert job.rank_ids == (0, 1, 2, 3)
    assert {"not-a-trace", "empty-file", "unread-files"} == ids(job)
    assert "notes.txt" in message(job, "unread-files")


# --- nothing to show -------------------------------------------------------------------------------


def refused(path: Any) -> str:
    with pytest.raises(UnreadableInput) as caught:
        list(trine.load(path))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_there(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.json")
    assert "no file matches" in refused(str(tmp_path / "*.json"))
    (tmp_path / "link.json").symlink_to(tmp_path / "gone")
    assert "link to something" in refused(tmp_path / "link.json")
    assert "does not exist" in refused("a\0b")
    assert "not a usable path" in refused("x" * 5000)


def test_folders_without_traces(tmp_path: Path) -> None:
    assert "it is empty" in refused(tmp_path)
    written(tmp_path / "a.txt", "x")
    assert "holds no trace" in refused(tmp_path)
    written(tmp_path / "b.json", {"x": 1})
    assert "holds no trace" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"", "is empty"),
        ("a.json", b'{"x": 1}', "is not a trace"),
        ("a.json", b"[" * 10, "not a trace"),
        ("a.json.gz", b"", "is empty"),
        ("a.txt", b"hello", "in no format that can be read"),
        ("a.pickle", pickle.dumps({"a": 1}), "a pickle of something else"),
        ("a.tar", b"no archive", "damaged"),
        ("a.tar.gz", b"\x1f\x8b no archive", "damaged"),
    ],
)
def test_files_without_traces(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    text = refused(
        written(tmp_path / name, content) if not name.endswith("tar.gz") else _raw(tmp_path / name, content)
    )
    assert says in text and name in text


def _raw(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_archive_without_traces(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    assert "holds no trace" in refused(tmp_path / "a.tar")


def test_reports_of_other_tools_are_named(tmp_path: Path) -> None:
    (tmp_path / "report1.nsys-rep").write_bytes(b"\x00\x01")
    assert "nsys export --type sqlite" in refused(tmp_path / "report1.nsys-rep")
    assert "holds an Nsight Systems report" in refused(tmp_path)
    (tmp_path / "x.speedscope.json").write_text(
        '{"$schema": "https://www.speedscope.app/file-format-schema.json"}'
    )
    (tmp_path / "report1.nsys-rep").unlink()
    assert "speedscope" in refused(tmp_path)
    (tmp_path / "x.speedscope.json").unlink()
    (tmp_path / "weights.pickle").write_bytes(pickle.dumps([1, 2]))
    assert "a pickle of something else" in refused(tmp_path / "weights.pickle")


def test_what_is_known_but_not_read_is_said_beside_traces(folder: Path) -> None:
    (folder / "report1.nsys-rep").write_bytes(b"\x00\x01")
    job = trine.load(folder)
    assert job.rank_ids == (0, 1, 2, 3)
    assert "report1.nsys-rep" in message(job, "unread-format")


def test_text_and_archives_that_need_a_step_first(tmp_path: Path) -> None:
    sound = json.dumps(small())
    assert "UTF-16" in refused(_raw(tmp_path / "a.json", sound.encode("utf-16")))
    twice = gzip.compress(gzip.compress(sound.encode()))
    assert "within a gzip file" in refused(_raw(tmp_path / "b.json.gz", twice))
    assert "zip archive" in refused(_raw(tmp_path / "c", b"PK\x03\x04rest"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe", "pipe.json"):
        os.mkfifo(tmp_path / name)
        assert "is a pipe or a device" in refused(tmp_path / name)


def test_an_archive_that_ends_early_says_what_is_used(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for rank in (0, 1):
            content = json.dumps(small(rank, 2)).encode() + os.urandom(50_000)
            info = tarfile.TarInfo(f"rank{rank}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    whole = (tmp_path / "a.tar.gz").read_bytes()
    assert "no trace comes before that" in refused(_raw(tmp_path / "b.tar.gz", whole[:100]))


def test_an_absurd_world_is_no_world(tmp_path: Path) -> None:
    """Its missing ranks alone would be a list of a gigabyte."""
    job = trine.load(written(tmp_path / "a.json", small(0, 10**12)))
    assert job.world_size is None and job.missing_ranks == ()


def test_a_file_that_cannot_be_opened(folder: Path) -> None:
    (folder / "loop.json").symlink_to(folder / "loop.json")
    job = trine.load(folder)
    assert job.rank_ids == (0, 1, 2, 3)
    assert "loop.json" in message(job, "unreadable-file")


def test_a_file_that_went_away(folder: Path) -> None:
    job = trine.load(folder)
    (folder / "rank1.json.gz").unlink()
    with pytest.raises(UnreadableInput, match="No such file"):
        job.rank(1)
    with pytest.raises(UsageError, match="no rank 9"):
        job.rank(9)


def test_no_path() -> None:
    with pytest.raises(UsageError, match="no path was given"):
        trine.load([])


def test_every_error_is_trines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "**" finds whatever runs lie in the working directory
    for strange in (tmp_path / "x", "**", "[", "~nobody/x", "/dev/null", ""):
        with pytest.raises(TrineError):
            list(trine.load(strange))
