"""Deep windows: a few steps recorded by ``torch.profiler``, the rest of the run left alone.

By default one, over steps 10–12, on all ranks up to 8, else on one a node. More by schedule, on SIGUSR2,
on touching ``window`` in the run's folder, and after a step longer than twice the median. Windows are bounded
in steps, time, memory and bytes on disk; what was cut is said. A window is collected inside steps and written
between them.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trine.record.errors import UsageError

from .protocols import Note
from .window_trace import OtherProfilers, WindowTrace, compress
from .window_triggers import Requests, SlowSteps, UserSignal

__all__ = ["DeepWindows", "WindowSettings", "parse_windows"]

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """When to record windows, and how much.

    ``schedule``: (first, last) step of each, both included. ``steps``: how many steps a window on request has.
    ``triggers``: whether signal, touched file and slow steps ask for more. ``stacks``: Python stacks (several times
    the cost and the size). ``every_rank``: also beyond 8 ranks.
    """

    schedule: tuple[tuple[int, int], ...] = ((10, 12),)
    steps: int = 3
    triggers: bool = True
    stacks: bool = False
    memory: bool = True
    every_rank: bool = False
    most_windows: int = 8
    most_steps: int = 20
    most_seconds: float = 60.0
    most_memory_bytes: int = 4 << 30
    most_bytes: int = 128 << 20


def parse_windows(given: Any) -> WindowSettings | None:
    """Settings from what a user wrote: ``"default"``, ``None``, ``False``, a step, (first, last), a range, a list of those.

    Raises ``UsageError`` on anything else.
    """
    if given is None or given is False:
        return None
    if given is True or given == "default":
        return WindowSettings()
    if isinstance(given, WindowSettings):
        return given
    if _is_pair(given) or isinstance(given, int | range):
        return WindowSettings(schedule=(_span(given),))
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return WindowSettings(schedule=tuple(sorted(_span(one) for one in given)))
    raise UsageError(
        f"windows={given!r} is not understood; give None, a step, (first, last), or a list of these"
    )


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(step, int) for step in given)


def _span(given: Any) -> tuple[int, int]:
    first, last = -1, -1
    if isinstance(given, range) and len(given):
        first, last = given[0], given[-1]
    elif _is_pair(given):
        first, last = given
    elif isinstance(given, int) and not isinstance(given, bool):
        first, last = given, given + 2
    if not 0 <= first <= last:
        raise UsageError(f"windows: {given!r} is not a step, a (first, last) pair or a range")
    return first, last


class DeepWindows:
    """The :class:`~trine.profiler.protocols.DeepWindowing` of a session; raises ``UsageError`` on bad settings."""

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        world_size: int,
        local_rank: int,
        windows: Any,
        note: Note,
    ) -> None:
        settings = parse_windows(windows)
        self._folder = folder
        self._note = note
        self._trace: WindowTrace | None = None
        self._pending: list[tuple[int, int, str]] = []
        self._threads: list[threading.Thread] = []
        self._taken = self._written = 0
        self._until = 0
        self._begun = 0.0
        self._memory = 0
        self._others: OtherProfilers | None = None
        self._signal: UserSignal | None = None
        self._requests: Requests | None = None
        self._slow = SlowSteps()
        self._settings = settings or WindowSettings(schedule=(), triggers=False)
        if settings is None or folder is None:
            return
        if world_size > 8 and local_rank != 0 and not settings.every_rank:
            return
        self._pending = [(first, last, "schedule") for first, last in settings.schedule]
        self._others = OtherProfilers(self._make_way)
        if settings.triggers:
            self._signal = UserSignal()
            self._requests = Requests(_run_folder(folder), settings.steps)

    def before_step(self, index: int) -> None:
        """Start a window that is due; called before the step's clock starts."""
        if self._trace is None:
            if self._requests is not None:
                self._listen(self._requests, index)
            if self._pending and self._pending[0][0] <= index:
                self._open(index)
        if self._trace is not None:
            self._trace.begin_step(index)

    def after_step(self, index: int, duration_ns: int) -> None:
        """End a window that has its steps; called after the step's clock stopped."""
        trace = self._trace
        if trace is not None:
            trace.end_step(index)
            if index >= self._until or self._is_full(index):
                self._finish()
            return
        if self._requests is not None and self._slow.is_slow(duration_ns) and index > 12:
            self._requests.ask(f"step {index} was slow")

    def close(self) -> None:
        """Write a window that is running, wait for what is being written, remove every hook."""
        if self._trace is not None:
            self._finish()
        if self._requests is not None:
            self._requests.close()
        if self._signal is not None:
            self._signal.close()
        if self._others is not None:
            self._others.close()
        for thread in self._threads:
            thread.join(60.0)
        self._pending = []
        self._requests = self._signal = self._others = None

    # --- inside ---

    def _listen(self, requests: Requests, index: int) -> None:
        """Turn signals and requests into windows that are due."""
        requests.step, requests.median_ns = index, self._slow.median_ns
        if self._signal is not None and self._signal.seen:
            self._signal.seen = False
            requests.ask("SIGUSR2")
        asked = requests.take()
        if asked is None:
            return
        start, reason = asked
        if start < index:
            self._note(
                "window-late", "info", f"a window from step {start} on was asked for too late ({reason})"
            )
            return
        self._pending.append((start, start + self._settings.steps - 1, reason))
        self._pending.sort()

    def _open(self, index: int) -> None:
        first, last, reason = self._pending.pop(0)
        steps = min(last - first + 1, self._settings.most_steps)
        if index > first:
            if reason == "schedule" and index > last:
                return  # a run that began later than that, or a window that another one swallowed
            steps = last - index + 1
        others = self._others
        if others is None or self._taken >= self._settings.most_windows:
            self._note(
                "window-skipped", "info", f"no window at step {index}: the run has {self._taken} already"
            )
            return
        if others.running():
            self._note(
                "window-skipped",
                "info",
                f"no deep window at step {index} ({reason}): another profiler was running, and PyTorch has one a process",
            )
            return
        self._until = index + max(steps, 1) - 1
        self._begun = time.monotonic()
        self._memory = _resident_bytes()
        try:
            self._trace = WindowTrace(others, self._settings.stacks, self._settings.memory)
        except (RuntimeError, AssertionError, ImportError) as error:
            self._note(
                "window-failed",
                "warning",
                f"no deep window at step {index}: {' '.join(str(error).split())[:200]}",
            )
            return
        self._taken += 1

    def _is_full(self, index: int) -> bool:
        """Whether the window must end early, and say so."""
        seconds = time.monotonic() - self._begun
        grown = _resident_bytes() - self._memory
        if seconds <= self._settings.most_seconds and grown <= self._settings.most_memory_bytes:
            return False
        why = f"{seconds:.0f} s" if seconds > self._settings.most_seconds else f"{grown >> 20} MiB of memory"
        self._note(
            "window-cut", "info", f"the window ended at step {index} instead of {self._until}: it took {why}"
        )
        return True

    def _make_way(self) -> None:
        """Somebody else's profiler is about to start: ours stops, with the whole steps it has."""
        if self._trace is not None:
            self._note(
                "window-cut",
                "info",
                f"the window ended early, after {len(self._trace.steps)} steps: another profiler started",
            )
            self._finish()

    def _finish(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        if not trace.steps or self._folder is None:
            return
        name = f"window-{trace.steps[0]:06d}.json"
        plain, packed = self._folder / f".{name}", self._folder / f"{name}.gz"
        if self._written >= self._settings.most_bytes or not _has_room(self._folder):
            self._note(
                "window-left-out",
                "warning",
                f"the window of step {trace.steps[0]} was left out: no room on disk",
            )
            return
        try:
            trace.save(plain)
        except (OSError, RuntimeError) as error:
            plain.unlink(missing_ok=True)
            self._note("window-failed", "warning", f"a deep window could not be written: {error}")
            return
        # gzip level 1 makes a trace about twelve times smaller.
        self._written += plain.stat().st_size // 12
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(compress(plain, packed, trace.given_up, self._compress_failed))

    def _compress_failed(self, error: Exception) -> None:
        self._note("window-failed", "warning", f"a deep window could not be written: {error}")


def _run_folder(folder: Path) -> Path:
    """The run's folder of a rank's folder: its parent, or its grandparent in a later attempt."""
    parent = folder.parent
    return parent.parent if parent.name.startswith("attempt-") else parent


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _has_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free > 256 << 20
    except OSError:
        return False
