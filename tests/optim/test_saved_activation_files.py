"""Activations on the host and on disk: files without names, bounded buffers, copies that are waited for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import memory_cases
import optim_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_copies import LazyCopier

import trine
from trine.optim.runtime.buffer_pool import BufferPool
from trine.optim.runtime.disk import Disk
from trine.optim.runtime.host_memory import HostMemory
from trine.optim.runtime.saved_tensors import SavedTensors, Store
from trine.record.errors import TrainingError, UsageError

CPU = torch.device("cpu")


def disk(folder: Path) -> dict[str, Any]:
    return {"offload.activations": "nvme", "offload.path": str(folder)}


def test_a_slow_disk_slows_the_forward_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *a: (time.sleep(0.005), real(*a))[1])
    store = Disk(CPU, tmp_path, staged_bytes=200_000)
    tensors = [torch.randn(10_000) for _ in range(40)]
    entries = []
    for tensor in tensors:
        entries.append(store.put(tensor))
        assert store.host_bytes <= 200_000 + 4 * 45_056
    for tensor, entry in zip(reversed(tensors), reversed(entries), strict=True):
        assert torch.equal(entry.get(), tensor)
    entries.clear()
    del entry
    store.close()


@pytest.mark.parametrize("key", ["offload.activations", "offload.optimizer"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/proc", "no file can be made there"),  # where permissions alone would let root write
        (__file__, "no such folder"),
        ("", "no (such )?folder"),  # not where the program happens to run
        ("x" * 5000, "no such folder"),
        ("\0", "no such folder"),
    ],
)
def test_what_is_no_folder_for_files_is_refused_before_anything_is_changed(
    key: str, path: str, words: str
) -> None:
    model = optim_cases.small_gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=words) as raised:
        trine.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), {key: "nvme", "offload.path": path}
        )
    assert "offload.path" in str(raised.value) and str(raised.value).isprintable()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_file_has_no_name_and_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(disk(tmp_path)),
        loss_fn=memory_cases.loss_of,
    )
    engine.train_step(optim_cases.batches(1, 4)[0])
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() > before
    engine.close()
    assert threading.active_count() == before


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the file's size fails as a full disk does: where space is reserved.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"offload\.path = .* needs \d+ more.*make room") as raised:
            memory_cases.train(disk(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    memory_cases.train(disk(tmp_path))  # there is room again


def test_a_write_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    store = Disk(CPU, tmp_path, staged_bytes=1)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(TrainingError, match=r"offload\.path.*cannot be written: Input/output error"):
        for _ in range(10):
            store.put(torch.randn(5000))
    monkeypatch.undo()
    store.close()


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    store = Disk(CPU, tmp_path)
    tensors = [torch.randn(5000), torch.randn(7001)]
    entries = []
    for tensor in tensors:
        entries.append(store.put(tensor))
        entries[-1].written.result()
    assert all(entry._buffer is None for entry in entries)  # they are on disk alone
    offset = entries[1].extent[1]
    place, file = offset + 28_003, store._file.fileno()  # in the last word, which is half a word
    byte = os.pread(file, 1, place)
    os.pwrite(file, bytes([byte[0] ^ 4]), place)
    with pytest.raises(
        TrainingError, match=r"not what was written there.*start again from a checkpoint"
    ) as raised:
        entries[1].get()
    said = str(raised.value)
    assert f"28004 bytes, at byte {offset} of the file under offload.path = {tmp_path}" in said
    assert "\n" not in said
    buffers = store.host_bytes
    assert torch.equal(entries[0].get(), tensors[0])  # the healthy control, in the buffer that went back
    assert store.host_bytes == buffers
    entries.clear()
    store.close()


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_copies_beside_the_computation_are_waited_for(where: str, tmp_path: Path) -> None:
    """The same code that runs on CUDA streams, with copies that happen as late as they may."""

    def gradients(store: Store | None) -> tuple[torch.Tensor, int]:
        model = optim_cases.small_gpt(layers=4, dropout=0.1)
        saved = SavedTensors(model)
        saved.always_counting = True
        saved.store = store
        torch.manual_seed(0)
        for batch in optim_cases.batches(2, 4):
            with saved():
                loss = memory_cases.loss_of(model, batch)
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), saved.held_bytes

    copier = LazyCopier()
    store = HostMemory(CPU, copier) if where == "cpu" else Disk(CPU, tmp_path, copier=copier)
    ours, held = gradients(store)
    assert torch.equal(ours, gradients(None)[0])
    assert copier.done > 100 and held == 0
    store.close()


def test_a_copy_that_is_not_waited_for_would_show() -> None:
    copier = LazyCopier()
    copier.wait = lambda event, stream: None  # type: ignore[method-assign]
    host = HostMemory(CPU, copier)
    x = torch.randn(5000)
    assert not torch.equal(host.put(x).get(), x)


def test_what_is_changed_while_it_is_copied_is_an_error() -> None:
    host = HostMemory(CPU, LazyCopier())
    x = torch.randn(5000)
    entry = host.put(x)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entry.get()


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=30))
def test_buffers_are_large_enough_and_used_again(sizes: list[int]) -> None:
    pool = BufferPool(pinned=False)
    for size in sizes:
        buffer = pool.take(size)
        assert buffer.numel() >= size
        pool.give_back(buffer)
    before = pool.total_bytes
    again = pool.take(sizes[-1])
    assert pool.total_bytes == before
    pool.give_back(again)
    assert pool.total_bytes <= 3 * (max(sizes) + 4096)


def test_a_finalizer_does_not_wait_for_a_lock(tmp_path: Path) -> None:
    """A garbage collection runs wherever memory is asked for, also on the thread that holds the lock."""
    store = Disk(CPU, tmp_path)
    entries = [store.put(torch.randn(5000))]
    entries[0].written.result()
    other = store.put(torch.randn(5000))  # the store lets go of what is written
    dropping = threading.Thread(target=entries.clear, daemon=True)
    with store._lock, store.pool._lock:
        dropping.start()
        dropping.join(0.5)
        waited = dropping.is_alive()
    dropping.join(5)
    assert store._returned.get(timeout=5)  # the entry is gone
    del other
    store.close()
    assert not waited
