"""What the ranks of tests/profiler/test_collective_sources.py do; each returns the rows that its source observed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from trine.profiler import gloo_threads, observer_library
from trine.profiler.collectives import PythonSource
from trine.profiler.observer import ObserverSource
from trine.record.model import MISSING

Rows = list[dict[str, Any]]

_groups: dict[str, Any] = {}


def group(name: str) -> Any:
    """Subgroups, made once a process: ``pair`` of both ranks, ``own`` of each alone."""
    if not _groups:
        _groups["pair"] = dist.new_group([0, 1], group_desc="a pair")
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _groups["own"] = alone[dist.get_rank()]
    return _groups[name]


class Observed:
    """Runs a source around a block. ``rows`` are what it saw, by start (or issue); ``notes`` what it said."""

    def __init__(
        self,
        library: str | None,
        capacity: int | None = None,
        starting: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it holds no state
    ) -> None:
        self.notes: list[tuple[str, str, str]] = []
        if library is None:
            self.source: Any = PythonSource(self._note)
        else:
            self.source = ObserverSource(Path(library), self._note)
        self.rows: Rows = []
        self._capacity = capacity
        self._starting = starting

    def _note(self, *note: str) -> None:
        self.notes.append(note)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        if self._capacity is not None:
            observer_library.CAPACITY, self._before = self._capacity, observer_library.CAPACITY
        with self._starting:
            self.source.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.05)  # works end on their own threads
        self.drain()
        self.source.stop()
        self.drain()
        if self._capacity is not None:
            observer_library.CAPACITY = self._before
        self.rows.sort(key=lambda row: row["start_ns"] if row["start_ns"] is not None else row["issued_ns"])

    def drain(self) -> None:
        columns = self.source.drain()
        lists = {
            name: values.tolist() if isinstance(values, np.ndarray) else values
            for name, values in columns.items()
        }
        for position in range(len(lists.get("operation", ()))):
            row = {name: values[position] for name, values in lists.items()}
            self.rows.append({name: None if value == MISSING else value for name, value in row.items()})


def names(rank: int) -> dict[str, str]:
    return {
        "world": dist.group.WORLD.group_name,
        "pair": group("pair").group_name,
        "own": group("own").group_name,
    }


def every_operation(rank: int, library: str | None) -> dict[str, Any]:
    pair, own = group("pair"), group("own")
    vector = torch.ones(1000)
    dist.all_reduce(vector)  # before the source starts: counted, not seen
    with Observed(library) as observed:
        begun = time.perf_counter_ns()
        dist.all_reduce(vector)
        dist.all_reduce(vector.to(torch.bfloat16), group=pair)
        dist.all_gather([torch.empty(1000), torch.empty(1000)], vector)
        dist.all_to_all_single(torch.empty(1000), vector, group=pair)
        dist.broadcast(vector, 0)
        dist.all_reduce(vector.to(torch.int64), group=own)
        _functional_collectives.all_reduce(vector, "sum", pair).wait()  # issued by C++
        dist.barrier()
        ended = time.perf_counter_ns()
    return {"rows": observed.rows, "notes": observed.notes, "span": (begun, ended)}


def point_to_point(rank: int, library: str | None) -> dict[str, Any]:
    pair = group("pair")
    other = 1 - rank
    with Observed(library) as observed:
        if rank == 0:
            dist.send(torch.ones(10), 1)
            dist.recv(torch.empty(20), 1)
        else:
            dist.recv(torch.empty(10), 0)
            dist.send(torch.ones(20), 0)
        for _ in range(2):
            operations = [
                dist.P2POp(dist.isend, torch.ones(500), other, group=pair),
                dist.P2POp(dist.irecv, torch.empty(500), other, group=pair),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    return {"rows": observed.rows, "notes": observed.notes}


def data_parallel(rank: int, library: str | None) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    data = torch.randn(4, 64)
    for _ in range(2):  # buckets are rebuilt after the first
        wrapped(data).sum().backward()
    with Observed(library) as observed:
        for _ in range(3):
            wrapped(data).sum().backward()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    buckets = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {"rows": observed.rows, "notes": observed.notes, "gradients": gradients, "buckets": buckets}


def fully_sharded(rank: int, library: str | None) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = torch.randn(4, 32)
    model(data).sum().backward()
    with Observed(library) as observed:
        model(data).sum().backward()
    return {"rows": observed.rows, "notes": observed.notes, "group": mesh.get_group().group_name}


@contextmanager
def _without_the_newest_threads() -> Iterator[None]:
    """As if the two newest worker threads had not run yet."""
    listed = gloo_threads._worker_threads
    gloo_threads._worker_threads = lambda: listed()[:-2]
    try:
        yield
    finally:
        gloo_threads._worker_threads = listed


def beside_a_destroyed_group(
    rank: int, library: str, held: bool, late: bool, unnamed: bool
) -> dict[str, Any]:
    """Groups of two sizes, after one that was destroyed; while it is ``held``, its threads live on.

    ``late``: the flight recorder cannot be read when the first rows are drained. ``unnamed``: when the source starts, the
    two newest threads have not run yet, so they do not bear their name.
    """
    group("pair")
    destroyed: Any = dist.new_group()
    dist.barrier()  # or one rank ends it while the other still connects
    dist.destroy_process_group(destroyed)
    destroyed = destroyed if held else None
    fresh = dist.new_group()
    name = fresh.group_name

    def exchange(size: int) -> None:
        vector = torch.ones(size)
        dist.all_to_all_single(torch.empty(size), vector, group=fresh)
        dist.all_gather([torch.empty(size), torch.empty(size)], vector, group=fresh)
        dist.all_reduce(vector)

    with Observed(library, starting=_without_the_newest_threads() if unnamed else nullcontext()) as observed:
        if late:
            observed.source._flight.available = False
            exchange(50)
            time.sleep(0.05)
            observed.drain()
            observed.source._flight.available = True
            # One thread learns the group; the other ran some of what came before.
            dist.all_to_all_single(torch.empty(70), torch.ones(70), group=fresh)
            time.sleep(0.05)
            observed.drain()
        for size in (100, 200, 300):
            exchange(size)
    dist.barrier()
    dist.destroy_process_group(fresh)
    return {"rows": observed.rows, "notes": observed.notes, "group": name}


def overflow(rank: int, library: str) -> dict[str, Any]:
    vector = torch.ones(10)
    with Observed(library, capacity=4) as observed:
        for _ in range(10):
            dist.all_reduce(vector)
        time.sleep(0.05)
        observed.drain()
        kept = len(observed.rows)
        dist.all_reduce(vector)
    return {"kept": kept, "rows": observed.rows, "notes": observed.notes}


def wrong_belief(rank: int, library: str) -> dict[str, Any]:
    """The source is made to believe a wrong count: the flight recorder must contradict it."""
    with Observed(library) as observed:
        name = dist.group.WORLD.group_name
        observed.source._base[name] = observed.source._base.get(name, 0) - 1
        for size in (10, 20, 30, 40):
            dist.all_reduce(torch.ones(size))
        time.sleep(0.05)
        observed.drain()
    return {"rows": observed.rows, "notes": observed.notes}


def after_stop(rank: int, library: str | None) -> dict[str, Any]:
    before = {
        name: vars(dist.ProcessGroup).get(name) for name in ("allreduce", "send", "recv", "_allgather_base")
    }
    with Observed(library) as observed:
        dist.all_reduce(torch.ones(3))
    seen = len(observed.rows)
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    received = torch.empty(2)
    if rank == 0:
        dist.send(torch.tensor([4.0, 5.0]), 1)
    else:
        dist.recv(received, 0)
    time.sleep(0.05)
    observed.drain()
    restored = all(vars(dist.ProcessGroup).get(name) is method for name, method in before.items())
    return {
        "seen": seen,
        "later": len(observed.rows) - seen,
        "total": total.tolist(),
        "received": received.tolist() if rank else None,
        "restored": restored,
    }


def costs(rank: int, library: str) -> dict[str, float]:
    """CPU time of the issuing thread for one asynchronous all-reduce, in ns: with nothing, and with each source."""
    vector = torch.ones(256)

    def measure() -> float:
        best = float("inf")
        for _ in range(8):
            begun = time.thread_time_ns()
            works = [dist.all_reduce(vector, async_op=True) for _ in range(100)]
            best = min(best, (time.thread_time_ns() - begun) / 100)
            for work in works:
                work.wait()
        return best

    measure()
    found = {"nothing": measure()}
    for name, given in (("observer", library), ("python", None)):
        with Observed(given):
            found[name] = measure()
    return found
