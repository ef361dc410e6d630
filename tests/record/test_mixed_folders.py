"""Files of several formats in one place are one job, each rank once."""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from record_rows import collective_rows, step_rows
from trace_builders import kernel, small, trace, written

import trine
from trine.analyzers import to_json
from trine.record import _expansion
from trine.record.errors import UnreadableInput, UsageError
from trine.record.model import Job
from trine.record.store import RankWriter

START_NS = 1_700_000_000 * 10**9


def ids(job: Job) -> set[str]:
    return {note.id for note in job.quality}


def said(job: Job, id: str) -> str:
    return next(note.message for note in job.quality if note.id == id)


def dump(path: Path, world: int = 4, created_ns: int = START_NS) -> Path:
    """A flight recorder dump with one completed all-reduce."""
    entry = {
        "record_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created_ns,
        "time_discovered_started_ns": created_ns,
        "time_discovered_completed_ns": created_ns + 1000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
    }
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    content = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": [entry]}
    return written(path, content)


def snapshot(path: Path) -> Path:
    """A memory snapshot of one segment."""
    block = {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []}
    segment = {
        "address": 4096,
        "total_size": 2048,
        "allocated_size": 1024,
        "active_size": 1024,
        "requested_size": 1000,
        "stream": 0,
        "device": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block, {**block, "address": 5120, "state": "inactive"}],
    }
    event = {
        "action": "alloc",
        "addr": 4096,
        "size": 1024,
        "stream": 0,
        "time_us": START_NS // 1000,
        "frames": [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[event]]}))
    return path


def traces(folder: Path, world: int = 4) -> Path:
    for rank in range(world):
        written(folder / f"rank{rank}.json.gz", small(rank, world, at=START_NS / 1000))
    return folder


def record(folder: Path, ranks: int = 2) -> Path:
    for rank in range(ranks):
        writer = RankWriter(folder, rank, ranks)
        writer.describe({"metadata": {}})
        writer.append({"parts": step_rows(0, 8), "collectives": collective_rows(0, 8)})
        writer.close({"metadata": {}})
    return folder


def test_traces_dumps_and_snapshots_join_rank_by_rank(tmp_path: Path) -> None:
    traces(tmp_path / "traces")
    for rank in range(4):
        dump(tmp_path / "dumps" / f"fr_rank_{rank}.json")
        snapshot(tmp_path / "memory" / f"rank{rank}_snapshot.pickle")
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1, 2, 3) and job.world_size == 4
    assert (job.format, set(job.formats)) == ("kineto", {"kineto", "flight_recorder", "memory_snapshot"})
    for rank in job:
        assert rank.device is not None and rank.flight_recorder is not None and rank.segments is not None
        assert rank.flight_recorder.text("operation")[0] == "all_reduce"
        assert rank.flight_recorder.strings is rank.strings
        assert {note.rank for note in rank.quality} <= {rank.rank}


def traced_memory(path: Path, kinds: tuple[tuple[int, int], ...]) -> Path:
    """A trace with ``[memory]`` events of (device type, device index)."""
    content = small(0, 1, at=START_NS / 1000)
    for number, (kind, index) in enumerate(kinds):
        at = START_NS / 1000 + number
        arguments = {"Device Type": kind, "Device Id": index, "Bytes": 1 << 20, "Total Allocated": 1 << 20}
        arguments |= {"Addr": 4096 * (number + 1), "Total Reserved": 1 << 21}
        content["traceEvents"].append(
            {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 1, "ts": at, "args": arguments}
        )  # fmt: skip
    return written(path, content)


def timeline(path: Path, grain: int = 512, category: int = 4) -> Path:
    """An exported memory timeline; 4 is activations, 7 what the profiler cannot tell."""
    rows = [[START_NS + 1000 * number, 2, (number + 1) * grain, category] for number in range(20)]
    return written(path, rows)


