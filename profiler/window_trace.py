"""One deep window: a ``torch.profiler`` session around a few steps, and a user's profiler that comes first.

PyTorch has one profiler a process. Starting a second one breaks the first, so a window stays out while
another is prepared or running, and makes way for one that begins meanwhile: :class:`OtherProfilers` knows.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["OtherProfilers", "WindowTrace", "compress"]

logger = logging.getLogger("trine")


class OtherProfilers:
    """Watches for profilers that are not ours, through ``torch.autograd.profiler.profile``, which all of them use.

    ``make_way`` is called, in the thread that starts one, just before it starts.
    """

    def __init__(self, make_way: Callable[[], None]) -> None:
        from torch.autograd import profiler as torch_profiler

        profile: Any = torch_profiler.profile
        self._class: Any = profile
        self._make_way = make_way
        self._others: set[int] = set()
        self.ours_starts = False
        self._prepare = profile._prepare_trace
        self._exit = profile.__exit__
        watch = self

        def prepare(profiler: Any) -> Any:
            if not watch.ours_starts:
                watch._others.add(id(profiler))
                watch._make_way()
            return watch._prepare(profiler)

        def leave(profiler: Any, *arguments: Any) -> Any:
            watch._others.discard(id(profiler))
            return watch._exit(profiler, *arguments)

        self._installed = (prepare, leave)
        self._class._prepare_trace, self._class.__exit__ = prepare, leave

    def running(self) -> bool:
        """Whether somebody else's profiler is prepared or running."""
        import torch

        return bool(self._others) or bool(torch._C._autograd._profiler_enabled())

    def close(self) -> None:
        """Stop watching, unless somebody has wrapped the class after us."""
        prepare, leave = self._installed
        if self._class._prepare_trace is prepare:
            self._class._prepare_trace = self._prepare
        if self._class.__exit__ is leave:
            self._class.__exit__ = self._exit


class _QuietAllocator:
    """Holds back c10's log lines at level WARNING while a window runs.

    With memory recorded, the CPU's allocator logs a line about blocks that are older than the window: true, expected, and
    noise on the user's standard error. Does nothing where this torch has no such switch.
    """

    def __init__(self) -> None:
        self._level: Any = None
        self._before = 0
        try:
            import torch

            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            return
        self._before = int(self._level.value)
        self._level.value = max(self._before, 2)

    def close(self) -> None:
        if self._level is not None:
            self._level.value = self._before


class WindowTrace:
    """A running window. Created and used in the training thread, between steps."""

    def __init__(self, others: OtherProfilers, stacks: bool, memory: bool) -> None:
        """Start the profiler. Raises ``RuntimeError`` where PyTorch cannot."""
        import torch.profiler as torch_profiler

        activities: Any = torch_profiler.supported_activities

        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:  # else Kineto writes lines to the user's standard error
            os.environ["KINETO_LOG_LEVEL"] = "99"
        others.ours_starts = True
        try:
            self._profiler = torch_profiler.profile(
                activities=activities(),
                record_shapes=True,
                profile_memory=memory,
                with_stack=stacks,
            )
            self._profiler.start()
            self._quiet = _QuietAllocator()
        finally:
            others.ours_starts = False
            if quiet:
                os.environ.pop("KINETO_LOG_LEVEL", None)
        self._mark: Any = None
        self._index = 0
        self.steps: list[int] = []
        #: Steps that were begun and not ended: their marks are renamed when the trace is written.
        self.given_up: list[int] = []

    def begin_step(self, index: int) -> None:
        """Mark the step as PyTorch's own schedule does."""
        import torch

        if self._mark is not None:  # the step was given up and begins anew
            self._give_up()
        self._index = index
        self._mark = torch.autograd.profiler.record_function(f"ProfilerStep#{index}")
        self._mark.__enter__()

    def end_step(self, index: int) -> None:
        """The step is over, and kept."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
            self.steps.append(index)

    def stop(self) -> None:
        """Stop collecting; the trace is kept until :meth:`save`."""
        if self._mark is not None:
            self._give_up()
        if self.steps:
            told = json.dumps({"steps": self.steps})
            self._profiler.add_metadata_json("trine", told)
        try:
            self._profiler.stop()
        finally:
            self._quiet.close()

    def _give_up(self) -> None:
        mark, self._mark = self._mark, None
        mark.__exit__(None, None, None)
        self.given_up.append(self._index)

    def save(self, path: Path) -> None:
        """Write the trace as JSON. Kineto holds the interpreter while it writes, so no thread would help."""
        self._profiler.export_chrome_trace(str(path))


def compress(
    source: Path, target: Path, given_up: list[int], failed: Callable[[Exception], None]
) -> threading.Thread:
    """Gzip ``source`` to ``target`` in a thread (zlib lets others run), then remove it; a reader sees all or nothing.

    Marks of steps that were ``given_up`` are renamed on the way: a reader would take them for steps.
    """
    # A step that began anew has a second mark of the same name, which is later in the file and stays.
    names = [(b'"ProfilerStep#%d"' % index, b'"unfinished step %d"' % index) for index in given_up]

    def work() -> None:
        part = target.with_suffix(".part")
        try:
            with source.open("rb") as plain, gzip.open(part, "wb", compresslevel=1) as packed:
                if names:
                    for line in plain:
                        packed.write(_renamed(line, names))
                else:
                    shutil.copyfileobj(plain, packed, 1 << 20)
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            failed(error)
        finally:
            source.unlink(missing_ok=True)

    thread = threading.Thread(target=work, name="trine-window", daemon=True)
    thread.start()
    return thread


def _renamed(line: bytes, names: list[tuple[bytes, bytes]]) -> bytes:
    """The line with each name replaced that it holds, once; what was replaced leaves ``names``."""
    for pair in [pair for pair in names if pair[0] in line]:
        line = line.replace(*pair)
        names.remove(pair)
    return line
