"""Damaged exports: a clear line or a partial analysis, never a traceback, and memory that the file bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsight_exports import Training, build

from trine.record.errors import TrineError, UnreadableInput
from trine.record.model import Rank
from trine.record.readers import nsight
from trine.record.readers._nsight_payloads import _from_json


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("sound") / "a.sqlite", Training(steps=3)).read_bytes()


def read(path: Path) -> list[Rank] | str:
    """All ranks, or the one line that says why there are none."""
    try:
        nsight.recognizes(path)
        return list(nsight.open_job(path))
    except TrineError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return str(error)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_costs_no_more_than_the_damaged(sound: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=40))
        content[at : at + len(piece)] = piece
    content = content[: data.draw(st.integers(0, 2 * len(content)))]
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    found = read(path)
    assert isinstance(found, str) or len(found) > 0
    assert [each.name for each in tmp_path.iterdir()] == ["x.sqlite"]


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    partial = 0
    for kept in range(5, 100, 5):
        path.write_bytes(sound[: len(sound) * kept // 100])
        found = read(path)
        if isinstance(found, list):
            partial += 1
            assert any(note.id == "truncated-file" for rank in found for note in rank.quality)
        else:
            assert "export" in found
    assert partial >= 5
    path.write_bytes(sound)
    whole = read(path)
    assert isinstance(whole, list)
    assert not any(note.id in ("truncated-file", "damaged-table") for rank in whole for note in rank.quality)


def test_wrong_types_in_columns_are_missing_values(tmp_path: Path) -> None:
    kernels = [
        {"start": start, "end": 10**15 + 5, "deviceId": "zero", "streamId": b"7", "correlationId": 1.5, "globalPid": None, "demangledName": name, "gridX": -1}
        for start, name in (("soon", 1), (None, None), (10**15, "a text"), (1e15, 2.0))
    ]  # fmt: skip
    path = build(tmp_path / "a.sqlite", without=["CUPTI_ACTIVITY_KIND_KERNEL"])
    import sqlite3

    with sqlite3.connect(path) as connection:
        names = ", ".join(kernels[0])
        connection.execute(
            f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({names.replace('end', chr(34) + 'end' + chr(34))})"
        )
        marks = ", ".join("?" * len(kernels[0]))
        connection.executemany(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({marks})",
            [list(row.values()) for row in kernels],
        )
    connection.close()
    (rank,) = nsight.open_job(path)
    assert rank.device is not None
    assert (rank.device.text("name") == "unnamed kernel").sum() == 2  # the two that have a start
    assert any(note.id == "impossible-times" for note in rank.quality)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["Rank", "Peer rank", "NCCL communicator ID", "Message size [bytes]", "x"]), inner, max_size=4)))  # fmt: skip
def test_payloads_may_say_anything(content: object) -> None:
    found = _from_json(json.dumps(content))
    assert all(isinstance(value, int) for value in found.values())


_MEASURE = """
import resource, sys
from pathlib import Path
from trine.record.readers import nsight
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = 0
for rank in nsight.open_job(path):
    rows += len(rank.device or ()) + len(rank.host or ())
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, path.stat().st_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("table", ["kernels", "calls"])
def test_memory_stays_within_four_times_the_file(tmp_path: Path, table: str) -> None:
    """The smallest rows that make an event: nothing in the file pays for the columns that the model adds. The goal
    allows 64 MiB besides; a small file needs less, or it would show nothing."""
    import sqlite3

    path = tmp_path / "a.sqlite"
    rows = 600_000
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value)")
        connection.execute("INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel')")
        if table == "kernels":
            connection.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, 'end', deviceId, streamId, correlationId, shortName)"
            )
            values = ((at * 9000, at * 9000 + 5000, 0, 7, at, 1) for at in range(rows))
            connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", values)
        else:
            connection.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, 'end', globalTid, correlationId, nameId)"
            )
            values = ((at * 9000, at * 9000 + 5000, (5 << 24) + 5, at, 1) for at in range(rows))
            connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", values)
    connection.close()
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, timeout=100, check=True
    )
    read_rows, grown, size = map(int, ran.stdout.split())
    assert read_rows == rows
    assert grown <= 4 * size + (16 << 20), f"{grown / size:.1f} times the file"


def test_a_database_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"CUPTI_ACTIVITY_KIND_KERNEL" * 400)
    assert nsight.recognizes(path)
    with pytest.raises(UnreadableInput, match="export"):
        nsight.open_job(path)
    path.write_bytes(b"")
    assert (
        not nsight.recognizes(path)
        and not nsight.recognizes(tmp_path)
        and not nsight.recognizes(tmp_path / "absent")
    )
