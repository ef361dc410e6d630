"""Memory snapshots: totals, owners and categories against runs whose every byte is known, and the real files."""

from __future__ import annotations

import gzip
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_snapshots import MIB, Allocator, python_only, training

from trine.record.errors import UnreadableInput
from trine.record.loading import load
from trine.record.model import MISSING, Rank, Table
from trine.record.readers import memory_snapshot


def read(path: Path) -> Rank:
    assert memory_snapshot.recognizes(path)
    return memory_snapshot.open_job(path).rank(0)


def read_run(tmp_path: Path, run: Allocator, **options: Any) -> Rank:
    return read(run.write(tmp_path / "it.pickle", **options))


def memory(rank: Rank) -> Table:
    assert rank.memory is not None
    return rank.memory


def notes(rank: Rank) -> set[str]:
    return {note.id for note in rank.quality}


def at_end(table: Table, column: str = "category") -> Counter[str | None]:
    """Bytes alive at the end, by category or owner."""
    alive: Counter[str | None] = Counter()
    rows = np.isin(table.text("action"), ["held", "alloc", "free_requested"])
    for key, change in zip(table.text(column)[rows], table["bytes"][rows].tolist(), strict=True):
        alive[key] += change
    return +alive


def peak(table: Table) -> int:
    return int(table["allocated_bytes"].max())


# --- totals ---------------------------------------------------------------------------------------


def test_totals_are_exact_however_much_of_the_history_is_lost(tmp_path: Path) -> None:
    run = training(steps=2)
    whole = memory(read_run(tmp_path, run))
    assert not {"memory-history-lost", "memory-no-segments"} & notes(read_run(tmp_path, run))
    by_time = dict(zip(whole["time_ns"].tolist(), whole["allocated_bytes"].tolist(), strict=True))
    for forget in (1, 7, 20, len(run.events) - 3):
        rank = read_run(tmp_path, run, forget=forget)
        part = memory(rank)
        happened = part.text("action") != "held"
        for when, total in zip(part["time_ns"][happened], part["allocated_bytes"][happened], strict=True):
            assert by_time[int(when)] == total
        assert "memory-history-lost" in notes(rank)
        assert rank.metadata["memory_snapshot"]["devices"][0]["lower_bound"]


def test_the_peak_of_a_known_run(tmp_path: Path) -> None:
    run = Allocator()
    first = run.alloc(10 * MIB, run.plain())
    second = run.alloc(5 * MIB + 1, run.plain())
    run.free(first)
    run.alloc(MIB, run.plain())
    run.free(second)
    table = memory(read_run(tmp_path, run))
    assert table["allocated_bytes"].tolist() == [
        10 * MIB,
        15 * MIB + 512,
        5 * MIB + 512,
        6 * MIB + 512,
        MIB,
    ]
    assert (table["reserved_bytes"] == 16 * MIB + 512).all()
    assert table["address"].tolist()[0] == table["address"].tolist()[2]


def test_reserved_bytes_follow_segments(tmp_path: Path) -> None:
    run = Allocator()
    run.alloc(10 * MIB, run.plain(), segment=True)
    run.alloc(4 * MIB, run.plain(), segment=True)
    table = memory(read_run(tmp_path, run))
    assert table["reserved_bytes"].tolist() == [10 * MIB, 10 * MIB, 14 * MIB, 14 * MIB]
    assert table["allocated_bytes"].tolist() == [0, 10 * MIB, 10 * MIB, 14 * MIB]
    assert table.text("action").tolist() == ["segment_alloc", "alloc"] * 2


def test_segments_only(tmp_path: Path) -> None:
    run = training(steps=1)
    snapshot = run.snapshot()
    path = tmp_path / "it.pickle"
    for form in (
        {**snapshot, "device_traces": []},
        snapshot["segments"],
    ):  # the second as torch 1.13 wrote it
        path.write_bytes(pickle.dumps(form))
        rank = read(path)
        assert "memory-no-history" in notes(rank)
        held = memory(rank)
        active = sum(b["size"] for b in run.blocks.values() if b["state"] == "active_allocated")
        assert peak(held) == active
        assert set(held.text("action")) == {"held"}
        assert rank.segments is not None and set(rank.segments.text("state")) == {
            "segment",
            "active",
            "inactive",
        }


def test_old_blocks_without_addresses_lie_behind_one_another(tmp_path: Path) -> None:
    blocks = [
        {
            "size": 512,
            "state": "active_allocated",
            "history": [{"frames": Allocator.plain(), "real_size": 500}],
        },
        {"size": 1536, "state": "inactive"},
    ]
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 2048,
        "segment_type": "small",
        "stream": 0,
        "blocks": blocks,
    }
    path = tmp_path / "it.pickle"
    path.write_bytes(pickle.dumps([segment]))
    rank = read(path)
    assert rank.segments is not None
    assert rank.segments["address"].tolist() == [4096, 4096, 4608]
    assert at_end(memory(rank), "owner") == {"me/train.py:50 main": 512}


