"""Following a record that is still being written: what came since a cursor, and nothing twice.

A tail a rank keeps its place in the newest segment and reads only what was appended. Rows get a
running number; a page keeps the last number that it has drawn and asks for those after it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trine.record.frames import LOST, decode_rows, read_frames_after
from trine.record.model import MISSING, PHASES

__all__ = ["MEMORY_METRICS", "Feed", "Feeds", "MemoryRow", "StepRow", "Update"]

#: The first of these that a rank writes is its memory curve.
MEMORY_METRICS = ("memory/allocated_bytes", "memory/resident_bytes")

#: More ranks than this are not drawn live; the analysis shows them all.
MOST_RANKS = 8
#: A first look begins this many segments before the newest (4 MiB each at most).
_SEGMENTS_BACK = 2
_MOST_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step that ended. ``phases_ns`` is None where the record has none; ``loss`` where none was given."""

    number: int
    rank: int
    index: int
    start_ns: int
    duration_ns: int
    loss: float | None
    phases_ns: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A reading of a rank's memory."""

    number: int
    rank: int
    time_ns: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Update:
    """Rows after a cursor, and the cursor to ask with next time. ``attempt`` names the start of the run that
    they are of: when it changes, what was drawn is of another."""

    steps: tuple[StepRow, ...]
    memory: tuple[MemoryRow, ...]
    cursor: int
    attempt: str = ""


@dataclass(slots=True)
class _Tail:
    """One rank's place in its newest segment."""

    rank: int
    folder: Path
    segment: Path | None = None
    position: int = 0
    strings: list[str] = field(default_factory=list)
    open_step: dict[str, Any] | None = None

    def advance(self) -> tuple[list[dict[str, Any]], list[tuple[int, str, float]]]:
        """Finished steps and samples that were appended since; a folder that vanished gives none."""
        steps: list[dict[str, Any]] = []
        samples: list[tuple[int, str, float]] = []
        for segment in self._segments():
            if segment != self.segment:
                self.segment, self.position, self.strings = segment, 0, []
            try:
                messages, self.position = read_frames_after(segment, self.position)
            except OSError:
                continue  # it was rolled up meanwhile: the next segment goes on
            for message in messages:
                if message.get("kind") == "rows":
                    self._take(message, steps, samples)
        return steps, samples

    def _segments(self) -> list[Path]:
        segments = sorted(self.folder.glob("rows-*.trine"))
        if self.segment is None:
            return segments[-_SEGMENTS_BACK:]
        return [path for path in segments if path.name >= self.segment.name]

    def _take(
        self, message: dict[str, Any], steps: list[dict[str, Any]], samples: list[tuple[int, str, float]]
    ) -> None:
        columns = decode_rows(message, self.strings)
        if message["table"] == "samples":
            for time_ns, code, value in zip(
                columns["time_ns"], columns["metric"], columns["value"], strict=True
            ):
                metric = self.strings[int(code)] if 0 <= code < len(self.strings) else ""
                if metric == LOST:
                    continue
                samples.append((int(time_ns), metric, float(value)))
        elif message["table"] == "parts":
            for row in range(message["rows"]):
                self._join({name: column[row] for name, column in columns.items()}, steps)

    def _join(self, part: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        """Parts of one index are one step; it ended when its last part, or another step, has come."""
        held = self.open_step
        if held is not None and held["index"] != part["index"]:
            steps.append(held)
            held = None
        if held is not None:
            for name in PHASES:
                column = f"phase_{name}_ns"
                known = held[column] != MISSING and part[column] != MISSING
                part[column] = held[column] + part[column] if known else MISSING
            part["start_ns"] = held["start_ns"]
            if math.isnan(float(part["loss"])):
                part["loss"] = held["loss"]
        self.open_step = None if part["complete"] == 1 else part
        if part["complete"] == 1:
            steps.append(part)


class Feed:
    """One record's rows as they come. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tails: dict[Path, _Tail] = {}
        self._metric: dict[int, str] = {}
        self._steps: deque[StepRow] = deque(maxlen=_MOST_ROWS)
        self._memory: deque[MemoryRow] = deque(maxlen=_MOST_ROWS)
        self._number = 0
        self._home: Path | None = None

    def since(self, cursor: int) -> Update:
        """Rows whose number is above ``cursor`` (0 for all that are kept), reading what was appended."""
        with self._lock:
            self._advance()
            return Update(
                tuple(row for row in _after(self._steps, cursor)),
                tuple(row for row in _after(self._memory, cursor)),
                self._number,
                self._home.name if self._home is not None else "",
            )

    def _advance(self) -> None:
        home = _newest_attempt(self._path)
        if home != self._home:
            self._home = home
            for rows in (self._steps, self._memory, self._tails, self._metric):
                rows.clear()
        for folder in _rank_folders(home):
            tail = self._tails.get(folder)
            if tail is None:
                tail = self._tails[folder] = _Tail(int(folder.name.removeprefix("rank-")), folder)
            steps, samples = tail.advance()
            for step in steps:
                self._add_step(tail.rank, step)
            for time_ns, metric, value in samples:
                self._add_sample(tail.rank, time_ns, metric, value)

    def _add_step(self, rank: int, step: dict[str, Any]) -> None:
        self._number += 1
        loss = float(step["loss"])
        phases = tuple(int(step[f"phase_{name}_ns"]) for name in PHASES)
        self._steps.append(
            StepRow(
                self._number,
                rank,
                int(step["index"]),
                int(step["start_ns"]),
                int(step["end_ns"]) - int(step["start_ns"]),
                loss if math.isfinite(loss) else None,
                None if MISSING in phases else phases,
            )
        )

    def _add_sample(self, rank: int, time_ns: int, metric: str, value: float) -> None:
        if metric not in MEMORY_METRICS or not np.isfinite(value):
            return
        if self._metric.setdefault(rank, metric) == metric:
            self._number += 1
            self._memory.append(MemoryRow(self._number, rank, time_ns, int(value)))


class Feeds:
    """The feeds of the records that pages follow; the ones looked at longest ago are let go."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._feeds: dict[Path, Feed] = {}

    def of(self, path: Path) -> Feed:
        """The feed of a record's folder."""
        with self._lock:
            feed = self._feeds.pop(path, None) or Feed(path)
            self._feeds[path] = feed
            while len(self._feeds) > self._most:
                del self._feeds[next(iter(self._feeds))]
            return feed


def _after(rows: deque[Any], cursor: int) -> list[Any]:
    """Rows above the cursor; new ones are at the right, so look from there."""
    found: list[Any] = []
    for row in reversed(rows):
        if row.number <= cursor:
            break
        found.append(row)
    return found[::-1]


def _newest_attempt(path: Path) -> Path:
    """The folder of the run's newest start."""
    attempts = sorted(path.glob("attempt-*"))
    return attempts[-1] if attempts else path


def _rank_folders(home: Path) -> list[Path]:
    """Rank folders of an attempt, the lowest ranks."""
    folders = [f for f in sorted(home.glob("rank-*")) if f.name.removeprefix("rank-").isdigit()]
    return folders[:MOST_RANKS]
