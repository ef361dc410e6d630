"""Slow work in another process, so the pages answer at once.

One worker process runs one task at a time, the most wanted first; results are remembered by key and
fingerprint (of the files they came from). When the files change, the old result stays on show and a
new one is computed, at most every ten seconds or four times as long as it takes, whichever is more.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Literal

from trine.record.errors import TrineError

__all__ = ["Background", "Outcome"]

State = Literal["pending", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known now. ``version`` grows with each result of the key; ``renewing`` says that files have
    changed since and a newer one is on its way or will be; ``running`` that it is being computed."""

    state: State
    value: Any = None
    error: str | None = None
    version: int = 0
    finished_s: float | None = None
    renewing: bool = False
    running: bool = False


@dataclass(slots=True)
class _Entry:
    fingerprint: str | None = None  # of the result on show
    wanted: str | None = None  # of the task that waits or runs
    running: bool = False
    state: State = "pending"
    value: Any = None
    error: str | None = None
    version: int = 0
    finished_s: float | None = None
    finished: float = field(default=-1e9)  # on the monotonic clock
    seconds: float = 0.0
    size_bytes: int = 0


class Background:
    """A queue, one thread that feeds one process, and a bounded store of results."""

    def __init__(
        self,
        *,
        interval_s: float = 10.0,
        most_results: int = 256,
        most_bytes: int = 2**30,
        executor: Callable[[], Executor] | None = None,
    ) -> None:
        self._interval_s, self._most_results, self._most_bytes = interval_s, most_results, most_bytes
        self._make_executor = executor or _one_process
        self._executor: Executor | None = None
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._queue: list[tuple[int, int, Hashable, str, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(
        self,
        key: Hashable,
        fingerprint: str,
        function: Callable[..., Any],
        *arguments: Any,
        priority: int = 0,
        wait_s: float = 0.0,
    ) -> Outcome:
        """The result of ``function(*arguments)``, computed when unknown or when the fingerprint changed.

        ``function`` and its arguments must be picklable. Lower ``priority`` runs first. ``wait_s`` waits
        that long for a task that is in line; then what there is, is given.
        """
        with self._changed:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            self._want(key, entry, fingerprint, function, arguments, priority)
            if wait_s:
                self._changed.wait_for(lambda: entry.wanted is None or self._closed, wait_s)
            return self._outcome(entry, fingerprint)

    def peek(self, key: Hashable) -> Outcome | None:
        """What is known of a key, asking for nothing."""
        with self._changed:
            entry = self._entries.get(key)
            return None if entry is None else self._outcome(entry, entry.fingerprint)

    def close(self) -> None:
        """Stop; a running task is left to end with its process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            executor, self._executor = self._executor, None
        if executor is not None:
            _stop(executor)

    def _want(
        self,
        key: Hashable,
        entry: _Entry,
        fingerprint: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        priority: int,
    ) -> None:
        if self._closed or entry.fingerprint == fingerprint or entry.running:
            return
        since = time.monotonic() - entry.finished
        if entry.state != "pending" and since < max(self._interval_s, 4 * entry.seconds):
            return
        # A task asked for again gets in line again, maybe nearer the front; the later one finds it done.
        if entry.wanted == fingerprint and priority >= self._waiting_priority(key):
            return
        entry.wanted = fingerprint
        heapq.heappush(self._queue, (priority, next(self._order), key, fingerprint, function, arguments))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trine-dashboard-background", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _waiting_priority(self, key: Hashable) -> int:
        return min((task[0] for task in self._queue if task[2] == key), default=2**31)

    def _outcome(self, entry: _Entry, fingerprint: str | None) -> Outcome:
        return Outcome(
            entry.state,
            entry.value,
            entry.error,
            entry.version,
            entry.finished_s,
            renewing=entry.state != "pending" and entry.fingerprint != fingerprint,
            running=entry.running,
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                _, _, key, fingerprint, function, arguments = heapq.heappop(self._queue)
                entry = self._entries.get(key)
                if entry is None or entry.fingerprint == fingerprint:
                    continue
                entry.running = True
                executor = self._executor = self._executor or self._make_executor()
            began = time.monotonic()
            value, error = self._run(executor, function, arguments)
            with self._changed:
                self._store(entry, fingerprint, value, error, time.monotonic() - began)
                self._evict(keep=key)
                self._changed.notify_all()

    def _run(
        self, executor: Executor, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[Any, str | None]:
        try:
            return executor.submit(function, *arguments).result(), None
        except TrineError as error:
            return None, " ".join(str(error).split())
        except BrokenProcessPool:
            with self._changed:
                self._executor = None
            return (
                None,
                "the process that read this run died, most likely out of memory; try fewer ranks or steps",
            )
        except Exception as error:  # noqa: BLE001
            # A thread that dies would leave every page waiting: the reason goes to the page instead.
            return None, f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"

    def _store(self, entry: _Entry, fingerprint: str, value: Any, error: str | None, seconds: float) -> None:
        entry.running, entry.wanted = False, None
        entry.fingerprint, entry.seconds = fingerprint, seconds
        entry.finished, entry.finished_s = time.monotonic(), time.time()
        entry.version += 1
        if error is not None and entry.state == "ready":
            # A live record may be caught at a bad moment: the last good result stays, with the reason.
            entry.error = error
            return
        entry.state, entry.value, entry.error = (
            ("ready", value, None) if error is None else ("failed", None, error)
        )
        entry.size_bytes = int(getattr(value, "size_bytes", 0))

    def _evict(self, keep: Hashable) -> None:
        total = sum(entry.size_bytes for entry in self._entries.values())
        for key in list(self._entries):
            if len(self._entries) <= self._most_results and total <= self._most_bytes:
                return
            entry = self._entries[key]
            if key != keep and not entry.running and entry.wanted is None:
                total -= entry.size_bytes
                del self._entries[key]


def _one_process() -> Executor:
    # spawn: a fork of a threaded server may inherit a held lock.
    context = get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    """End this process when the server is gone: killed, it could not tell, and a pool waits for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)  # itself, and the pool that an analysis may have started
        os._exit(0)

    if hasattr(os, "setsid"):
        # A group of its own: Ctrl-C in the terminal is for the server, which then ends this in order.
        os.setsid()
    threading.Thread(target=watch, name="trine-dashboard-parent", daemon=True).start()


def _stop(executor: Executor) -> None:
    """End the processes first; waiting for the executor is then short, and not waiting would race with the
    interpreter's own end, which writes to a pipe that the executor may have closed."""
    for process in list((getattr(executor, "_processes", None) or {}).values()):
        try:
            os.killpg(process.pid, signal.SIGTERM)
        except (AttributeError, ProcessLookupError, PermissionError):
            process.terminate()  # no groups here, or it has none of its own yet
    executor.shutdown(wait=True, cancel_futures=True)