def test_traces_only_are_summed_forwards(tmp_path: Path) -> None:
    run = training(steps=2)
    path = tmp_path / "it.pickle"
    path.write_bytes(pickle.dumps({**run.snapshot(forget=10), "segments": []}))
    rank = read(path)
    assert "memory-no-segments" in notes(rank) and rank.segments is None
    table = memory(rank)
    assert int(table["allocated_bytes"].min()) >= 0
    assert (table["reserved_bytes"] == MISSING).all()
    exact = memory(read_run(tmp_path, run, forget=10))
    # What was held all along is in no event, so the totals lie lower by as much everywhere.
    count = int((table.text("action") != "held").sum())
    apart = exact["allocated_bytes"][-count:] - table["allocated_bytes"][-count:]
    assert len(set(apart.tolist())) == 1 and apart[0] > 0


def test_pairs_that_do_not_fit_are_said_and_survived(tmp_path: Path) -> None:
    run = Allocator()
    first = run.alloc(MIB, run.plain())
    run.alloc(MIB, run.plain(), address=first)  # a release was lost
    lost = run.alloc(2 * MIB, run.plain())
    del run.blocks[lost]  # allocated, never released, and not held either
    rank = read_run(tmp_path, run)
    assert {"memory-release-missing", "memory-blocks-vanished"} <= notes(rank)
    assert memory(rank)["allocated_bytes"].tolist()[-1] == MIB


def test_several_devices(tmp_path: Path) -> None:
    small, large = Allocator(0), Allocator(2)
    small.alloc(MIB, small.plain())
    large.alloc(9 * MIB, large.plain())
    one, two = small.snapshot(), large.snapshot()
    one["segments"] += two["segments"]
    one["device_traces"] = [*one["device_traces"], [], two["device_traces"][2]]
    path = tmp_path / "it.pickle"
    path.write_bytes(pickle.dumps(one))
    rank = read(path)
    assert "memory-several-devices" in notes(rank)
    table = memory(rank)
    assert {int(d): int(table["allocated_bytes"][table["device"] == d].max()) for d in (0, 2)} == {
        0: MIB,
        2: 9 * MIB,
    }


def test_failures_pending_releases_and_marks(tmp_path: Path) -> None:
    run = Allocator()
    block = run.alloc(4 * MIB, run.plain())
    run.free(block, complete=False)
    run.alloc(MIB, run.plain())
    run.out_of_memory(64 * MIB, 3 * MIB, run.forward(12))
    run.optimizer_step()
    rank = read_run(tmp_path, run)
    about = rank.metadata["memory_snapshot"]["devices"][0]
    assert about["pending_peak_bytes"] == 4 * MIB
    assert [failure[1:3] for failure in about["out_of_memory"]] == [[64 * MIB, 3 * MIB]]
    assert len(about["step_ends_ns"]) == 1
    assert "memory-exhausted" in notes(rank)
    table = memory(rank)
    assert table.text("owner")[table.text("action") == "out_of_memory"].tolist() == ["me/model.py:12 forward"]
    assert int(table["allocated_bytes"][-1]) == MIB  # a failure allocates nothing


def test_retries_are_segments_given_back_for_a_new_one(tmp_path: Path) -> None:
    run = Allocator()
    run.event("segment_free", 1, MIB, run.forward())
    run.event("segment_free", 2, MIB, run.forward())
    run.alloc(8 * MIB, run.forward(), segment=True)
    emptied = [{"name": "empty_cache", "filename": "/x/site-packages/torch/cuda/memory.py", "line": 200}]
    run.event("segment_free", 3, MIB, emptied)
    run.alloc(8 * MIB, run.forward(), segment=True)
    assert read_run(tmp_path, run).metadata["memory_snapshot"]["devices"][0]["retries"] == 1


def test_no_stacks_no_times(tmp_path: Path) -> None:
    run = Allocator()
    block = run.alloc(MIB)
    run.free(block)
    for event in run.events:
        del event["time_us"], event["frames"]
    rank = read_run(tmp_path, run)
    assert {"memory-no-stacks", "memory-no-times"} <= notes(rank)
    assert memory(rank)["time_ns"].tolist() == [0, 1]
    assert set(memory(rank).text("category")) == {"unattributed"}


def test_pools_are_named(tmp_path: Path) -> None:
    run = Allocator()
    run.alloc(MIB)
    snapshot = run.snapshot(expandable=True)
    snapshot["segments"][0]["segment_pool_id"] = (1, 4)
    path = tmp_path / "it.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    segments = read(path).segments
    assert segments is not None and set(segments.text("pool")) == {"large expandable private 1.4"}


