"""What the tests of checkpoints run on each rank; importable by spawned processes."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import layout_checkpoints as layouts
import torch
import zero_cases
from refusals import refusal_of
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import trine
from trine.samples.gpt import loss_of

__all__: list[str] = []


@contextmanager
def warnings_of_trine() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trine").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("trine").removeHandler(handler)


def rounding(rank: int, folder: str) -> list[str]:
    """What a rank says that loads into a model of another type."""
    engine = zero_cases.made_engine({})
    engine.model.bfloat16()
    with warnings_of_trine() as said:
        engine.load(folder)
    engine.close()
    return [line for line in said if "rounded" in line]


# --- in the background -------------------------------------------------------------------------


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Background writers wait for the event."""
    from trine.optim.runtime.checkpoints import background

    may_write = threading.Event()
    real = background.written

    def waiting(*arguments: Any) -> Path:
        assert may_write.wait(60)
        return real(*arguments)

    with mock.patch.object(background, "written", waiting):
        yield may_write


def background(rank: int, changes: dict[str, Any], folder: str) -> dict[str, Any]:
    """Training goes on before anything is written; what is written is the state at the call."""
    data = zero_cases.ranks_of(zero_cases.optim_cases.batches(7, 8), rank)
    torch.manual_seed(100 + rank)
    first = zero_cases.made_engine(changes)
    for batch in data[:3]:
        first.train_step(batch)
    buffers: list[int] = []
    with held_back() as may_write:
        handle = first.save(folder, asynchronous=True)
        went_on = [float(first.train_step(batch)) for batch in data[3:]]
        early = handle.done(), Path(folder).exists()
        may_write.set()
        path = handle.result(60)
        buffers = [buffer.data_ptr() for buffer in first._keeper._background._buffers.values()]
    second = zero_cases.made_engine(changes)
    step = second.load(folder)
    again = [float(second.train_step(batch)) for batch in data[3:]]
    first.save(folder, asynchronous=True).result(60)
    reused = buffers == [buffer.data_ptr() for buffer in first._keeper._background._buffers.values()]
    same = zero_cases.digest(first.model) == zero_cases.digest(second.model)
    for engine in (first, second):
        engine.close()
    return {
        "early": early,
        "path": str(path),
        "step": step,
        "losses": went_on == again,
        "bits": same,
        "reused": reused,
        "done": handle.done(),
    }


def background_failure(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1's disk is full in the background: told once, on every rank, and the checkpoint before stays."""
    from trine.optim.runtime.checkpoints import writing

    engine = zero_cases.made_engine({"zero.stage": 1})
    engine.save(folder)
    batch = zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0]
    engine.train_step(batch)
    real = writing.write_whole

    def failing(*arguments: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    refusal = refusal_of
    with mock.patch.object(writing, "write_whole", failing):
        handle = engine.save(folder, asynchronous=True)
        if rank == 0:  # only one rank asks for it
            asked = refusal(lambda: handle.result(60))
        else:
            asked = ""
            while not handle.done():
                pass
        told = refusal(lambda: engine.save(folder))
        handle = engine.save(folder, asynchronous=True)
        closing = refusal(engine._keeper.settle)
    stays = engine.load(folder)
    engine.train_step(batch)
    handle = engine.save(folder, asynchronous=True)
    handle.result(60)
    saved = engine.load(folder)
    engine.close()
    return {"asked": asked, "told": told, "closing": closing, "stays": stays, "saved": saved}


def closed_while_saving(rank: int, folder: str) -> bool:
    engine = zero_cases.made_engine({})
    with held_back() as may_write:
        engine.save(folder, asynchronous=True)
        threading.Timer(0.2, may_write.set).start()
        engine.close()
        return (Path(folder) / "trine.json").exists()


# --- damage ------------------------------------------------------------------------------------


def loads(rank: int, changes: dict[str, Any], folder: str, newest: bool = False) -> dict[str, Any]:
    """What a load says, what it loads, and whether the engine trains afterwards."""
    engine = zero_cases.made_engine(changes)
    before = zero_cases.digest(engine.model)
    with warnings_of_trine() as warned:
        said = refusal_of(lambda: engine.load(folder, newest=newest))
    batch = zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0]
    found = {
        "said": said,
        "step": engine.step_index,
        "warned": warned,
        "untouched": zero_cases.digest(engine.model) == before,
        "trains": refusal_of(lambda: engine.train_step(batch)),
    }
    engine.close()
    return found


def series(rank: int, changes: dict[str, Any], folder: str, count: int, keep: int) -> list[str]:
    """Save so many times, a step between."""
    engine = zero_cases.made_engine(changes)
    batch = zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0]
    saved = []
    for _ in range(count):
        engine.train_step(batch)
        saved.append(engine.save(folder, keep=keep).name)
    engine.close()
    return saved


