"""Both sources of collectives against two real gloo ranks: nothing missed, nothing torn, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_pool import RankPool

from trine.profiler import observer_library
from trine.profiler.collectives import PythonSource
from trine.profiler.observer import ObserverSource
from trine.profiler.observer_build import ensure_built
from trine.profiler.spelling import standard_operation
from trine.record.model import MISSING, SCHEMAS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = ensure_built(wait=True)
    assert built is not None, "the observer must build where the tests run: is there a C++ compiler?"
    return built


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def run(pool: RankPool, case: str, library: Path | None) -> list[Any]:
    return pool.run(f"collective_cases:{case}", None if library is None else str(library))


def test_every_operation_has_its_group_order_size_and_times(pool: RankPool, library: Path) -> None:
    names = pool.run("collective_cases:names")[0]
    for result in run(pool, "every_operation", library):
        rows = result["rows"]
        world, pair = names["world"], names["pair"]
        told = [(row["operation"], row["group"], row["bytes"], row["dtype"]) for row in rows]
        # The all-reduce in "own" runs on other threads, but the script waits for each call.
        own = rows[5]["group"]
        assert told == [
            ("all_reduce", world, 4000, "float32"),
            ("all_reduce", pair, 2000, "bfloat16"),
            ("all_gather", world, 8000, "float32"),
            ("all_to_all", pair, 4000, "float32"),
            ("broadcast", world, 4000, "float32"),
            ("all_reduce", own, 8000, "int64"),
            ("all_reduce", pair, 4000, "float32"),
            ("barrier", world, 0, None),
        ]
        assert own not in (world, pair, None)
        assert rows[2]["in_bytes"] == 4000
        begun, ended = result["span"]
        ends = [begun]
        for row in rows:
            assert ends[-1] <= row["start_ns"] <= row["end_ns"] <= ended
            assert row["issued_ns"] is None or begun - 1_000_000 <= row["issued_ns"] <= row["start_ns"]
            ends.append(row["end_ns"])
        assert any(row["issued_ns"] is not None for row in rows)
        assert result["notes"] == []
    first, second = (result["rows"] for result in run(pool, "every_operation", library))
    keys = [
        [(row["group"], row["sequence"]) for row in rows if row["group"] != rows[5]["group"]]
        for rows in (first, second)
    ]
    assert keys[0] == keys[1]
    for name in (names["world"], names["pair"]):
        numbers = [row["sequence"] for row in first if row["group"] == name]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] > 1  # what came before was counted


def test_point_to_point_names_peer_and_group(pool: RankPool, library: Path) -> None:
    names = pool.run("collective_cases:names")[0]
    results = run(pool, "point_to_point", library)
    for rank, result in enumerate(results):
        rows = result["rows"]
        assert {row["peer"] for row in rows} == {1 - rank}
        assert [row["group"] for row in rows] == [names["world"]] * 2 + [names["pair"]] * 4
        first = ["send", "recv"] if rank == 0 else ["recv", "send"]
        assert [row["operation"] for row in rows] == first + ["send", "recv"] * 2
        assert [row["sequence"] for row in rows if row["group"] == names["pair"]] == [1, 1, 2, 2]
        assert all(row["start_ns"] <= row["end_ns"] for row in rows)
    assert {row["bytes"] for row in results[0]["rows"] if row["group"] == names["world"]} == {40, 80}


def test_data_parallel_buckets_are_all_seen(pool: RankPool, library: Path) -> None:
    for result in run(pool, "data_parallel", library):
        reduced = [row for row in result["rows"] if row["operation"] == "all_reduce"]
        buckets = [int(size) for size in result["buckets"].split(",")]
        assert len(buckets) > 1
        assert [row["bytes"] for row in reduced] == buckets * 3
        assert sum(buckets) == result["gradients"]
        assert len({row["sequence"] for row in reduced}) == len(reduced)


def test_fully_sharded_gathers_are_all_seen(pool: RankPool, library: Path) -> None:
    for result in run(pool, "fully_sharded", library):
        gathered = [row for row in result["rows"] if row["operation"] == "all_gather"]
        # Three layers in forward, two again in backward: the last stays gathered.
        assert len(gathered) >= 5
        assert {row["bytes"] for row in gathered} == {32 * 32 * 4}
        # gloo runs a reduce-scatter as an all-reduce of the whole input, and that is what is recorded.
        assert [row["bytes"] for row in result["rows"] if row["operation"] == "all_reduce"] == [
            32 * 32 * 4
        ] * 3
        assert {row["group"] for row in result["rows"]} == {result["group"]}


@pytest.mark.parametrize("held", [False, True])
def test_threads_of_a_destroyed_group_hide_no_other_group(pool: RankPool, library: Path, held: bool) -> None:
    world = pool.run("collective_cases:names")[0]["world"]
    for result in pool.run("collective_cases:beside_a_destroyed_group", str(library), held, False, False):
        fresh = result["group"]
        assert [(row["operation"], row["group"], row["bytes"]) for row in result["rows"]] == [
            row
            for size in (400, 800, 1200)
            for row in (
                ("all_to_all", fresh, size),
                ("all_gather", fresh, 2 * size),
                ("all_reduce", world, size),
            )
        ]
        assert [row["sequence"] for row in result["rows"] if row["group"] == fresh] == [1, 2, 3, 4, 5, 6]
        assert result["notes"] == []


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_group_that_is_told_late_is_numbered_on(pool: RankPool, library: Path, unnamed: bool) -> None:
    for result in pool.run("collective_cases:beside_a_destroyed_group", str(library), True, True, unnamed):
        early, later = result["rows"][:3], result["rows"][3:]
        assert {row["group"] for row in early if row["operation"] != "all_reduce"} == {None}
        assert [row["sequence"] for row in later if row["group"] == result["group"]] == [3, 4, 5, 6, 7, 8, 9]
        assert [note[0] for note in result["notes"]] == ["collectives-group"]


def test_python_source_sees_the_same_calls_and_says_what_it_cannot(pool: RankPool) -> None:
    for result in run(pool, "every_operation", None):
        rows = result["rows"]
        assert [row["operation"] for row in rows] == [
            "all_reduce",
            "all_reduce",
            "all_gather",
            "all_to_all",
            "broadcast",
            "all_reduce",
            "all_reduce",
            "barrier",
        ]
        timed = [row for row in rows if row["end_ns"] is not None]
        # The functional all-reduce is issued by C++: seen in the flight recorder, without times.
        assert len(timed) == len(rows) - 1
        assert all(row["start_ns"] == row["issued_ns"] <= row["end_ns"] for row in timed)
        assert all(row["sequence"] is not None and row["group"] is not None for row in rows)
        assert [row["bytes"] for row in rows[:5]] == [4000, 2000, 8000, 4000, 4000]


def test_python_source_finds_data_parallel_in_the_flight_recorder(pool: RankPool) -> None:
    for result in run(pool, "data_parallel", None):
        reduced = [row for row in result["rows"] if row["operation"] == "all_reduce"]
        assert sum(row["bytes"] for row in reduced) == 3 * result["gradients"]
        assert all(row["start_ns"] is None and row["issued_ns"] is not None for row in reduced)


@pytest.mark.parametrize("source", ["observer", "python"])
def test_nothing_stays_behind(pool: RankPool, library: Path, source: str) -> None:
    results = run(pool, "after_stop", library if source == "observer" else None)
    for rank, result in enumerate(results):
        assert result["seen"] >= 1
        assert result["later"] == 0
        assert result["total"] == [3.0, 3.0, 3.0]
        assert result["restored"]
        assert rank == 0 or result["received"] == [4.0, 5.0]


def test_overflow_is_counted_and_ends_the_numbering(pool: RankPool, library: Path) -> None:
    for result in run(pool, "overflow", library):
        assert result["kept"] == 4
        assert [note[0] for note in result["notes"]] == ["collectives-dropped"]
        assert "6 collectives" in result["notes"][0][2]
        assert [row["sequence"] is None for row in result["rows"]][-1]


def test_a_wrong_count_is_contradicted(pool: RankPool, library: Path) -> None:
    for result in run(pool, "wrong_belief", library):
        assert "collectives-sequence" in [note[0] for note in result["notes"]]
        assert all(row["sequence"] is None for row in result["rows"])


def test_rows_are_not_torn_when_many_threads_write(library: Path) -> None:
    import torch

    source = ObserverSource(library, lambda *note: None)
    source.start()
    threads, calls = 6, 400
    done = threading.Event()
    seen: list[Any] = []

    def work(number: int) -> None:
        for _ in range(calls):
            with torch.autograd.profiler.record_function(f"gloo:operation_{number}"):
                pass

    def read() -> None:
        while not done.is_set():
            seen.append(source._library.drain())

    reader = threading.Thread(target=read)
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in (reader, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    source.stop()
    seen.append(source._library.drain())
    rows = np.concatenate(seen)
    assert len(rows) == threads * calls
    assert len(np.unique(rows["order"])) == len(rows)
    assert (rows["start_ns"] <= rows["end_ns"]).all()
    for number in range(threads):
        assert (rows["name"] == f"gloo:operation_{number}".encode()).sum() == calls


def test_annotations_of_the_user_are_not_collectives(library: Path) -> None:
    import torch

    source = ObserverSource(library, lambda *note: None)
    source.start()
    for name in ("forward", "nccl", "gloo", "my:all_reduce", ""):
        with torch.autograd.profiler.record_function(name):
            torch.ones(1)
    source.stop()
    assert source.drain() == {}


def test_nccl_rows_tell_issue_and_description_but_no_times(library: Path) -> None:
    """No NCCL here: rows as its issuing thread gives them are laid into the ring's own structure."""
    source = ObserverSource(library, lambda *note: None)
    raw = np.zeros(2, dtype=observer_library.ROW)
    raw["name"] = [b"nccl:_all_gather_base", b"fsdp.layers.3"]
    raw["operation"] = [b"_allgather_base", b"_reduce_scatter_base"]
    raw["group"] = b"7"
    raw["group_size"], raw["dtype"] = 8, 15
    raw["in_elements"], raw["out_elements"] = [100, 800], [800, 100]
    raw["sequence"], raw["start_ns"], raw["end_ns"], raw["thread"] = [4, 5], [10, 20], [12, 22], 1
    rows = source._describe(raw)
    source._number(rows)
    columns = source._columns(rows)
    assert columns["operation"] == ["all_gather", "reduce_scatter"]
    assert columns["label"] == [None, "fsdp.layers.3"]
    assert columns["group"] == ["7", "7"]
    assert columns["sequence"].tolist() == [4, 5]
    assert columns["bytes"].tolist() == [1600, 1600]
    assert columns["issued_ns"].tolist() == [10, 20]
    assert columns["start_ns"].tolist() == columns["end_ns"].tolist() == [MISSING, MISSING]
    assert columns["state"] == ["issued", "issued"]
    assert set(columns) <= set(SCHEMAS["collectives"])


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_all_gather_base", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("alltoall_base", "all_to_all"),
        ("all_to_all_single", "all_to_all"),
        ("send 0->1", "send"),
        ("recv_anysource", "recv"),
        ("monitored_barrier", "barrier"),
        ("broadcast", "broadcast"),
    ],
)
def test_operations_have_one_spelling(name: str, operation: str) -> None:
    assert standard_operation(name) == operation