@pytest.mark.parametrize(
    ("kinds", "grain", "category", "used", "device"),
    [
        (((0, -1),), 4, 4, "memory timeline", -1),
        (((1, 3),), 512, 4, "memory timeline", 3),
        (((0, -1),), 512, 4, "memory timeline", 0),
        (((0, -1), (1, 3)), 4, 4, "trace's [memory] events", 3),  # the timeline is of the host, memory runs out on the device
        (((1, 3),), 512, 7, "trace's [memory] events", 3),  # a timeline that knows nothing
    ],
)  # fmt: skip
def test_of_two_sources_of_memory_the_one_that_knows_more_counts(
    tmp_path: Path, kinds: tuple[tuple[int, int], ...], grain: int, category: int, used: str, device: int
) -> None:
    traced_memory(tmp_path / "rank0.json", kinds)
    timeline(tmp_path / "mem_rank0.json", grain, category)
    rank = trine.load(tmp_path).rank(0)
    assert rank.memory is not None and rank.memory["device"].max() == device
    note = next(note for note in rank.quality if note.id == "second-source")
    assert note.message.startswith(f"memory is that of the {used}; left out: the ")
    (owners,) = to_json(trine.analyze(tmp_path))["memory_owners"]["ranks"]
    assert owners["device"] == device and owners["lower_bound"] == (used == "memory timeline")


def test_a_snapshot_comes_before_a_timeline_and_events(tmp_path: Path) -> None:
    traced_memory(tmp_path / "rank0.json", ((1, 0),))
    timeline(tmp_path / "mem_rank0.json")
    snapshot(tmp_path / "rank0_snapshot.pickle")
    rank = trine.load(tmp_path).rank(0)
    assert rank.segments is not None and rank.memory is not None and len(rank.memory) < 20
    said = [note.message for note in rank.quality if note.id == "second-source"]
    assert [message.partition(";")[0] for message in said] == ["memory is that of the memory snapshot"] * 2


def test_a_rank_of_a_lesser_format_alone_is_a_rank(tmp_path: Path) -> None:
    traces(tmp_path, world=2)
    for path in tmp_path.iterdir():
        written(path, small(int(path.name[4]), 4))
    for rank in range(3):
        dump(tmp_path / f"fr_rank_{rank}.json")
    job = trine.load(tmp_path)
    assert (job.rank_ids, job.world_size, job.missing_ranks) == ((0, 1, 2), 4, (3,))
    assert job.rank(2).format == "flight_recorder" and job.rank(1).format == "kineto"
    assert said(job, "missing-ranks").startswith("1 of 4 ranks have no file (3)")
    assert "kineto files are here for ranks 0, 1, none for 2" in said(job, "partial-format")


def test_paths_of_several_kinds_are_one_job(tmp_path: Path) -> None:
    folder, one = traces(tmp_path / "t", world=1), dump(tmp_path / "d" / "nccl_trace_rank_0", world=1)
    job = trine.load([folder, one])
    assert job.rank_ids == (0,) and set(job.formats) == {"kineto", "flight_recorder"}
    rank = job.rank(0)
    assert rank.device is not None and rank.flight_recorder is not None


# --- ranks that nothing states -------------------------------------------------------------------


def test_the_only_snapshot_of_the_only_rank_needs_no_word(tmp_path: Path) -> None:
    traces(tmp_path, world=1)
    snapshot(tmp_path / "memory.pickle")
    job = trine.load(tmp_path)
    assert job.rank(0).segments is not None and "rank-unknown" not in ids(job)


def test_as_many_snapshots_as_ranks_join_in_order(tmp_path: Path) -> None:
    traces(tmp_path, world=2)
    for name in ("first.pickle", "second.pickle"):
        snapshot(tmp_path / name)
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1)
    assert all(rank.segments is not None for rank in job)
    assert "rank-unknown" in ids(job)


def test_a_lone_snapshot_beside_several_ranks_is_the_first_ranks_and_said(tmp_path: Path) -> None:
    traces(tmp_path)
    snapshot(tmp_path / "memory.pickle")
    job = trine.load(tmp_path)
    assert [rank.segments is not None for rank in job] == [True, False, False, False]
    note = next(note for note in job.quality if note.id == "rank-unknown")
    assert note.severity == "warning" and "memory.pickle" in note.message and "rank_3" in note.message


def test_the_one_rank_without_a_name_is_the_one_that_is_left(tmp_path: Path) -> None:
    traces(tmp_path, world=2)
    snapshot(tmp_path / "rank0.pickle")
    snapshot(tmp_path / "other.pickle")
    job = trine.load(tmp_path)
    assert all(rank.segments is not None for rank in job)


