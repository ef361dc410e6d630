"""Faults of ours, of the disk, and of the process: none reaches the loop, and what was written can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled_loops import Training, read, steps_of

import trine
from trine.profiler import collectors as collectors_module
from trine.profiler.background import Background
from trine.profiler.memory import MemoryReader
from trine.profiler.session import Session
from trine.record.store import RankWriter

TESTS = Path(__file__).parents[1]


def _train(path: Path, **options: Any) -> list[float]:
    """Losses of a profiled training."""
    training = Training()
    losses = []
    with training.profile(path, **options) as prof:
        for ids in prof.steps(training.loader):
            loss = training.step(ids)
            prof.log(loss=loss)
            losses.append(loss.item())
    return losses


def _plain() -> list[float]:
    training = Training()
    return [training.step(ids).item() for ids in training.loader]


class _Broken:
    """A collector that fails where it is told to."""

    name = "broken"

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            if name == self._where:
                raise RuntimeError(f"injected in {name}")
            return {}

        return call


@pytest.mark.parametrize("where", ["start", "drain", "stop", "open"])
def test_a_fault_in_the_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def broken(note: Any) -> Any:
        if where == "open":
            raise RuntimeError("injected in open")
        return _Broken(where)

    monkeypatch.setattr(collectors_module, "open_source", broken)
    assert _train(tmp_path / "run") == _plain()
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 6
    assert [note.id for note in rank.quality] == ["collector-failed"]
    assert f"injected in {where}" in rank.quality[0].message
    assert caplog.text.count("collector failed") == 1
    assert rank.metadata["state"] == "finished"


@pytest.mark.parametrize("where", ["begin_step", "end_step"])
def test_a_fault_in_counting_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(collectors_module, "FlopCounter", lambda note: _Broken(where))
    assert _train(tmp_path / "run", flops=True) == _plain()
    assert [note.id for note in read(tmp_path / "run").quality] == ["collector-failed"]


@pytest.mark.parametrize(
    ("owner", "name", "steps"),
    [
        (MemoryReader, "read", 6),
        (Session, "measure", 6),
        (Session, "take_values", 6),
        (Session, "end_part", 0),
        (Session, "_start", 0),
    ],
)
def test_a_fault_in_the_session_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    steps: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(owner, name, fail)
    assert _train(tmp_path / "run") == _plain()
    assert caplog.text.count("collector failed") == 1
    if name != "_start":
        recorded = read(tmp_path / "run").steps
        assert (0 if recorded is None else len(recorded)) == steps


def test_a_fault_in_the_background_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Background, "flush", fail)
    assert _train(tmp_path / "run") == _plain()
    assert "injected" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "trine-record"]


def test_a_path_that_cannot_be_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert _train(tmp_path / "file") == _plain()
    assert _train(tmp_path / "file" / "below") == _plain()
    assert caplog.text.count("cannot be written") == 2
    assert len(caplog.records) == 2


def test_a_folder_that_takes_no_files(caplog: pytest.LogCaptureFixture) -> None:
    # Permissions do not stop root, /proc does.
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    assert _train(Path("/proc/trine-run")) == _plain()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trine.profiler.background._RETRY_S", 0.3)
    monkeypatch.setattr("trine.profiler.background._PERIOD_S", 0.1)
    full = threading.Event()
    written = RankWriter.append

    def append(self: RankWriter, *arguments: Any, **keywords: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        written(self, *arguments, **keywords)

    monkeypatch.setattr(RankWriter, "append", append)
    training = Training(batches=60)
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            if number == 20:
                time.sleep(0.3)  # so that the first are written
                full.set()
            if number == 40:
                full.clear()
            training.step(ids)
            time.sleep(0.02)
        time.sleep(0.5)
    rank = read(tmp_path / "run")
    assert rank.steps is not None
    recorded = rank.steps["index"].tolist()
    assert recorded[:20] == list(range(20))
    assert recorded[-1] == 59
    assert {"collector-failed", "overflow"} == {note.id for note in rank.quality}
    assert "No space left" in caplog.text
    assert len(caplog.records) == 1


def test_a_full_file_system(tmp_path: Path) -> None:
    """The same on a real one of a megabyte, where root may mount it."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        fill = mount / "filler"
        with fill.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"\0" * 4096)
        assert _train(mount / "run") == _plain()
        fill.unlink()
        assert _train(mount / "run") == _plain()
        assert len(steps_of(mount / "run")) == 6
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True, timeout=30)


def _killed_after(path: Path, seconds: float) -> list[tuple[int, int]]:
    """Start a training, kill it with SIGKILL, and give its (finished step, time) lines."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "killed_training.py"), str(path)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    lines = []
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        lines.append(first)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines.append(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.stdout.close()
        process.wait(timeout=30)
    assert process.returncode == -signal.SIGKILL
    pairs = [tuple(map(int, line.split())) for line in lines if line.endswith(b"\n")]
    return [(pair[0], pair[1]) for pair in pairs]


@pytest.mark.slow
def test_killed_at_any_instant_only_the_last_second_is_missing(tmp_path: Path) -> None:
    finished = _killed_after(tmp_path / "run", seconds=1.9)
    killed_ns = finished[-1][1]
    rank = read(tmp_path / "run")
    assert rank.steps is not None
    recorded = set(rank.steps["index"].tolist())
    due = {number for number, time_ns in finished if time_ns < killed_ns - 1_000_000_000}
    assert due <= recorded
    assert recorded == set(range(len(recorded)))
    assert rank.metadata["state"] == "killed"
    assert "killed" in {note.id for note in rank.quality}
    assert len(due) > 20  # the test would pass on nothing otherwise


def test_more_steps_than_can_be_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.profiler.parts.MOST_WAITING", 4)
    monkeypatch.setattr("trine.profiler.background._PERIOD_S", 5.0)
    _train(tmp_path / "run")
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 4
    assert any(note.id == "overflow" and "2 steps" in note.message for note in rank.quality)


@pytest.mark.parametrize("options", [{}, {"flops": True, "windows": (1, 3)}])
def test_losses_and_random_numbers_are_bitwise_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = _plain()
    after_plain = torch.random.get_rng_state()
    profiled = _train(tmp_path / "run", **options)
    assert [loss.hex() for loss in profiled] == [loss.hex() for loss in plain]
    assert torch.equal(torch.random.get_rng_state(), after_plain)
    assert len(steps_of(tmp_path / "run")) == 6


def test_profiling_does_not_import_what_it_does_not_need(tmp_path: Path) -> None:
    script = "import sys, trine, trine.profiler; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
    assert trine.profile is not None