@pytest.mark.parametrize("fails", [True, False])
def test_a_work_without_a_future_is_said_once(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    from torch._C._distributed_c10d import ProcessGroup

    class Future:
        def add_done_callback(self, callback: Any) -> None:
            callback(self)

    class Work:
        def get_future(self) -> Future:
            if fails:
                raise RuntimeError("no future\nhere")
            return Future()

    monkeypatch.setattr(ProcessGroup, "broadcast", lambda *arguments: Work())
    notes: list[tuple[str, ...]] = []
    source = PythonSource(lambda *note: notes.append(note))
    source.start()
    try:
        ProcessGroup.broadcast(ProcessGroup(0, 1), [])
        source.drain()
        source.drain()
    finally:
        source.stop()
    told = [message for identity, _, message in notes if identity == "collectives-ends"]
    assert len(told) == int(fails)
    assert all("broadcast: no future here" in message for message in told)


def test_a_file_that_is_no_observer_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "observer.so"
    wrong.write_bytes(b"not a library")
    with pytest.raises(OSError):
        ObserverSource(wrong, lambda *note: None)
    with pytest.raises(OSError, match="lacks"):
        ObserverSource(Path("libm.so.6"), lambda *note: None)


@pytest.mark.slow
@pytest.mark.timing
def test_the_observer_costs_less_than_the_python_source(pool: RankPool, library: Path) -> None:
    """Ratios of the same thread's CPU time: the machine may be busy with other things."""
    for cost in run(pool, "costs", library):
        assert cost["observer"] < cost["nothing"] + 15_000
        assert cost["observer"] < cost["python"]