def short_of_room(rank: int, folder: str, limited: int | None) -> dict[str, Any]:
    """The disk is full, or files of rank ``limited`` may have but so many bytes."""
    engine = zero_cases.made_engine({"zero.stage": 1})
    batch = zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0]
    engine.save(folder)
    engine.train_step(batch)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        said = [refusal_of(lambda: engine.save(folder))]
        if limited is not None:
            handle = engine.save(folder, asynchronous=True)
            said.append(refusal_of(lambda: handle.result(60)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.load(folder)
    found = {"said": said, "stays": engine.step_index, "left": Path(f"{folder}.partial").exists()}
    engine.close()
    return found


def copy_failure(rank: int, folder: str, failing: int) -> dict[str, Any]:
    """Rank ``failing`` has no memory for the copy of what it is to write in the background, or for what it reads."""
    from trine.optim.runtime.checkpoints import reading
    from trine.optim.runtime.checkpoints.background import Background

    engine = zero_cases.made_engine({"zero.stage": 1})
    engine.train_step(zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0])

    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    copy = fails if rank == failing else Background._copy
    with mock.patch.object(Background, "_copy", copy):
        said = refusal_of(lambda: engine.save(folder, asynchronous=True))
    path = engine.save(folder, asynchronous=True).result(60)  # the control
    with mock.patch.object(reading, "empty_slots", fails if rank == failing else reading.empty_slots):
        unread = refusal_of(lambda: engine.load(folder))
    engine.load(folder)
    engine.close()
    return {"said": said, "path": str(path), "unread": unread}


def group_ended_while_saving(rank: int, ranks: int, folder: str) -> tuple[str, str, bool]:
    """What the handle and close() say where the program ends its group under a save; whether a checkpoint is there.

    Rank 0 asks the handle, the others do not. By then all ranks have begun, and none has written.
    """
    from trine.optim.runtime.checkpoints import background

    engine = zero_cases.made_engine({"zero.stage": 1})
    engine.train_step(zero_cases.ranks_of(zero_cases.optim_cases.batches(1, 8), rank)[0])
    ended = threading.Event()
    written = background.written

    def late(*arguments: Any) -> Path:
        ended.wait(60)
        return written(*arguments)

    with mock.patch.object(background, "written", late):
        handle = engine.save(folder, asynchronous=True)
        torch.distributed.destroy_process_group()
        ended.set()
        asked = refusal_of(lambda: handle.result(60), "whole") if rank == 0 else ""
        closing = refusal_of(engine.close, "closed")
    return asked, closing, Path(folder).exists()


# --- going on ----------------------------------------------------------------------------------


def resumed(rank: int, changes: dict[str, Any], model: dict[str, Any], folder: str, workers: int = 0) -> Any:
    """A run that is interrupted in the middle of its second epoch, and one that is not: losses and everything saved.

    With dropout, a schedule, two groups, and samples shuffled by a DistributedSampler that workers read.
    """

    def made(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        engine = layouts.engine_of(changes, {"dropout": 0.1, **model}, seed)
        pairs = zero_cases.optim_cases.batches(1, 24)[0]
        sampler = DistributedSampler(
            TensorDataset(*pairs), engine.data_ranks, engine.data_rank, shuffle=True, seed=5
        )
        share = 4 // engine.data_ranks
        return engine, sampler, DataLoader(sampler.dataset, share, sampler=sampler, num_workers=workers)

    def run(engine: Any, sampler: Any, loader: Any, after: Callable[[Any], None]) -> list[float]:
        losses = []
        for epoch in range(engine.epoch, 3):
            sampler.set_epoch(epoch)
            for batch in engine.steps(loader):
                losses.append(float(engine.train_step(batch)))
                after(engine)
        return losses

    def save(engine: Any) -> None:
        if engine.position == (1, 2):
            engine.save(f"{folder}/middle")

    with may_have_children():
        engine, sampler, loader = made(100 + rank * (engine_seed_differs(changes)))
        whole = run(engine, sampler, loader, save)
        engine.save(f"{folder}/whole")
        engine.close()
        engine, sampler, loader = made(7)
        step = engine.load(f"{folder}/middle")
        rest = run(engine, sampler, loader, lambda _: None)
        engine.save(f"{folder}/resumed")
        engine.close()
    return step, whole[step:], rest


@contextmanager
def may_have_children() -> Iterator[None]:
    """A pool's ranks are daemons, and a daemon's loader may not start workers."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings["daemon"]
    settings["daemon"] = False
    try:
        yield
    finally:
        settings["daemon"] = before


def engine_seed_differs(changes: dict[str, Any]) -> bool:
    """Ranks of one tensor, context or pipeline group draw alike; replicas draw numbers of their own."""
    return not any(key.startswith("parallel.") for key in changes)


def redistributed(rank: int, changes: dict[str, Any], folder: str, save: bool) -> list[float]:
    """Error feedback, summed over ranks by parameter: before a save, and after a load on other ranks."""
    engine = zero_cases.made_engine(changes, dropout=0.0)
    if save:
        for batch in zero_cases.ranks_of(zero_cases.optim_cases.batches(3, 8), rank):
            engine.train_step(batch)
        engine.save(folder)
    else:
        engine.load(folder)
    kept = engine._assembly.state["compression"].state_dict()["lossy"]["residuals"]
    means = []
    for name in sorted(engine.parameters()):
        mine = kept[name].double() if name in kept else torch.zeros(engine.parameters()[name].numel())
        total = mine.double().clone()
        torch.distributed.all_reduce(total)
        means.append(
            float((total * torch.arange(1.0, total.numel() + 1)).sum()) / torch.distributed.get_world_size()
        )
    engine.close()
    return means


def plain_engine() -> Any:
    """One process, for what needs no ranks."""
    model = zero_cases.optim_cases.small_gpt()
    return trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_of)


def running_statistics(rank: int, changes: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Of a batch norm before two ranks' checkpoint, on this rank, and after it was loaded."""

    def made() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        config = trine.Config().with_changes(changes)
        loss_fn = lambda model, batch: model(batch).square().mean()
        return model, trine.optimize(model, optimizer, config, loss_fn=loss_fn)

    model, engine = made()
    engine.train_step(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))
    engine.save(folder)
    before = model[1].running_mean.tolist()  # type: ignore[index]
    engine.close()
    model, engine = made()
    engine.load(folder)
    engine.close()
    return before, model[1].running_mean.tolist()  # type: ignore[index]
