"""Reads ahead and writes behind run beside the training: held until the training has gone on, they still come to their end.

No clock decides. Each read or write waits for an event that the training thread sets further on in the same step. Were the
work done where it is asked for, that event could never come, and only a timeout would end the wait; the controls do just that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import offload_cases
import optim_cases
import pytest
import torch

import trine
from trine.optim.runtime import disk
from trine.optim.runtime.disk import Disk, OnDisk
from trine.optim.runtime.tiers import block_parameters, tiled_step
from trine.optim.runtime.tiers.block_parameters import BlockParameters
from trine.optim.runtime.tiers.files import Region
from trine.optim.runtime.tiers.tiled_step import TiledStep
from trine.samples.gpt import loss_of

#: How long a wait that never ends is waited for, in seconds: where the test would fail, and in its control.
PATIENCE, SHORT = 30.0, 0.02


class Inline:
    """In the place of the threads: does at once what it is given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self, **how: Any) -> None:
        pass


class Held:
    """Whether each read and write that waited was let go by the training thread (``True``), or by its timeout."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.reads: list[bool] = []
        self.writes: list[bool] = []
        #: Set unless somebody has to come further first.
        self.event = threading.Event()
        self.event.set()

    def wait(self, kind: str, event: threading.Event) -> None:
        getattr(self, kind).append(event.wait(self._patience))


@pytest.fixture(params=["threads", "inline"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Held:
    """With the threads, and as a control without them."""
    if request.param == "threads":
        return Held(PATIENCE)
    for module in (disk, block_parameters, tiled_step):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)
    return Held(SHORT)


def hold(found: list[bool], held: Held) -> None:
    """All were let go by the training thread, where there are threads; none where there are none."""
    assert found
    assert all(found) if held._patience == PATIENCE else not any(found)


def hold_tiles(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is read no sooner than the one before is updated, and written no sooner than the next one is."""
    updating: list[threading.Event] = []
    tile_of: dict[tuple[int, int], int] = {}  # (id of a region, first element) → place of its tile
    run, update = TiledStep._run, TiledStep._update
    read_all, write_all = tiled_step.read_all, tiled_step.write_all
    begun = [0]

    def run_held(self: TiledStep) -> None:
        updating[:] = [threading.Event() for _ in self._tiles]
        begun[0] = 0
        for place, tile in enumerate(self._tiles):
            for span in tile:
                for region in self.slots[span.slot].regions.values():
                    tile_of[id(region), span.start] = place
        run(self)

    def update_held(self: TiledStep, tile: Any) -> None:
        updating[begun[0]].set()
        begun[0] += 1
        update(self, tile)

    def read_held(reads: list[Any]) -> None:
        place = tile_of[id(reads[0][0]), reads[0][1]]
        if place:
            held.wait("reads", updating[place - 1])
        read_all(reads)

    def write_held(writes: list[Any]) -> None:
        place = tile_of[id(writes[0][0]), writes[0][1]]
        if place + 1 < len(updating):
            held.wait("writes", updating[place + 1])
        write_all(writes)

    monkeypatch.setattr(TiledStep, "_run", run_held)
    monkeypatch.setattr(TiledStep, "_update", update_held)
    monkeypatch.setattr(tiled_step, "read_all", read_held)
    monkeypatch.setattr(tiled_step, "write_all", write_held)


def test_tiles_are_read_ahead_and_written_behind(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(**changes: Any) -> offload_cases.Trained:
        model = optim_cases.small_gpt(layers=1)
        batches = optim_cases.batches(2, 4)
        return offload_cases.train(changes, model, batches)

    plain = trained()
    hold_tiles(held, monkeypatch)
    on_disk = offload_cases.disk(tmp_path) | {"offload.tile_mib": 0.05}
    assert plain.is_bitwise(trained(**on_disk))
    hold(held.writes, held)
    hold(held.reads, held)


@pytest.mark.slow
def test_a_block_is_read_ahead_of_the_one_that_computes(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched ahead arrives although it is held until the training has gone on to the block at hand."""
    ahead, start, read_whole = BlockParameters._ahead, BlockParameters._start, Region.read_whole
    fetched: set[int] = set()  # regions that are fetched ahead

    def ahead_held(self: BlockParameters, block: Any, direction: int) -> None:
        held.event.clear()
        try:
            ahead(self, block, direction)
        finally:
            held.event.set()

    def start_held(self: BlockParameters, block: Any) -> None:
        regions = {id(each.region) for each in block.held}
        is_wanted_now = held.event.is_set()
        (fetched.difference_update if is_wanted_now else fetched.update)(regions)
        start(self, block)

    def read_held(self: Region, into: torch.Tensor) -> None:
        if id(self) in fetched:
            held.wait("reads", held.event)
        read_whole(self, into)

    plain = offload_cases.train({})
    monkeypatch.setattr(BlockParameters, "_ahead", ahead_held)
    monkeypatch.setattr(BlockParameters, "_start", start_held)
    monkeypatch.setattr(Region, "read_whole", read_held)
    assert plain.is_bitwise(offload_cases.train(offload_cases.whole(tmp_path)))
    assert len(held.reads) >= 2 * 3  # forward and backward, of four blocks
    hold(held.reads, held)


def test_activations_are_written_behind_the_forward_and_read_ahead_of_the_backward(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_over, asked = threading.Event(), threading.Event()
    write, read, prepare = Disk._write, Disk._read, OnDisk.prepare

    def loss_held(model: Any, batch: Any) -> Any:
        forward_over.clear()
        try:
            return loss_of(model, batch)
        finally:
            forward_over.set()

    def write_held(self: Disk, entry: OnDisk) -> None:
        held.wait("writes", forward_over)
        write(self, entry)

    def read_held(self: Disk, entry: OnDisk) -> torch.Tensor:
        held.wait("reads", asked)
        return read(self, entry)

    def prepare_held(self: OnDisk) -> None:
        asked.clear()
        try:
            prepare(self)
        finally:
            asked.set()

    changes = {"offload.activations": "nvme", "offload.path": str(tmp_path)}
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_held)
    try:
        batches = optim_cases.batches(3, 4)
        engine.train_step(batches[0])  # the disk's rates are measured in it
        monkeypatch.setattr(Disk, "_write", write_held)
        monkeypatch.setattr(Disk, "_read", read_held)
        monkeypatch.setattr(OnDisk, "prepare", prepare_held)
        for batch in batches[1:]:
            engine.train_step(batch)
    finally:
        engine.close()
    hold(held.writes, held)
    hold(held.reads, held)
