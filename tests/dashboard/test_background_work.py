"""Slow work is done elsewhere, once, and its failures become reasons."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trine.dashboard.background import Background
from trine.record.errors import UnreadableInput


def in_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background(interval_s=0.2, executor=in_threads)
    yield made
    made.close()


def die() -> None:
    os._exit(9)


def process_number() -> int:
    return os.getpid()


def test_a_request_never_waits_unless_told(background: Background) -> None:
    gate = threading.Event()
    began = time.monotonic()
    outcome = background.request("a", "1", gate.wait, 20)
    assert outcome.state == "pending" and time.monotonic() - began < 2
    gate.set()
    assert background.request("a", "1", gate.wait, 20, wait_s=20).state == "ready"


def test_the_same_files_are_read_once(background: Background) -> None:
    calls: list[int] = []
    for _ in range(5):
        outcome = background.request("a", "1", calls.append, 1, wait_s=20)
    assert outcome.state == "ready" and outcome.version == 1 and calls == [1]


def test_changed_files_keep_the_old_result_until_the_new_one_is_there(background: Background) -> None:
    assert background.request("a", "1", str, 1, wait_s=20).value == "1"
    gate = threading.Event()
    again = background.request("a", "2", gate.wait, 20)
    assert again.value == "1" and again.renewing  # too soon: nothing was asked for
    time.sleep(0.25)
    for _ in range(50):
        again = background.request("a", "2", gate.wait, 20)
        if again.running:
            break
        time.sleep(0.05)
    assert again.value == "1" and again.renewing and again.running and again.version == 1
    gate.set()
    for _ in range(100):
        again = background.request("a", "2", gate.wait, 20)
        if not again.renewing:
            break
        time.sleep(0.05)
    assert again.value is True and again.version == 2 and not again.renewing


@pytest.mark.slow
def test_a_renewal_is_not_started_more_often_than_it_pays() -> None:
    background = Background(interval_s=0.0, executor=in_threads)
    try:
        slow: list[float] = []

        def work() -> None:
            slow.append(time.monotonic())
            time.sleep(0.3)

        background.request("a", "0", work, wait_s=20)
        for number in range(1, 30):
            background.request("a", str(number), work)
            time.sleep(0.05)
        # 1.45 s of changes: a result that takes 0.3 s is renewed after 1.2 s, so once.
        assert len(slow) <= 2
    finally:
        background.close()


def test_the_most_wanted_goes_first(background: Background) -> None:
    gate, order = threading.Event(), []
    background.request("busy", "1", gate.wait, 20)
    time.sleep(0.1)
    background.request("list", "1", order.append, "list", priority=9)
    background.request("page", "1", order.append, "page", priority=0)
    background.request("list", "1", order.append, "list", priority=9)
    gate.set()
    background.request("list", "1", order.append, "list", priority=9, wait_s=20)
    assert order == ["page", "list"]


def test_a_waiting_task_moves_up_when_somebody_opens_it(background: Background) -> None:
    gate, order = threading.Event(), []
    background.request("busy", "1", gate.wait, 20)
    time.sleep(0.1)
    background.request("a", "1", order.append, "a", priority=5)
    background.request("b", "1", order.append, "b", priority=6)
    background.request("b", "1", order.append, "b", priority=0)
    gate.set()
    background.request("a", "1", order.append, "a", priority=5, wait_s=20)
    assert order == ["b", "a"]


def test_a_fault_becomes_its_one_line(background: Background) -> None:
    def unreadable() -> None:
        raise UnreadableInput("x.json is cut off\nat byte 7; copy it again")

    outcome = background.request("a", "1", unreadable, wait_s=20)
    assert outcome.state == "failed" and outcome.error == "x.json is cut off at byte 7; copy it again"
    other = background.request("b", "1", lambda: 1 // 0, wait_s=20)
    assert other.error is not None and other.error.startswith("unexpected ZeroDivisionError")
    assert background.request("c", "1", str, 3, wait_s=20).value == "3"


def test_a_live_record_caught_at_a_bad_moment_keeps_its_last_result(background: Background) -> None:
    background.request("a", "1", str, 1, wait_s=20)
    time.sleep(0.25)

    def fail() -> None:
        raise UnreadableInput("half a frame")

    for _ in range(100):
        outcome = background.request("a", "2", fail)
        if outcome.error:
            break
        time.sleep(0.05)
    assert outcome.state == "ready" and outcome.value == "1" and outcome.error == "half a frame"


def test_old_results_are_let_go() -> None:
    background = Background(most_results=3, executor=in_threads)
    try:
        for number in range(6):
            background.request(number, "1", str, number, wait_s=20)
        kept = [number for number in range(6) if background.peek(number) is not None]
        assert kept == [3, 4, 5]
    finally:
        background.close()


def test_work_is_done_in_another_process_and_outlives_its_death(tmp_path: Path) -> None:
    background = Background()
    try:
        first = background.request("a", "1", process_number, wait_s=60)
        assert first.value not in (None, os.getpid())
        dead = background.request("b", "1", die, wait_s=60)
        assert dead.state == "failed" and dead.error is not None and "died" in dead.error
        again = background.request("c", "1", process_number, wait_s=60)
        assert again.value not in (None, os.getpid(), first.value)
    finally:
        background.close()
