"""Deep windows by each trigger, beside a user's profiler, at their limits, and that nothing stays behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trine.profiler import window_triggers
from trine.profiler.window_triggers import Requests, SlowSteps, UserSignal
from trine.profiler.windows import DeepWindows, WindowSettings, parse_windows
from trine.record.errors import UsageError


class Loop:
    """A little training loop under windows; ``notes`` is what they said."""

    def __init__(self, folder: Path, windows: Any = "default", **place: int) -> None:
        self.folder = folder / "rank-00000"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.notes: list[tuple[str, str, str]] = []
        here = {"rank": 0, "world_size": 1, "local_rank": 0} | place
        self.windows = DeepWindows(
            self.folder, here["rank"], here["world_size"], here["local_rank"], windows, self._note
        )
        self._layer = torch.nn.Linear(8, 8)
        self.index = 0

    def _note(self, *note: Any) -> None:
        self.notes.append(note)

    def step(self, seconds: float = 0.0, during: Callable[[], Any] | None = None) -> None:
        self.windows.before_step(self.index)
        begun = time.perf_counter_ns()
        self._layer(torch.ones(2, 8)).sum().backward()
        if during is not None:
            during()
        time.sleep(seconds)
        self.windows.after_step(self.index, time.perf_counter_ns() - begun)
        self.index += 1

    def run(self, count: int, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.step(seconds)

    def until(self, condition: Callable[[], bool], limit: float = 20.0) -> None:
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, self.notes
            self.step(0.01)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def steps_of(self, name: str) -> list[str]:
        with gzip.open(self.folder / name) as file:
            events = json.load(file)["traceEvents"]
        marks = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
        assert any(event.get("name") == "aten::addmm" for event in events)
        return [event["name"] for event in sorted(marks, key=lambda event: event["ts"])]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    monkeypatch.setattr(window_triggers, "_LOOK_SECONDS", 0.05)
    made: list[Loop] = []

    def make(windows: Any = "default", **place: int) -> Loop:
        made.append(Loop(tmp_path, windows, **place))
        return made[-1]

    yield make
    for each in made:
        each.windows.close()


def test_the_default_is_one_window_over_steps_10_to_12(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.run(16)
    run.windows.close()
    assert run.files() == ["window-000010.json.gz"]
    assert run.steps_of("window-000010.json.gz") == ["ProfilerStep#10", "ProfilerStep#11", "ProfilerStep#12"]
    assert run.notes == []
    assert not torch.autograd._profiler_enabled()


def test_a_schedule_of_several(loop: Callable[..., Loop]) -> None:
    run = loop([2, (7, 7)])
    run.run(10)
    run.windows.close()
    assert run.files() == ["window-000002.json.gz", "window-000007.json.gz"]
    assert run.steps_of("window-000002.json.gz") == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]


@pytest.mark.parametrize(
    ("world_size", "local_rank", "records"), [(8, 7, True), (16, 0, True), (16, 1, False)]
)
def test_beyond_eight_ranks_one_a_node_records(
    loop: Callable[..., Loop], world_size: int, local_rank: int, records: bool
) -> None:
    run = loop((1, 1), rank=local_rank, world_size=world_size, local_rank=local_rank)
    run.run(3)
    run.windows.close()
    assert bool(run.files()) == records


def test_none_turns_windows_off(loop: Callable[..., Loop]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    run = loop(None)
    assert signal.getsignal(signal.SIGUSR2) == before
    run.run(14)
    assert run.files() == []


@pytest.mark.slow
def test_a_signal_asks_for_a_window_and_the_users_handler_still_runs(loop: Callable[..., Loop]) -> None:
    heard: list[int] = []

    def handler(number: int, frame: Any) -> None:
        heard.append(number)

    original = signal.signal(signal.SIGUSR2, handler)
    try:
        run = loop(WindowSettings(schedule=(), steps=2))
        run.run(3)
        os.kill(os.getpid(), signal.SIGUSR2)
        run.until(lambda: bool(run.files()))
        run.windows.close()
        assert heard == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is handler
        assert len(run.steps_of(run.files()[-1])) == 2
    finally:
        signal.signal(signal.SIGUSR2, original)


def test_a_handler_that_replaced_ours_is_left_alone() -> None:
    original = signal.getsignal(signal.SIGUSR2)
    try:
        ours = UserSignal()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        ours.close()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, original)


def test_touching_a_file_in_the_runs_folder_asks_for_a_window(loop: Callable[..., Loop]) -> None:
    run = loop(WindowSettings(schedule=(), steps=2))
    run.run(3)
    touched = run.folder.parent / "window"
    touched.touch()
    run.until(lambda: bool(run.files()))
    assert not touched.exists()
    run.windows.close()
    assert len(run.files()) == 1


def test_a_slow_step_asks_for_a_window_once(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loop(WindowSettings(schedule=(), steps=1))
    run.run(25, 0.002)
    run.step(0.3)
    run.until(lambda: bool(run.files()))
    run.step(0.3)
    run.run(20, 0.005)
    run.windows.close()
    assert len(run.files()) == 1


def test_only_steps_over_twice_the_median_are_slow() -> None:
    steps, slow = SlowSteps(), 1_000_000_000
    assert not any(steps.is_slow(duration) for duration in [slow, *[100_000_000] * 30])
    assert not steps.is_slow(190_000_000)
    assert steps.is_slow(210_000_000)
    assert not steps.is_slow(900_000_000)  # within the ten minutes
    short = SlowSteps()
    assert not any(short.is_slow(duration) for duration in [1_000_000] * 40 + [15_000_000])


def test_all_ranks_record_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_triggers, "_LOOK_SECONDS", 0.05)
    ranks = [Requests(tmp_path, 3) for _ in range(3)]
    try:
        for number, rank in enumerate(ranks):
            rank.step, rank.median_ns = 100 + number % 2, 10_000_000.0
        ranks[1].ask("SIGUSR2")
        until = time.monotonic() + 10
        while not all(rank.start is not None for rank in ranks):
            assert time.monotonic() < until
            time.sleep(0.02)
        taken = [rank.take() for rank in ranks]
        assert len(set(taken)) == 1
        start, reason = taken[0] or (0, "")
        assert start >= 101 + 2
        assert reason == "SIGUSR2"
        assert [rank.take() for rank in ranks] == [None] * 3
        late = Requests(tmp_path, 3)
        time.sleep(0.2)
        assert late.take() is None  # a request from before it began is not for it
        late.close()
    finally:
        for rank in ranks:
            rank.close()


def test_we_stay_out_while_a_users_profiler_runs(loop: Callable[..., Loop]) -> None:
    run = loop((2, 3))
    run.run(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as users:
        run.run(4)
    assert any(event.key == "aten::addmm" and event.count == 4 for event in users.key_averages())
    run.windows.close()
    assert run.files() == []
    assert [note[0] for note in run.notes] == ["window-skipped"]


def test_we_make_way_for_a_users_profiler(loop: Callable[..., Loop]) -> None:
    run = loop((2, 9))
    run.run(4)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as users:
        for _ in range(3):
            run.step()
            users.step()
    assert any(event.key == "aten::addmm" for event in users.key_averages())
    run.run(6)
    run.windows.close()
    assert run.steps_of("window-000002.json.gz") == ["ProfilerStep#2", "ProfilerStep#3"]
    assert [note[0] for note in run.notes] == ["window-cut"]


def test_a_users_profiler_that_starts_within_a_step_wins(loop: Callable[..., Loop]) -> None:
    run = loop((1, 4))
    run.run(2)
    users = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    run.step(during=users.start)
    run.step()
    users.stop()
    assert any(event.key == "aten::addmm" for event in users.key_averages())
    run.windows.close()
    assert run.steps_of("window-000001.json.gz")[0] == "ProfilerStep#1"


def test_patches_are_taken_out(loop: Callable[..., Loop]) -> None:
    from torch.autograd.profiler import profile

    before = profile._prepare_trace, profile.__exit__
    run = loop((0, 0))
    assert profile._prepare_trace is not before[0]
    run.run(2)
    run.windows.close()
    assert (profile._prepare_trace, profile.__exit__) == before


@pytest.mark.parametrize(
    ("limit", "words"), [({"most_seconds": 0.0}, "s"), ({"most_memory_bytes": -(1 << 40)}, "memory")]
)
def test_a_window_ends_at_its_limits_and_says_so(
    loop: Callable[..., Loop], limit: dict[str, Any], words: str
) -> None:
    run = loop(WindowSettings(schedule=((1, 8),), triggers=False, **limit))
    run.run(4)
    run.windows.close()
    assert run.steps_of("window-000001.json.gz") == ["ProfilerStep#1"]
    assert run.notes[0][0] == "window-cut"
    assert words in run.notes[0][2]


def test_windows_stop_at_the_limit_of_disk(loop: Callable[..., Loop]) -> None:
    run = loop(WindowSettings(schedule=((1, 1), (3, 3)), triggers=False, most_bytes=1))
    run.run(5)
    run.windows.close()
    assert run.files() == ["window-000001.json.gz"]
    assert [note[0] for note in run.notes] == ["window-left-out"]


def test_a_loop_that_ends_within_a_window_keeps_its_whole_steps(loop: Callable[..., Loop]) -> None:
    run = loop((1, 9))
    run.run(3)
    run.windows.before_step(3)
    run.windows.close()
    assert run.steps_of("window-000001.json.gz") == ["ProfilerStep#1", "ProfilerStep#2"]
    assert not torch.autograd._profiler_enabled()


def test_a_step_that_begins_anew_is_marked_once(loop: Callable[..., Loop]) -> None:
    run = loop((1, 2))
    run.run(2)
    run.windows.before_step(2)  # the loader was exhausted, and another epoch begins
    run.run(2)
    run.windows.close()
    assert run.steps_of("window-000001.json.gz") == ["ProfilerStep#1", "ProfilerStep#2"]


def test_a_window_changes_no_number(loop: Callable[..., Loop]) -> None:
    def train(with_windows: bool) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = loop((1, 2) if with_windows else None)
        losses = []
        for index in range(4):
            run.windows.before_step(index)
            loss = model(torch.randn(4, 8)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.windows.after_step(index, 1)
            losses.append(loss.item())
        return losses

    assert train(False) == train(True)


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ("default", ((10, 12),)),
        (True, ((10, 12),)),
        (5, ((5, 7),)),
        ((5, 9), ((5, 9),)),
        (range(5, 9), ((5, 8),)),
        ([20, (3, 4)], ((3, 4), (20, 22))),
    ],
)
def test_what_users_may_write(given: Any, schedule: Any) -> None:
    settings = parse_windows(given)
    assert settings is not None
    assert settings.schedule == schedule


@pytest.mark.parametrize("given", ["sometimes", (9, 5), -1, [None], 2.5, range(0)])
def test_what_they_may_not(given: Any) -> None:
    with pytest.raises(UsageError, match="windows"):
        parse_windows(given)