# --- records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["run", "run/dumps", "beside"])
def test_a_record_with_dumps_inside_or_beside(tmp_path: Path, where: str) -> None:
    record(tmp_path / "run")
    for rank in range(2):
        dump(tmp_path / where / f"fr_rank_{rank}.json", world=2, created_ns=START_NS)
    job = trine.load(tmp_path if where == "beside" else tmp_path / "run")
    assert (job.format, job.formats, job.rank_ids) == ("trine", ("trine", "flight_recorder"), (0, 1))
    for rank in job:
        assert rank.steps is not None and rank.flight_recorder is not None


def test_a_trace_beside_a_record_is_a_deep_window_of_it(tmp_path: Path) -> None:
    record(tmp_path / "run", ranks=1)
    written(tmp_path / "rank0.json", small(0, 1))
    job = trine.load(tmp_path)
    rank = job.rank(0)
    assert rank.format == "trine" and len(rank.windows) == 1 and rank.windows[0].device is not None


def test_a_records_own_windows_are_not_a_second_source(tmp_path: Path) -> None:
    record(tmp_path / "run", ranks=1)
    written(tmp_path / "run" / "rank-00000" / "window-000010.json", small(0, 1))
    job = trine.load(tmp_path / "run")
    assert job.formats == ("trine",) and len(job.rank(0).windows) == 1


def test_several_records_are_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, ranks=1)
    for paths in (tmp_path, [tmp_path / "a", tmp_path / "b"]):
        with pytest.raises(UsageError, match=r"2 records .*trine compare"):
            trine.load(paths)


def test_folders_called_as_a_records_ranks_hold_traces_too(tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path / f"rank-{rank}" / "trace.json", trace(kernel("k", 1, 1)))
    job = trine.load(tmp_path)
    assert (job.format, job.rank_ids) == ("kineto", (0, 1))


# --- what is wrong ------------------------------------------------------------------------------


def test_a_part_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    traces(tmp_path, world=2)
    for rank in range(2):
        dump(tmp_path / f"fr_rank_{rank}.json", world=2)
    job = trine.load(tmp_path)
    (tmp_path / "rank1.json.gz").write_bytes(b"")
    rank = job.rank(1)
    assert rank.device is None and rank.flight_recorder is not None
    assert [note.severity for note in rank.quality if note.id == "unreadable-part"] == ["error"]
    (tmp_path / "fr_rank_1.json").unlink()
    with pytest.raises(UnreadableInput):
        job.rank(1)


def test_other_json_beside_dumps_is_no_fault(tmp_path: Path) -> None:
    dump(tmp_path / "fr_rank_0.json", world=1)
    written(tmp_path / "config.json", {"x": 1})
    job = trine.load(tmp_path)
    assert job.format == "flight_recorder"
    note = next(note for note in job.quality if note.id == "not-a-trace")
    assert note.severity == "info" and "config.json" in note.message


def test_world_sizes_that_disagree(tmp_path: Path) -> None:
    traces(tmp_path, world=2)
    dump(tmp_path / "fr_rank_0.json", world=4)
    job = trine.load(tmp_path)
    assert job.world_size == 4 and "kineto 2" in said(job, "world-size-disagrees")


def test_files_of_other_days_are_doubted(tmp_path: Path) -> None:
    traces(tmp_path, world=1)
    dump(tmp_path / "fr_rank_0.json", world=1, created_ns=START_NS + 30 * 3600 * 10**9)
    rank = trine.load(tmp_path).rank(0)
    assert any(note.id == "times-apart" and "30 hours" in note.message for note in rank.quality)


def test_files_of_other_weeks_are_of_another_run_where_several_runs_lie(tmp_path: Path) -> None:
    traces(tmp_path, world=1)
    dump(tmp_path / "fr_rank_0.json", world=1, created_ns=START_NS + 30 * 24 * 3600 * 10**9)
    rank = trine.load(tmp_path).rank(0)
    assert rank.flight_recorder is not None, "one run's files, put together on purpose"
    assert any(note.id == "times-apart" and "30 days" in note.message for note in rank.quality)
    written(tmp_path / "other" / "rank0.json.gz", small(0, 1, at=START_NS / 1000 + 7200e6))
    rank = trine.load(tmp_path).rank(0)
    assert rank.flight_recorder is None and rank.host is not None
    note = next(note for note in rank.quality if note.id == "times-apart")
    assert "several runs lie here" in note.message and "30 days" in note.message


