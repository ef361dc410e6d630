"""Starts and ends of NCCL collectives from NVIDIA's Inspector, a profiler plugin that NCCL loads when it is told to.

With ``NCCL_INSPECTOR_ENABLE=1``, ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` and ``NCCL_INSPECTOR_DUMP_DIR`` the plugin appends
a JSON object for each collective to files in that folder, with host times of the call and of its kernels in Unix
microseconds (NCCL's ``ext-profiler/inspector``, format 4 and 5). This module follows the files of this process and finds for
each row of the observer the object of the same call: the same operation and size, issued at the same time.

Written from NVIDIA's sources; it has not met a running Inspector.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trine.record.model import MISSING

from .spelling import standard_operation

__all__ = ["InspectorJoin", "InspectorTail", "Timing"]

#: The plugin notes the call while the host is inside it: this much may lie between our mark and its own.
_SAME_CALL_NS = 5_000_000
#: Bytes read at once: a reader that is behind catches up over several drains.
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """One collective as the Inspector tells it; times in Unix nanoseconds, ``start_ns`` and ``end_ns`` of its kernels."""

    operation: str
    bytes: int
    ranks: int
    called_ns: int
    start_ns: int
    end_ns: int


class _Kernel(msgspec.Struct):
    kernel_start_ts: int = 0
    kernel_stop_ts: int = 0


class _Trace(msgspec.Struct):
    coll_start_ts: int = 0
    kernel_events: list[_Kernel] = []


class _Performance(msgspec.Struct):
    coll: str = ""
    coll_msg_size_bytes: int = 0
    event_trace_ts: _Trace | None = None


class _Header(msgspec.Struct):
    n_ranks: int = 0


class _Metadata(msgspec.Struct):
    pid: int = 0


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Performance | None = None


@dataclass(slots=True)
class InspectorTail:
    """Follows the Inspector's files of one process."""

    folder: Path
    process: int
    #: Lines that could not be understood, and collectives whose lines hold no times.
    unreadable: int = 0
    untimed: int = 0
    _offsets: dict[Path, int] = field(default_factory=dict)
    _waiting: list[Timing] = field(default_factory=list)

    @classmethod
    def of_environment(cls) -> InspectorTail | None:
        """For this process, when its environment asks for a dump that holds times."""
        folder = os.environ.get("NCCL_INSPECTOR_DUMP_DIR")
        asked = os.environ.get("NCCL_INSPECTOR_ENABLE") == "1" and os.environ.get("NCCL_PROFILER_PLUGIN")
        verbose = os.environ.get("NCCL_INSPECTOR_DUMP_VERBOSE") == "1"
        return cls(Path(folder), os.getpid()) if folder and asked and verbose else None

    def read(self) -> None:
        """Take in what was appended since the last call. Raises nothing on files that come and go."""
        try:
            paths = sorted(path for path in self.folder.iterdir() if path.is_file())
        except OSError:
            return
        for path in paths:
            self._read_file(path)
        self._waiting.sort(key=lambda timing: timing.called_ns)

    def _read_file(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                block = file.read(_MOST_BYTES)
        except OSError:
            return
        whole = block[: block.rfind(b"\n") + 1]  # the last line may be half written
        self._offsets[path] = offset + len(whole)
        for line in whole.splitlines():
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=_Line, strict=False)
        except msgspec.MsgspecError:
            self.unreadable += 1
            return
        performance = told.coll_perf
        if told.metadata.pid != self.process or performance is None:
            return
        trace = performance.event_trace_ts
        kernels = [
            k for k in (trace.kernel_events if trace else []) if k.kernel_start_ts and k.kernel_stop_ts
        ]
        if trace is None or not trace.coll_start_ts or not kernels:
            self.untimed += 1
            return
        self._waiting.append(
            Timing(
                _operation(performance.coll),
                performance.coll_msg_size_bytes,
                told.header.n_ranks,
                trace.coll_start_ts * 1000,
                min(k.kernel_start_ts for k in kernels) * 1000,
                max(k.kernel_stop_ts for k in kernels) * 1000,
            )
        )

    def find(
        self, operation: str | None, sizes: tuple[int, ...], ranks: int, issued_ns: int
    ) -> Timing | None:
        """The timing of the call that was issued at ``issued_ns`` (Unix), taken out; ``None`` when there is none (yet).

        ``sizes``: the call's bytes in and out: the plugin counts some operations by the one, some by the other.
        """
        for position, timing in enumerate(self._waiting):
            if timing.called_ns > issued_ns + _SAME_CALL_NS:
                return None
            close = timing.called_ns >= issued_ns - 1_000_000  # its clock ticks in microseconds
            same = timing.operation == operation and timing.bytes in sizes and ranks in (timing.ranks, -1)
            if close and same:
                return self._waiting.pop(position)
        return None

    def forget_before(self, time_ns: int) -> None:
        """Drop timings of calls before ``time_ns`` that nothing asked for."""
        self._waiting = [timing for timing in self._waiting if timing.called_ns >= time_ns]


class InspectorJoin:
    """Holds back rows without an end until the Inspector has told it, for a few seconds."""

    PATIENCE_NS = 5_000_000_000

    def __init__(self, tail: InspectorTail) -> None:
        self.tail = tail
        self._held: list[tuple[int, dict[str, Any]]] = []
        self.matched = 0

    def through(self, columns: Mapping[str, Any], sizes: Mapping[str, int], last: bool) -> dict[str, Any]:
        """The columns of one drain with those held before; ``sizes``: ranks by group; ``last``: hold nothing back."""
        self.tail.read()
        now = time.perf_counter_ns()
        behind = time.time_ns() - now
        ready: list[dict[str, Any]] = []
        waiting = [*self._held, *((now, row) for row in _rows_of(columns))]
        self._held = []
        for since, row in waiting:
            known = row["end_ns"] != MISSING or self._time(row, sizes.get(row["group"] or "", -1), behind)
            if known or last or now - since >= self.PATIENCE_NS:
                ready.append(row)
            else:
                self._held.append((since, row))
        self.tail.forget_before(now + behind - 4 * self.PATIENCE_NS)
        return {name: _column([row[name] for row in ready]) for name in ready[0]} if ready else {}

    def _time(self, row: dict[str, Any], ranks: int, behind: int) -> bool:
        found = self.tail.find(
            row["operation"], (row["in_bytes"], row["out_bytes"]), ranks, row["issued_ns"] + behind
        )
        if found is None:
            return False
        self.matched += 1
        row.update(start_ns=found.start_ns - behind, end_ns=found.end_ns - behind, state="completed")
        return True


def _rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = {name: getattr(values, "tolist", lambda v=values: v)() for name, values in columns.items()}
    count = len(next(iter(lists.values()), ()))
    return [{name: values[row] for name, values in lists.items()} for row in range(count)]


def _column(values: list[Any]) -> Any:
    return np.array(values, dtype=np.int64) if isinstance(values[0], int) else values


def _operation(name: Any) -> str:
    """``all_reduce`` of ``AllReduce``."""
    text = str(name)
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in text).lstrip("_")
    return standard_operation(snake)
