"""The record on disk: one rank's own folder, appended to in the background while it trains.

    RUN/run.json                       what, where, versions, model, hardware, configuration
    RUN/rank-00000/rank.json           the rank's own description, rewritten whole (rename) when it changes
    RUN/rank-00000/rows-000001.trine   frames of rows (:mod:`trine.record.frames`), a few MiB each
    RUN/rank-00000/rollup-000001.trine what is left of older segments (:mod:`trine.record.rollup`)
    RUN/rank-00000/window-*.json.gz    deep windows: Kineto traces
    RUN/attempt-0002/...               the same again, for a second start of the same run

A rank writes only in its own folder, so nothing is locked and folders copied together from several hosts join.
Every ``append`` is one ``write`` of whole frames: killed at any instant, the file ends in at most one torn frame.
Nothing here is called from a training loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from .errors import UsageError
from .frames import SCHEMA, Frames
from .rollup import roll_up

__all__ = ["DEFAULT_MAX_BYTES", "RankWriter", "attempt_folder", "rank_folder_name", "start_identity"]

DEFAULT_MAX_BYTES = 256 << 20
SMALLEST_MAX_BYTES = 64 << 10

_MAX_SEGMENT_BYTES = 4 << 20
_SEGMENTS_IN_BUDGET = 16

Columns = Mapping[str, Sequence[Any] | npt.NDArray[Any]]


def rank_folder_name(rank: int) -> str:
    """``rank-00003`` for 3."""
    return f"rank-{rank:05d}"


def attempt_folder(run: Path, attempt: int) -> Path:
    """Where an attempt lies: the first in the run's folder itself, the second in ``attempt-0002``."""
    return run if attempt == 1 else run / f"attempt-{attempt:04d}"


def start_identity(world_size: int) -> str:
    """The same on all ranks of one start, and different in another start wherever the launcher tells them apart.

    Two starts with one launcher configuration (the same fixed port) look alike; then the rank's own folder, which
    already exists, tells.
    """
    names = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
    )
    parts = [f"{name}={os.environ.get(name, '')}" for name in names] + [f"world={world_size}"]
    if world_size == 1:
        parts.append(f"{socket.gethostname()}:{os.getpid()}:{time.time_ns()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class RankWriter:
    """Appends one rank's rows and keeps its description. All methods raise ``OSError`` when the disk does.

    After an ``OSError`` in :meth:`append` the file is cut back to its last whole frame, the rows of that call are
    lost, and the next call may succeed.
    """

    def __init__(self, run: Path, rank: int, world_size: int, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Makes the rank's folder, in the first attempt that is free.

        Raises ``OSError`` when the folder cannot be made, ``UsageError`` when ``max_bytes`` is too small.
        """
        if max_bytes < SMALLEST_MAX_BYTES:
            raise UsageError(f"max_bytes is {max_bytes}: a rank's record needs at least {SMALLEST_MAX_BYTES}")
        self.run = run
        self.rank = rank
        self.max_bytes = max_bytes
        self.start = start_identity(world_size)
        self.attempt, self.folder = _claim(run, rank, self.start)
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max(max_bytes // _SEGMENTS_IN_BUDGET, 4096))
        self._number = 0
        self._file = -1
        self._frames = Frames()
        self._good_bytes = 0
        self._described = b""
        self._about = {
            "schema": SCHEMA,
            "rank": rank,
            "world_size": world_size,
            "start": self.start,
            "attempt": self.attempt,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started_ns": time.time_ns(),
            "state": "running",
        }
        self.describe({})

    def describe(self, description: Mapping[str, Any]) -> None:
        """Replace ``rank.json``: what was there at the start, updated with ``description``. Written when it changed."""
        content = _json({**self._about, **description})
        if content != self._described:
            _replace(self.folder / "rank.json", content)
            self._described = content

    def describe_run(self, description: Mapping[str, Any]) -> None:
        """Write ``run.json`` of this attempt: small, and by the first rank alone."""
        content = {"schema": SCHEMA, "attempt": self.attempt, "start": self.start, **description}
        folder = attempt_folder(self.run, self.attempt)
        _replace(folder / "run.json", _json(content))

    def append(self, tables: Mapping[str, Columns], *, boundary: bool = True) -> None:
        """Append rows of several tables in one write.

        ``boundary`` is false while a step is unfinished, so that segments break between steps where they can.
        """
        if self._file < 0:
            self._open_segment()
        data = b"".join(self._frames.rows(name, columns) for name, columns in tables.items())
        if not data:
            return
        self._write(data)
        if self._good_bytes >= self._segment_bytes * (1 if boundary else 2):
            self._close_segment()
            self._keep_within_budget()

    def close(self, description: Mapping[str, Any]) -> None:
        """End the record: the last description, and all on disk."""
        if self._file >= 0:
            os.fsync(self._file)
        self._close_segment()
        self.describe(description)

    def _open_segment(self) -> None:
        self._number += 1
        path = self.folder / f"rows-{self._number:06d}.trine"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._frames = Frames()
        self._good_bytes = 0
        self._write(self._frames.head("segment", number=self._number, rank=self.rank))

    def _close_segment(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            # The strings that this write introduced are lost with it, so a new segment must start.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._good_bytes)
            with contextlib.suppress(OSError):
                self._close_segment()
            raise
        self._good_bytes += written

    def _keep_within_budget(self) -> None:
        windows = sum(path.stat().st_size for path in self.folder.glob("window-*"))
        # Deep windows count too, but detail keeps a quarter of the room whatever they take.
        budget = max(self.max_bytes - windows, self.max_bytes // 4)
        roll_up(self.folder, budget_bytes=budget, keep_segments=1)


def _claim(run: Path, rank: int, start: str) -> tuple[int, Path]:
    """The rank's new folder in the first attempt that has none and in which no other start has written."""
    run.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        folder = attempt_folder(run, attempt)
        if not _written_by_another_start(folder, start):
            folder.mkdir(exist_ok=True)
            own = folder / rank_folder_name(rank)
            with contextlib.suppress(FileExistsError):
                own.mkdir()
                return attempt, own
        attempt += 1


def _written_by_another_start(folder: Path, start: str) -> bool:
    for path in folder.glob("rank-*/rank.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError, AttributeError):
            if msgspec.json.decode(path.read_bytes()).get("start") != start:
                return True
    return False


def _json(content: Mapping[str, Any]) -> bytes:
    """What JSON has no word for (a version object, a path, a dtype) is written as its text."""
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=str))


def _replace(path: Path, content: bytes) -> None:
    """Write a small file so that a reader finds the old one or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content + b"\n")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
