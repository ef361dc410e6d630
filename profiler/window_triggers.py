"""What asks for a window that no schedule holds: a signal, a file that was touched, a slow step.

Ranks must record the same steps, and never talk to each other for it. Whoever asks first writes, in the run's
folder, from which step on; the others read it there, in a thread that looks once a second. On hosts that do not
share the folder each host agrees with itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import statistics
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Requests", "SlowSteps", "UserSignal"]

logger = logging.getLogger("trine")

_LOOK_SECONDS = 1.0
TOUCH_NAME = "window"
_REQUEST_NAME = ".window-request.json"


class UserSignal:
    """SIGUSR2 sets ``seen``; a handler that was there before is called as before."""

    def __init__(self) -> None:
        self.seen = False
        self._previous: Any = None
        self._installed = False
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR2"):
            return
        self._previous = signal.getsignal(signal.SIGUSR2)
        if self._previous is None:
            return  # installed by C code, which we could not call
        signal.signal(signal.SIGUSR2, self._handle)
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        """Put the previous handler back, unless somebody replaced ours."""
        here = threading.current_thread() is threading.main_thread()
        if self._installed and here and signal.getsignal(signal.SIGUSR2) == self._handle:
            signal.signal(signal.SIGUSR2, self._previous)
        self._installed = False


class SlowSteps:
    """Tells when a step took longer than twice the median of the last ones; at most once in ten minutes."""

    FACTOR = 2.0
    #: Steps known before one is judged: the first are slow by themselves.
    LEAST = 20
    PERIOD_SECONDS = 600.0
    #: A step must also be this much longer: short steps vary by more than twice for no reason.
    LEAST_EXCESS_NS = 20_000_000

    def __init__(self) -> None:
        self._durations: deque[int] = deque(maxlen=101)
        self._median = 0.0
        self._count = 0
        self._next = 0.0

    def is_slow(self, duration_ns: int) -> bool:
        """Whether to record a window for this step; ``duration_ns`` joins the median."""
        excess = duration_ns - self._median
        judged = self._count >= self.LEAST and self._median > 0
        slow = judged and duration_ns > self.FACTOR * self._median and excess > self.LEAST_EXCESS_NS
        self._durations.append(duration_ns)
        self._count += 1
        if self._count % 16 == 0 or self._count == self.LEAST:
            self._median = statistics.median(self._durations)
        if slow and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.PERIOD_SECONDS
            return True
        return False

    @property
    def median_ns(self) -> float:
        """Median of recent steps, 0 while unknown."""
        if not self._median and self._durations:
            return float(statistics.median(self._durations))
        return self._median


class Requests:
    """The agreement in the run's folder. :attr:`start` is the step from which a window was asked for."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._touch = folder / TOUCH_NAME
        self._request = folder / _REQUEST_NAME
        self._wanted: str | None = None
        self._seen = self._read_id()
        self.start: int | None = None
        self.reason = ""
        self.step = 0
        self.median_ns = 0.0
        self.fault: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look, name="trine-window-requests", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask for a window, from the training thread: returns at once."""
        self._wanted = reason
        self._wake.set()

    def take(self) -> tuple[int, str] | None:
        """(first step, reason) of a request, once."""
        if self.start is None:
            return None
        start, self.start = self.start, None
        return start, self.reason

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._wake.set()
        self._thread.join(2.0)

    def _look(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            try:
                self._publish()
                self._hear()
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.fault = f"{type(error).__name__}: {error}"

    def _publish(self) -> None:
        """Say when a window begins, if one is wanted here and nobody has."""
        reason, self._wanted = self._wanted, None
        if reason is None and self._touch.exists():
            try:
                self._touch.rename(self._folder / f".{TOUCH_NAME}-{time.time_ns()}")
            except FileNotFoundError:
                return  # another rank took it
            reason = "touch"
            self._sweep()
        if reason is None:
            return
        self._hear()
        if self.start is not None:
            return  # somebody asked a moment ago
        # Late enough that every rank has looked again before it gets there.
        ahead = 2 * _LOOK_SECONDS * 1e9 / self.median_ns if self.median_ns else 0
        start = self.step + 2 + min(math.ceil(ahead), 1000)
        told = {"id": f"{time.time_ns()}-{os.getpid()}", "start": start, "reason": reason}
        part = self._folder / f"{_REQUEST_NAME}-{os.getpid()}"
        try:
            part.write_text(json.dumps(told))
            part.replace(self._request)
        except OSError as error:  # a folder that cannot be written: this rank alone
            self.start, self.reason = start, reason
            self.fault = f"{type(error).__name__}: {error}"

    def _sweep(self) -> None:
        for taken in self._folder.glob(f".{TOUCH_NAME}-*"):
            taken.unlink(missing_ok=True)

    def _hear(self) -> None:
        told = self._read()
        if told and told["id"] != self._seen:
            self._seen = str(told["id"])
            self.start, self.reason = int(told["start"]), str(told["reason"])

    def _read(self) -> dict[str, Any]:
        try:
            read = json.loads(self._request.read_text())
        except FileNotFoundError:
            return {}
        return read if isinstance(read, dict) else {}

    def _read_id(self) -> str | None:
        """The request that was there before this run: not for us."""
        try:
            return str(self._read().get("id"))
        except (OSError, ValueError):
            return None