def test_sources_of_several_parts_travel_to_other_processes(tmp_path: Path) -> None:
    traces(tmp_path, world=1)
    dump(tmp_path / "fr_rank_0.json", world=1)
    source = pickle.loads(pickle.dumps(trine.load(tmp_path).sources[0]))
    assert source.read(source).flight_recorder is not None


def test_a_folder_of_endless_files_is_cut_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_expansion, "_MOST_FILES", 3)
    traces(tmp_path, world=5)
    job = trine.load(tmp_path)
    assert job.rank_ids == (0, 1, 2) and "only the first 3 files" in said(job, "too-many-files")


def test_folders_are_walked_four_deep_and_hidden_ones_not(tmp_path: Path) -> None:
    dump(tmp_path / "a/b/c/d/fr_rank_0.json", world=1)
    dump(tmp_path / "a/b/c/d/e/fr_rank_1.json", world=1)
    dump(tmp_path / ".cache/fr_rank_2.json", world=1)
    assert trine.load(tmp_path).rank_ids == (0,)


# --- archives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "gz"])
def test_an_archive_of_several_kinds(tmp_path: Path, mode: str) -> None:
    traces(tmp_path / "job", world=2)
    for rank in range(2):
        dump(tmp_path / "job" / f"fr_rank_{rank}.json", world=2)
    path = tmp_path / f"job.tar.{mode}".rstrip(".")
    with tarfile.open(path, f"w:{mode}") as archive:
        archive.add(tmp_path / "job", "../../outside")
    before = sorted(tmp_path.rglob("*"))
    job = trine.load(path)
    assert (job.rank_ids, set(job.formats)) == ((0, 1), {"kineto", "flight_recorder"})
    assert all(rank.device is not None and rank.flight_recorder is not None for rank in job)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_of_dumps_alone_is_cleaned_up(tmp_path: Path) -> None:
    dump(tmp_path / "fr_rank_0.json", world=1)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "fr_rank_0.json", "fr_rank_0.json")
    job = trine.load(tmp_path / "a.tar")
    assert job.formats == ("flight_recorder",)
    unpacked = job.sources[0].path
    assert unpacked.is_file() and job.rank(0).flight_recorder is not None
    del job
    assert not unpacked.exists()


# --- real files ---------------------------------------------------------------------------------


def _at(snapshot: bytes, time_us: int) -> bytes:
    """A snapshot as if its history began at ``time_us``: files of other months are of another run."""
    content = pickle.loads(snapshot)
    history = [entry for entries in content["device_traces"] for entry in entries]
    first = min(entry["time_us"] for entry in history)
    for entry in history:
        entry["time_us"] += time_us - first
    return pickle.dumps(content)


def test_real_traces_dumps_and_a_snapshot_are_one_job(data: Path, tmp_path: Path) -> None:
    """Each study finds its own: the breakdown in the traces, the culprit in the dumps, the peak in the snapshot."""
    found = data / "traces"
    for path in [
        *(found / "kineto/gloo_ddp4_cpu").iterdir(),
        *(found / "flight_recorder/gloo_desync").iterdir(),
    ]:
        shutil.copy(path, tmp_path)
    snapshot_file = found / "memory_snapshot/medium_128_training_memory_snapshot.pickle"
    begun_us = int(trine.load(tmp_path).rank(2).host["start_ns"].min()) // 1000
    (tmp_path / "rank2_snapshot.pickle").write_bytes(_at(snapshot_file.read_bytes(), begun_us))
    job = trine.load(tmp_path)
    assert (job.rank_ids, job.world_size, job.format) == ((0, 1, 2, 3), 4, "kineto")
    result: dict[str, Any] = to_json(trine.analyze(job))
    assert set(result["source"]["formats"]) == {"kineto", "flight_recorder", "memory_snapshot"}
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    assert all(rank["breakdown_ns"] is not None for rank in result["ranks"])
    (culprit,) = result["desync"]["culprits"]
    assert (culprit["ranks"], culprit["sequence"]) == ([1], 30)
    assert [rank["memory"]["peak_bytes"] > 1 << 30 for rank in result["ranks"]] == [False, False, True, False]
    assert result["memory_owners"] is not None
    assert json.dumps(result)
