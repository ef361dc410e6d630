"""Reading records: as a whole, in pieces, from other hosts, and what cannot be read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from record_rows import collective_rows, step_rows

import trine
from trine.record.errors import UnreadableInput
from trine.record.frames import SCHEMA_VERSION, encode_frame
from trine.record.readers import native
from trine.record.store import RankWriter


def _write(run: Path, ranks: int = 2, **description: Any) -> list[RankWriter]:
    writers = []
    for rank in range(ranks):
        writer = RankWriter(run, rank, ranks)
        writer.append({"parts": step_rows(0, 10), "collectives": collective_rows(0, 10)})
        groups = [{"id": "0", "name": "0", "description": "default_pg", "ranks": list(range(ranks))}]
        if rank == 0:
            writer.describe_run({"name": run.name})
        writer.close({"state": "finished", "groups": groups, "metadata": {"backend": "gloo"}, **description})
        writers.append(writer)
    return writers


def _change(path: Path, **values: Any) -> None:
    content = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**content, **values}))


def test_a_run_opens_with_its_ranks(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    assert native.recognizes(tmp_path / "run")
    job = trine.load(tmp_path / "run")
    assert (job.format, job.world_size, job.rank_ids, job.missing_ranks) == ("trine", 2, (0, 1), ())
    assert job.metadata["name"] == "run"
    rank = job.rank(1)
    assert rank.groups[0].ranks == (0, 1)
    assert rank.metadata["backend"] == "gloo"
    assert rank.host_name
    assert rank.windows == ()
    assert not rank.quality


def test_batches_that_a_step_gathers_are_counted(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1)
    rows = step_rows(0, 12)
    rows["index"] = rows["index"] // 3
    rows["complete"] = [0, 0, 1] * 4
    writer.append({"parts": rows})
    writer.close({"state": "finished"})
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.steps is not None and len(rank.steps) == 4
    assert rank.metadata["accumulation"] == 3
    _write(tmp_path / "plain", ranks=1)
    assert native.open_job(tmp_path / "plain").rank(0).metadata["accumulation"] == 1


def test_what_is_left_of_a_step_when_the_next_batch_is_asked_for_is_no_batch(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1)
    rows = step_rows(0, 12)
    rows["index"] = rows["index"] // 2
    rows["complete"] = [0, 1] * 6
    rows["start_ns"][1::2] = rows["end_ns"][1::2] = rows["end_ns"][::2]
    writer.append({"parts": rows})
    writer.close({"state": "finished"})
    assert native.open_job(tmp_path / "run").rank(0).metadata["accumulation"] == 1


def test_rank_folders_of_several_hosts_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "joined")
    for host in (0, 1):
        writer = RankWriter(tmp_path / f"host-{host}" / "run", host, 2)
        writer.append({"parts": step_rows(0, 10)})
        writer.close({"state": "finished"})
        shutil.copytree(writer.folder, tmp_path / "joined" / writer.folder.name)
    job = native.open_job(tmp_path / "joined")
    assert job.rank_ids == (0, 1)
    assert not job.quality


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "run", ranks=3)
    shutil.rmtree(tmp_path / "run" / "rank-00001")
    assert native.open_job(tmp_path / "run").missing_ranks == (1,)


def test_ranks_of_different_starts_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        _write(tmp_path / name)
    shutil.rmtree(tmp_path / "new" / "rank-00001")
    shutil.copytree(tmp_path / "old" / "rank-00001", tmp_path / "new" / "rank-00001")
    job = native.open_job(tmp_path / "new")
    assert job.rank_ids == (0,)
    assert [(note.id, note.severity) for note in job.quality] == [("mixed-runs", "error")]


def test_a_newer_schema_is_refused_and_an_older_accepted(tmp_path: Path) -> None:
    _write(tmp_path / "run", ranks=1)
    path = tmp_path / "run" / "rank-00000" / "rank.json"
    _change(path, schema=f"trine.record/{SCHEMA_VERSION + 1}")
    with pytest.raises(UnreadableInput, match=r"newer Trine .*update Trine"):
        native.open_job(tmp_path / "run")
    _change(path, schema="trine.record/1")
    assert native.open_job(tmp_path / "run").rank(0).steps is not None


def test_one_rank_of_a_newer_schema_is_left_out_and_noted(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    _change(tmp_path / "run" / "rank-00001" / "rank.json", schema=f"trine.record/{SCHEMA_VERSION + 1}")
    job = native.open_job(tmp_path / "run")
    assert (job.rank_ids, job.missing_ranks) == ((0,), (1,))
    assert "newer Trine" in job.quality[0].message


def test_an_attempt_that_died_before_its_first_write_gives_way(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    _write(tmp_path / "run")
    assert native.open_job(tmp_path / "run").rank(0).metadata["attempt"] == 2
    for rank in (0, 1):
        (tmp_path / "run" / "attempt-0002" / f"rank-{rank:05}" / "rank.json").unlink()
    job = native.open_job(tmp_path / "run")
    assert job.rank(0).metadata["attempt"] == 1
    assert [note.id for note in job.quality] == ["unreadable-rank", "unreadable-rank", "other-attempts"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema": "other/1"}', b'{"schema": "trine.record/x"}']
)
def test_a_rank_that_cannot_be_read_is_left_out(tmp_path: Path, content: bytes) -> None:
    _write(tmp_path / "run")
    (tmp_path / "run" / "rank-00001" / "rank.json").write_bytes(content)
    job = native.open_job(tmp_path / "run")
    assert job.rank_ids == (0,)
    assert job.missing_ranks == (1,)
    assert [(note.id, note.rank) for note in job.quality] == [("unreadable-rank", 1)]
    (tmp_path / "run" / "rank-00000" / "rank.json").unlink()
    with pytest.raises(UnreadableInput) as raised:
        native.open_job(tmp_path / "run")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        ({"world_size": [1]}, "$.world_size"),
        ({"groups": [{"id": "0", "ranks": "x"}]}, "$.groups[0].ranks"),
        ({"notes": [{"id": {}, "severity": "info", "message": "m"}]}, "$.notes[0].id"),
        ({"metadata": {"flops": 3}}, "$.metadata.flops"),
        ({"metadata": {"device": {"threads": "x"}}}, "$.metadata.device.threads"),
    ],
)
def test_a_description_of_wrong_types_is_named_and_left_out(
    tmp_path: Path, damage: dict[str, Any], place: str
) -> None:
    _write(tmp_path / "run")
    _change(tmp_path / "run" / "rank-00001" / "rank.json", **damage)
    job = native.open_job(tmp_path / "run")
    assert job.rank_ids == (0,)
    assert [note.id for note in job.quality] == ["unreadable-rank"] and place in job.quality[0].message


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not native.recognizes(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_bytes(b'{"schema": "trine.record/1"}')
    assert native.recognizes(tmp_path / "run")
    with pytest.raises(UnreadableInput, match="nothing was recorded"):
        native.open_job(tmp_path / "run")
    assert not native.recognizes(tmp_path / "run" / "run.json")


def test_a_torn_tail_is_ignored_and_said(tmp_path: Path) -> None:
    (writer,) = _write(tmp_path / "run", ranks=1)
    (segment,) = writer.folder.glob("rows-*.trine")
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:30])
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.steps is not None and len(rank.steps) == 10
    assert [(note.id, note.severity) for note in rank.quality] == [("torn-tail", "warning")]
    assert "had closed its record, so steps at its end may be missing" in rank.quality[0].message
    _change(writer.folder / "rank.json", state="running", host="elsewhere")
    written = native.open_job(tmp_path / "run").rank(0)
    assert [(note.id, note.severity) for note in written.quality] == [("torn-tail", "info")]


def test_a_run_that_ended_with_an_error_is_said_to(tmp_path: Path) -> None:
    (writer,) = _write(tmp_path / "run", ranks=1)
    _change(writer.folder / "rank.json", state="failed", error="RuntimeError: boom\nand more")
    (note,) = native.open_job(tmp_path / "run").rank(0).quality
    assert (note.id, note.severity) == ("failed", "warning")
    assert (
        note.message == "the run ended early with RuntimeError: boom; the record holds its steps up to there"
    )


def test_a_killed_process_is_told_from_a_running_one(tmp_path: Path) -> None:
    (writer,) = _write(tmp_path / "run", ranks=1)
    path = writer.folder / "rank.json"
    program = [sys.executable, "-c", "import os; print(os.getpid())"]
    gone = subprocess.run(program, capture_output=True, check=True, timeout=60)
    _change(path, state="running", process=int(gone.stdout))
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.metadata["state"] == "killed"
    assert [note.id for note in rank.quality] == ["killed"]
    _change(path, process=os.getpid())
    assert native.open_job(tmp_path / "run").rank(0).metadata["state"] == "running"
    _change(path, host="elsewhere", process=int(gone.stdout))
    assert native.open_job(tmp_path / "run").rank(0).metadata["state"] == "running"  # it cannot be known


def test_notes_and_overflow_become_quality(tmp_path: Path) -> None:
    notes = [{"id": "flops-step", "severity": "info", "message": "step 1 was slow"}]
    _write(tmp_path / "run", ranks=1, notes=notes, overflow={"collectives": 7})
    rank = native.open_job(tmp_path / "run").rank(0)
    assert [(note.id, note.severity) for note in rank.quality] == [
        ("flops-step", "info"),
        ("overflow", "warning"),
    ]
    assert "7 collectives" in rank.quality[1].message


def test_a_window_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    (writer,) = _write(tmp_path / "run", ranks=1)
    (writer.folder / "window-000010.json").write_text("{")
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.windows == ()
    assert [note.id for note in rank.quality] == ["unreadable-window"]


@pytest.mark.parametrize(
    "values",
    [{"world_size": 1 << 64}, {"world_size": 10**9}, {"rank": 10**12}, {"start": {"a": 1}}, {"start": [1]}],
    ids=str,
)
def test_a_description_with_absurd_values_is_refused_where_it_is_read(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    _write(tmp_path / "run")
    _change(tmp_path / "run/rank-00001/rank.json", **values)
    job = trine.load(tmp_path / "run")
    assert (job.world_size, job.rank_ids) == (2, (0,))
    (note,) = (note for note in job.quality if note.id == "unreadable-rank")
    assert "is damaged" in note.message and note.rank == 1


def test_pipes_with_the_names_of_files_are_not_waited_for(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    for name in (
        "rank-00000/rows-000002.trine",
        "rank-00000/rollup-000001.trine",
        "rank-00000/window-000001.json",
    ):
        os.mkfifo(tmp_path / "run" / name)
    (tmp_path / "run/run.json").unlink()
    os.mkfifo(tmp_path / "run/run.json")
    (tmp_path / "run/rank-00001/rank.json").unlink()
    os.mkfifo(tmp_path / "run/rank-00001/rank.json")
    job = trine.load(tmp_path / "run")
    assert job.rank_ids == (0,)
    steps = job.rank(0).steps
    assert steps is not None and len(steps) == 10


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "rows", "table": "parts", "rows": 10**12, "strings": [], "columns": {}},
        {"kind": "rows", "table": "parts", "rows": 3, "strings": [], "columns": {"index": [1, 0, b"\x00"]}},
        {"kind": "rows", "table": "parts", "rows": 3, "strings": 7, "columns": {}},
        {"kind": "rows", "table": "parts", "rows": 3, "strings": [], "columns": {"index": [0, "x", b""]}},
        {"kind": "rows", "table": ["parts"], "rows": 3, "strings": [], "columns": {}},
        {"no": "kind"},
        [1, 2],
        {"kind": "rows", "zeros": bytes(300 << 20)},
    ],
    ids=["rows", "lengths", "strings", "values", "table", "kind", "list", "bomb"],
)
def test_frames_that_no_recorder_wrote_cost_only_themselves(tmp_path: Path, message: Any) -> None:
    _write(tmp_path / "run", 1)
    path = tmp_path / "run/rank-00000/rows-000001.trine"
    path.write_bytes(encode_frame(message) + path.read_bytes())
    rank = trine.load(tmp_path / "run").rank(0)
    assert rank.steps is not None and len(rank.steps) == 10
    assert "1 damaged stretches" in next(note.message for note in rank.quality if note.id == "damaged")
