"""Zip archives, as artifacts of a build server come: read like tar archives, without trusting what they say."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import stat
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_builders import small, written

import trine
from trine.record.errors import TrineError, UnreadableInput
from trine.record.model import Job
from trine.record.readers import _archives


def zipped(
    path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, folder: bool = False
) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        if folder:
            archive.writestr("traces/", b"")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def traces(world: int = 3) -> dict[str, bytes]:
    found = {}
    for rank in range(world):
        plain = json.dumps(small(rank, world)).encode()
        packed = rank % 2 == 0
        found[f"traces/rank{rank}.json{'.gz' if packed else ''}"] = gzip.compress(plain) if packed else plain
    return found


def refused(path: Path) -> str:
    with pytest.raises(UnreadableInput) as error:
        trine.load(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    return text


def said(job: Job, id: str) -> str:
    return next(note.message for note in job.quality if note.id == id)


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_traces_are_read_without_extracting(tmp_path: Path, method: int) -> None:
    path = zipped(tmp_path / "Artifact.ZIP", traces(), method, folder=True)
    job = trine.load(path)
    assert job.rank_ids == (0, 1, 2) and job.world_size == 3
    assert [len(rank.device or ()) for rank in job] == [1, 1, 1]
    source = pickle.loads(pickle.dumps(job.sources[1]))
    assert source.read(source).rank == 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_lies_beside_traces_in_it_is_read_too_and_stays_below_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    raw = json.dumps([[1_700_000_000 * 10**9, 2, 512, 4]]).encode()
    members = traces() | {"../../../mem_rank1.raw.json": raw, "notes.txt": b"hello", "/mem_rank2.json": raw}
    path = zipped(tmp_path / "a.zip", members)
    job = trine.load(path)
    assert job.formats == ("kineto", "memory_timeline")
    assert [rank.memory is not None for rank in job] == [False, True, True]
    outside = {each.name for each in tmp_path.rglob("*") if (tmp_path / "temporary") not in each.parents}
    assert outside == {"a.zip", "temporary"}
    del job


def test_beside_other_files_it_is_part_of_the_job(tmp_path: Path) -> None:
    members = traces(2)
    written(tmp_path / "rank0.json", small(0, 2))
    zipped(tmp_path / "rest.zip", {name: content for name, content in members.items() if "rank1" in name})
    assert trine.load(tmp_path).rank_ids == (0, 1)


def test_the_same_in_tar_and_zip(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", traces())
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, content in traces().items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    one, other = trine.load(path), trine.load(tmp_path / "a.tar.gz")
    for left, right in zip(one, other, strict=True):
        assert left.device is not None and right.device is not None
        assert left.device["start_ns"].tolist() == right.device["start_ns"].tolist()


def test_links_are_no_traces(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("rank0.json")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, b"/etc/passwd")
    assert "holds no trace" in refused(tmp_path / "a.zip")


def _encrypted(path: Path) -> None:
    """The flag alone: that a password is needed is said before anything is read."""
    data = bytearray(zipped(path, traces()).read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(mark)
        while at >= 0:
            data[at + place] |= 1
            at = data.find(mark, at + 4)
    path.write_bytes(data)


def _overlapping(path: Path) -> None:
    """Many names for the same bytes: small, and large without end when unpacked."""
    zipped(path, {"rank0.json": b"[" * 5_000_000})
    data = path.read_bytes()
    directory = data.rfind(b"PK\x01\x02")
    entry, end = data[directory : data.rfind(b"PK\x05\x06")], data[data.rfind(b"PK\x05\x06") :]
    many = 1000
    counts = struct.pack("<HHI", many, many, many * len(entry))
    path.write_bytes(data[:directory] + entry * many + end[:8] + counts + end[16:])


def _huge(path: Path) -> None:
    """Three gigabytes of nothing in three megabytes."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("rank0.json", "w", force_zip64=True) as file,
    ):
        for _ in range(48):
            file.write(b" " * (1 << 20))
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 3 << 30)
    path.write_bytes(data)


def _saved_by_torch(path: Path) -> None:
    zipped(path, {"archive/data.pkl": pickle.dumps({}), "archive/version": b"3\n"}, zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_encrypted, "is an encrypted archive; unpack it with its password"),
        (_overlapping, "is an archive that unpacks to 5.0 GB"),
        (_huge, "is an archive that unpacks to 3.2 GB"),
        (_saved_by_torch, "is what torch.save wrote"),
        (lambda path: path.write_bytes(b"PK\x03\x04rest"), "is damaged (File is not a zip file)"),
        (lambda path: zipped(path, {"a.txt": b"hello"}), "holds no trace"),
    ],
)
def test_what_is_no_archive_of_traces_is_refused_with_what_it_is(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    make(tmp_path / "a.zip")
    assert says in refused(tmp_path / "a.zip")
    # Beside traces it is a note.
    written(tmp_path / "rank0.json", small(0, 1))
    job = trine.load(tmp_path)
    assert job.rank_ids == (0,)
    if "holds no trace" not in says:
        assert says in said(job, "damaged-archive")


def test_what_torch_saves_is_called_so_under_any_name(tmp_path: Path) -> None:
    _saved_by_torch(tmp_path / "snapshot.pickle")
    assert "is what torch.save wrote (save a memory snapshot with" in refused(tmp_path / "snapshot.pickle")
    zipped(tmp_path / "artifact", traces())
    assert "call it .zip" in refused(tmp_path / "artifact")


def test_a_member_that_is_damaged_is_said(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", traces(), zipfile.ZIP_STORED)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"cudaLaunchKernel"', b'"cudaLaunchKernal"', 1))
    job = trine.load(path)
    assert "damaged" in said(job, "damaged-archive") and "Bad CRC-32" in said(job, "damaged-archive")


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=12), st.floats(0.3, 1))
def test_mutated_archives_never_end_in_a_traceback(changes: list[tuple[float, int]], keep: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = zipped(Path(folder) / "a.zip", traces())
        data = bytearray(path.read_bytes())
        for place, value in changes:
            data[int(place * (len(data) - 1))] = value
        path.write_bytes(data[: max(int(len(data) * keep), 1)] if keep < 0.9 else data)
        try:
            job = trine.load(path)
            for rank in job:
                assert rank.device is None or len(rank.device) <= 1
        except TrineError as error:
            assert "\n" not in str(error)
            assert "unexpected" not in str(error)


def test_the_interface_is_that_of_tar(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"x/y.json": b"{}"}, folder=True)
    with _archives.open_archive(path) as archive:
        found = [(one.name, one.size, one.isfile()) for one in archive]
    assert found == [("traces/", 0, False), ("x/y.json", 2, True)]
