"""Timing on a device, with a device made up: events that become ready later, on a clock of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from profiled_loops import Training, check_partition, phase, read

from trine.profiler import session as session_module
from trine.profiler.background import PendingLoss
from trine.profiler.marks import EventPool


class FakeDevice:
    """A device that runs ``lag_ns`` behind its host; an event is ready once the device has passed it."""

    def __init__(self, lag_ns: int) -> None:
        self.lag_ns = lag_ns
        self.created = 0
        self.waited = 0
        self.capturing = False

    def create(self) -> FakeEvent:
        self.created += 1
        return FakeEvent(self)


class FakeEvent:
    """What the session uses of ``torch.Event``; ``synchronize`` must never be called."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.perf_counter_ns() + self.device.lag_ns

    def query(self) -> bool:
        return time.perf_counter_ns() >= self.at_ns

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "asked before it was ready"
        return (other.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        self.device.waited += 1


def _profile(device: FakeDevice, path: Path, monkeypatch: pytest.MonkeyPatch, body: Any = None) -> Training:
    training = Training(batches=8)
    monkeypatch.setattr(
        session_module.Session,
        "_open_events",
        lambda self: EventPool(device.create, lambda: device.capturing),
    )
    with training.profile(path) as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)
            if body is not None:
                body(number, prof)
    return training


def test_device_times_partition_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag_ns=150_000_000)
    begin = time.time_ns()
    _profile(device, tmp_path / "run", monkeypatch, lambda *_: time.sleep(0.005))
    rank = read(tmp_path / "run")
    assert rank.steps is not None
    assert len(rank.steps) == 8
    assert (phase(rank.steps, "forward") > 0).all()
    assert (phase(rank.steps, "backward") > 0).all()
    assert (phase(rank.steps, "other") >= 4_000_000).all()
    # Steps are neighbours on the device's own time, which began when the host had asked.
    assert rank.steps["start_ns"][0] >= begin
    gaps = rank.steps["start_ns"][1:] - rank.steps["end_ns"][:-1]
    assert (gaps >= 0).all() and (gaps < 3_000_000_000).all()
    assert device.waited == 0


def test_events_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag_ns=0)
    monkeypatch.setattr("trine.profiler.background._PERIOD_S", 0.02)
    _profile(device, tmp_path / "run", monkeypatch, lambda *_: time.sleep(0.05))
    assert device.created < 60  # of about 100 marks


def test_times_that_never_arrive_leave_phases_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(lag_ns=10**12)
    monkeypatch.setattr("trine.profiler.background._LAST_EVENTS_S", 0.1)
    begin = time.monotonic()
    _profile(device, tmp_path / "run", monkeypatch)
    assert time.monotonic() - begin < 30
    import trine

    rank = trine.load(tmp_path / "run").rank(0)
    assert rank.steps is not None and len(rank.steps) == 8
    assert "phases-unknown" in {note.id for note in rank.quality}


def test_a_captured_graph_gets_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag_ns=0)

    def body(number: int, prof: Any) -> None:
        device.capturing = number == 3

    _profile(device, tmp_path / "run", monkeypatch, body)
    import trine

    rank = trine.load(tmp_path / "run").rank(0)
    assert rank.steps is not None and len(rank.steps) == 8
    known = rank.steps["phase_forward_ns"] >= 0
    assert 5 <= known.sum() < 8
    check_partition(rank.steps.select(known))


def test_the_wait_at_the_end_of_backward_is_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DistributedDataParallel on a device: final callbacks wait for its buckets."""
    device = FakeDevice(lag_ns=0)
    training = Training(batches=4)
    monkeypatch.setattr(
        session_module.Session, "_open_events", lambda self: EventPool(device.create, lambda: False)
    )
    engine = torch.autograd.Variable._execution_engine
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            loss = training.loss(ids)
            # What hooks._expose does where the loss is on a device, here by hand since it is not.
            loss.register_hook(
                lambda gradient: (
                    engine.queue_callback(prof.marker.expose),
                    engine.queue_callback(lambda: time.sleep(0.02)),
                )[0]
            )
            loss.backward()
            training.optimizer.step()
    steps = read(tmp_path / "run").steps
    assert steps is not None
    assert (phase(steps, "exposed_communication") >= 20_000_000).all()
    assert (phase(steps, "backward") > 0).all()
    assert np.median(phase(steps, "backward")) < 20_000_000


def test_a_loss_on_its_way_is_read_when_it_has_arrived() -> None:
    device = FakeDevice(lag_ns=20_000_000)
    event = device.create()
    event.record()
    returned: list[PendingLoss] = []
    pending = PendingLoss(event, torch.tensor(1.5), returned.append)
    assert pending.value() is None
    assert not returned
    time.sleep(0.03)
    assert pending.value() == 1.5
    assert returned == [pending]