# --- owners and categories ------------------------------------------------------------------------


def test_categories_of_a_training_run(tmp_path: Path) -> None:
    table = memory(read_run(tmp_path, training(steps=3)))
    assert at_end(table) == {"parameters": 6 * MIB, "gradients": 6 * MIB, "optimizer_state": 12 * MIB}
    allocated: Counter[tuple[str, str]] = Counter()
    begins = table.text("action") == "alloc"
    for key in zip(table.text("category")[begins], table.text("owner")[begins], strict=True):
        allocated[key] += 1
    assert {(category, owner) for category, owner in allocated if category == "activations"} == {
        ("activations", f"me/model.py:{line} forward") for line in (10, 11, 12, 13)
    }
    assert allocated["temporary", "me/model.py:30 forward"] == 3
    assert allocated["temporary", "MmBackward0"] == 12
    assert allocated["gradients", "AccumulateGrad"] == 6
    assert (
        "optimizer_state",
        "me/train.py:40 <module>",
    ) in allocated  # below it lies PyTorch's own code alone


def test_stacks_of_python_alone_tell_the_same(tmp_path: Path) -> None:
    run = training(steps=3)
    for event in run.events:
        event["frames"] = python_only(event["frames"])
    for block in run.blocks.values():
        block["frames"] = python_only(block["frames"])
    assert at_end(memory(read_run(tmp_path, run))) == {
        "parameters": 6 * MIB,
        "gradients": 6 * MIB,
        "optimizer_state": 12 * MIB,
    }


def test_parameters_from_before_the_history_are_told_by_the_gradients_sizes(tmp_path: Path) -> None:
    run = training(steps=3)
    for block in run.blocks.values():
        if block["state"] == "active_allocated" and any("_apply" in f["name"] for f in block["frames"]):
            block["frames"] = []
    first_of_third = next(
        row for row, event in enumerate(run.events) if event["time_us"] > run.annotations[3]["time_us"]
    )
    rank = read_run(tmp_path, run, forget=first_of_third)
    assert "memory-told-by-size" in notes(rank)
    assert at_end(memory(rank))["parameters"] == 6 * MIB
    # A run without gradients says nothing about them.
    inference = Allocator()
    inference.alloc(4 * MIB)
    inference.free(inference.alloc(MIB, inference.forward()), inference.forward())
    rank = read_run(tmp_path, inference, forget=1)
    assert at_end(memory(rank)) == {"unattributed": 4 * MIB}


def test_communication_is_what_lies_within_the_module_that_asks(tmp_path: Path) -> None:
    run = Allocator()
    gathered = run.alloc(4 * MIB, run.communication())
    wrapped = [
        *run.forward()[:-1],
        {"name": "forward", "filename": "/x/site-packages/torch/distributed/fsdp/api.py", "line": 5},
    ]
    saved = run.alloc(2 * MIB, wrapped)
    run.free(saved, run.backward())
    run.free(gathered, run.backward())
    table = memory(read_run(tmp_path, run))
    assert table.text("category")[:2].tolist() == ["communication_buffers", "activations"]


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/job/me/torch/model.py", "torch/model.py:7 forward"),  # a folder of one's own that is called torch
        ("/x/site-packages/transformers/models/llama/modeling.py", "llama/modeling.py:7 forward"),
        ("<stdin>", "<stdin>:7 forward"),
    ],
)
def test_owners(tmp_path: Path, file: str, owner: str) -> None:
    run = Allocator()
    frames = run.forward()
    frames[4] = {"name": "forward", "filename": file, "line": 7}
    run.alloc(MIB, frames)
    assert memory(read_run(tmp_path, run)).text("owner").tolist() == [owner]


def test_a_librarys_helper_is_not_the_owner(tmp_path: Path) -> None:
    run = Allocator()
    frames = run.forward(22)
    frames[2:4] = [{"name": "einsum", "filename": "/x/site-packages/einops/einops.py", "line": 9}]
    run.alloc(MIB, frames)
    table = memory(read_run(tmp_path, run))
    assert table.text("owner").tolist() == ["me/model.py:22 forward"]
    assert "einops/einops.py:9 einsum" in table.text("stack")[0]


# --- the file -------------------------------------------------------------------------------------


def test_large_files_are_read_piece_by_piece_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training(steps=4, leak=MIB)
    for protocol in range(6):
        path = tmp_path / "it.pickle"
        path.write_bytes(pickle.dumps(run.snapshot(forget=5), protocol))
        once = read(path)
        monkeypatch.setattr(memory_snapshot, "_SMALL_BYTES", 0)
        pieces = read(path)
        monkeypatch.undo()
        assert notes(once) == notes(pieces)
        for name, column in memory(once).columns.items():
            kind = memory(once).text(name) if column.dtype == np.int32 else column
            other = memory(pieces).text(name) if column.dtype == np.int32 else memory(pieces)[name]
            assert (kind == other).all(), name


