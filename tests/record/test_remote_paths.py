"""URLs: what lies behind them is fetched for as long as the job lives, and named as the user named it."""

from __future__ import annotations

import gc
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trace_builders import small, written

import trine
from trine.analyzers import analyze
from trine.cli import main
from trine.record import _expansion, _remote
from trine.record._remote import is_url
from trine.record.errors import TrineError, UnreadableInput, UsageError

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def traces(memory: Any) -> str:
    for rank in range(3):
        memory.pipe(f"/bucket/run/rank{rank}.json", json.dumps(small(rank, 3)).encode())
    return "memory://bucket/run"


def said(*arguments: Any, kind: type[TrineError] = UnreadableInput) -> str:
    with pytest.raises(kind) as caught:
        trine.load(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/key", True),
        ("gs://bucket", True),
        ("hf://datasets/owner/name", True),
        ("https://host/trace.json", True),
        ("simplecache::s3://bucket/key", True),
        ("zip://inner.json::memory://a.zip", True),
        ("/data/run", False),
        ("runs/a:b", False),
        ("C:\\traces", False),
        ("rank0.json", False),
    ],
)
def test_what_is_a_url(path: str, url: bool) -> None:
    assert is_url(path) == url


def test_a_folder(traces: str) -> None:
    job = trine.load(traces)
    assert (job.rank_ids, job.world_size, job.name, job.format) == ((0, 1, 2), 3, traces, "kineto")
    assert [rank.source for rank in job] == [f"{traces}/rank{rank}.json" for rank in range(3)]
    assert analyze(job).source.path == traces


def test_a_file_a_glob_and_several(traces: str) -> None:
    assert trine.load(f"{traces}/rank1.json").rank(1).source == f"{traces}/rank1.json"
    assert trine.load(f"{traces}/rank[01].json").rank_ids == (0, 1)
    job = trine.load([f"{traces}/rank0.json", f"{traces}/rank2.json"])
    assert job.rank_ids == (0, 2)


@pytest.mark.slow
def test_fetched_files_go_with_the_job(traces: str) -> None:
    job = trine.load(traces)
    place = job.sources[0].path
    only = job.only((1,))
    assert place.is_file()
    del job
    gc.collect()
    assert place.is_file() and only.rank(1).rank == 1
    del only
    gc.collect()
    assert not place.exists() and not place.parent.exists()


def test_nothing_is_left_when_nothing_can_be_read(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_expansion.tempfile, "tempdir", str(tmp_path))
    memory.pipe("/bucket/notes.json", b"{}")
    assert "memory://bucket" in said("memory://bucket")
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_worker_processes_read_fetched_files(traces: str) -> None:
    analysis = analyze(trine.load(traces), workers=2)
    assert [rank.summary.source for rank in analysis.ranks] == [
        f"{traces}/rank{rank}.json" for rank in range(3)
    ]


def test_errors_name_the_url(traces: str, memory: Any) -> None:
    memory.pipe("/bucket/run/rank1.json", b'{"traceEvents": [')
    job = trine.load(traces)
    source = pickle.loads(pickle.dumps(job.sources[1]))
    with pytest.raises(UnreadableInput, match=r"memory://bucket/run/rank1\.json was cut off"):
        source.read(source)
    memory.pipe("/bucket/hello.json", b"hello")
    assert "memory://bucket/hello.json" in said("memory://bucket/hello.json")


def test_what_no_reader_reads_is_not_fetched(traces: str, memory: Any) -> None:
    memory.pipe("/bucket/run/model.safetensors", b"x" * 1000)
    memory.pipe("/bucket/run/.hidden/rank9.json", json.dumps(small(9, 10)).encode())
    job = trine.load(traces)
    assert job.rank_ids == (0, 1, 2)
    assert any(note.id == "not-fetched" and "1 files" in note.message for note in job.quality)
    assert not list(job.sources[0].path.parent.glob("*.safetensors"))


def test_the_disk_is_not_filled(traces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 30

    monkeypatch.setattr(_expansion.shutil, "disk_usage", lambda _: Usage)
    text = said(traces)
    assert "TMPDIR" in text and traces in text


def test_names_do_not_lead_out_of_the_folder(memory: Any, tmp_path: Path) -> None:
    assert _remote._relative("/a/../../etc/x.json", "/a", alone=False) == Path("etc/x.json")
    assert _remote._relative("https://host/run/t.json?token=1", "x", alone=True) == Path("t.json")


# --- what can go wrong -----------------------------------------------------------------------------


def test_nothing_there(memory: Any) -> None:
    assert "does not exist" in said("memory://bucket/none")
    assert "none of a kind that is read" in said_of_weights(memory)


def said_of_weights(memory: Any) -> str:
    memory.pipe("/weights/model.safetensors", b"x")
    return said("memory://weights")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sys.modules["fsspec.registry"].known_implementations
    absent = {"class": "no_such_package.System", "err": "Install nosuchfs to access nosuch storage"}
    monkeypatch.setitem(known, "nosuch", absent)
    assert "Install nosuchfs" in said("nosuch://bucket/x", kind=UsageError)
    assert "nonsense" in said("nonsense://x", kind=UsageError)


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert main(["analyze", "s3://bucket/run"]) == 2
    message = capsys.readouterr().err
    assert "trine[remote]" in message and message.count("\n") == 1


class Denied(fsspec.AbstractFileSystem):
    """A storage that refuses, in the way that its own package says such things."""

    protocol = "denied"
    cachable = False

    def info(self, path: str, **_: Any) -> Any:
        raise NoCredentialsError("Unable to locate\ncredentials")

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        raise NoCredentialsError("Unable to locate\ncredentials")


class NoCredentialsError(Exception):
    pass


def test_credentials_that_lack_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.register_implementation("denied", Denied, clobber=True)
    assert main(["analyze", "denied://bucket/run"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert (
        "denied://bucket/run" in message and "NoCredentialsError" in message and "give credentials" in message
    )


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    written(tmp_path / "a b" / "rank0.json", small(0, 1))
    job = trine.load(f"file://{tmp_path}/a%20b")
    assert job.sources[0].path == tmp_path / "a b" / "rank0.json" and job.keep is None


def test_a_url_as_a_path_object_is_told_to_be_text(traces: str) -> None:
    assert "give it as text" in said(Path(traces))


def test_a_url_and_a_path_are_one_job(traces: str, memory: Any, tmp_path: Path) -> None:
    memory.rm("/bucket/run/rank2.json")
    written(tmp_path / "rank2.json", small(2, 3))
    job = trine.load([traces, tmp_path / "rank2.json"])
    assert job.rank_ids == (0, 1, 2) and job.missing_ranks == ()


@pytest.mark.parametrize("url", ["http://[::1", "s3://[x/y", "file://[x"])
def test_an_address_in_brackets_that_is_none(url: str) -> None:
    with pytest.raises(TrineError) as caught:
        trine.load(url)
    assert url in str(caught.value) and "\n" not in str(caught.value)