def test_refused_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "it.pickle"
    for data, said in (
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "holds no segment and no event"),
        (pickle.dumps({"segments": 7, "device_traces": {}}), "holds no segment"),
        (pickle.dumps({"a": 1}), "without segments and device_traces"),
        (pickle.dumps(training(1).snapshot())[:-400], "damaged or cut"),
    ):
        path.write_bytes(data)
        with pytest.raises(UnreadableInput, match=said):
            memory_snapshot.open_job(path).rank(0)
    trace = [{"action": "alloc", "addr": 1, "size": 1, "time_us": 5}] * 1000
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace] * 1000}))
    with pytest.raises(UnreadableInput, match="again and again"):
        memory_snapshot.open_job(path).rank(0)


def test_values_of_wrong_types_are_survived(tmp_path: Path) -> None:
    chance = random.Random(7)
    odd: list[Any] = [None, "x", -1, 2**70, 1.5, [], {}, True, float("nan"), [{"line": "x"}], (1, 2, 3)]
    for _ in range(150):
        snapshot = training(1).snapshot(forget=3)
        rows = [
            *snapshot["device_traces"][0],
            *snapshot["segments"],
            *(b for s in snapshot["segments"] for b in s["blocks"]),
            *snapshot["external_annotations"],
            snapshot,
        ]
        for row in chance.sample(rows, 4):
            row[chance.choice(list(row))] = chance.choice(odd)
        path = tmp_path / "it.pickle"
        path.write_bytes(pickle.dumps(snapshot))
        try:
            memory_snapshot.open_job(path).rank(0)
        except UnreadableInput as error:
            assert "\n" not in str(error)


def test_ranks_come_from_names(tmp_path: Path) -> None:
    paths = [training(1).write(tmp_path / f"snapshot_rank_{rank}.pickle") for rank in (1, 0)]
    job = memory_snapshot.open_paths(paths, tmp_path)
    assert job.rank_ids == (0, 1)
    assert load(tmp_path).rank_ids == (0, 1)
    other = tmp_path / "other"
    other.mkdir()
    packed = other / "it.pickle.gz"
    packed.write_bytes(gzip.compress(paths[0].read_bytes()))
    assert peak(memory(read(packed))) == peak(memory(job.rank(0)))


# --- real files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peak_gib", "most"),
    [
        ("medium_128_training", 6.539, "optimizer_state"),
        ("medium_512_training", 11.575, "activations"),
        ("medium_512_inference", 1.817, "unattributed"),
    ],
)
def test_real_snapshots(data: Path, name: str, peak_gib: float, most: str) -> None:
    path = data / "traces" / "memory_snapshot" / f"{name}_memory_snapshot.pickle"
    rank = read(path)
    table = memory(rank)
    assert peak(table) / 2**30 == pytest.approx(peak_gib, abs=0.001)
    raw = pickle.loads(path.read_bytes())
    assert int(table["allocated_bytes"][-1]) == sum(segment["allocated_size"] for segment in raw["segments"])
    assert int(table["reserved_bytes"][-1]) == sum(segment["total_size"] for segment in raw["segments"])
    row = int(table["allocated_bytes"].argmax())
    assert at_end(table.select(slice(0, row + 1))).most_common(1)[0][0] == most
    owners = {owner for owner in table.text("owner") if owner}
    assert any(owner.startswith("cs336_basics/model.py:") for owner in owners)
    assert "memory-history-lost" in notes(rank)


@pytest.mark.slow
def test_memory_of_reading_is_bounded(data: Path, tmp_path: Path) -> None:
    """Resident growth of at most four times the file and 64 MiB, of a real file repeated three times too."""
    small = data / "traces" / "memory_snapshot" / "medium_512_training_memory_snapshot.pickle"
    snapshot = pickle.loads(small.read_bytes())
    trace = snapshot["device_traces"][0]
    again = [
        [
            {**event, "time_us": event["time_us"] + 10**6 * turn, "frames": list(event["frames"])}
            for event in trace
        ]
        for turn in range(3)
    ]
    snapshot["device_traces"][0] = [event for part in again for event in part]
    large = tmp_path / "large.pickle"
    large.write_bytes(pickle.dumps(snapshot))
    program = (
        "import resource, sys; from pathlib import Path; import numpy; "
        "from trine.record.readers import memory_snapshot as m; "
        "now = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024; before = now(); "
        "m.open_job(Path(sys.argv[1])).rank(0); print(now() - before)"
    )
    for path in (small, large):
        ran = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert int(ran.stdout) <= 4 * path.stat().st_size + 64 * MIB, path
