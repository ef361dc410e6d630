"""Collectives through the C++ observer: every one, whoever issued it, for about 3 µs each.

On gloo a row has the true start and end. Its group comes from the thread it ran on
(:mod:`trine.profiler.gloo_threads`), and its sequence from counting within the group on from what the flight recorder
said at the start, and the flight recorder, read now and then, checks both and adds times of issue.
On NCCL a row has issue, bytes, group and (with torch 2.12 and newer) sequence; start and end are
missing, because the host only launches the work.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING

from .flight import FlightEntry, FlightReader
from .gloo_threads import Collective, GlooThreads
from .groups import process_groups
from .inspector import InspectorJoin, InspectorTail
from .observer_library import ObserverLibrary
from .point_to_point import PointToPointCalls
from .protocols import Note
from .spelling import dtype_of, standard_operation

__all__ = ["ObserverSource"]

Array = npt.NDArray[Any]

#: Of the time, for reading the flight recorder while it is not known which group some threads run collectives of.
_SHARE_OF_UNKNOWN = 0.01


@dataclass(slots=True)
class _Rows:
    """Columns that are being filled, parallel to the raw rows."""

    raw: Array
    operation: list[str | None]
    label: list[str | None]
    group: list[str | None]
    sequence: list[int]
    peer: list[int]
    issued_ns: list[int]
    size: list[int] = field(default_factory=list)


class ObserverSource:
    """The :class:`~trine.profiler.protocols.CollectiveSource` that uses the C++ observer."""

    name = "observer"

    def __init__(self, library: Path, note: Note) -> None:
        """Raises ``OSError`` when ``library`` cannot be loaded."""
        self._library = ObserverLibrary(library)
        self._note = note
        self._noted: set[str] = set()
        self._threads = GlooThreads()
        self._flight = FlightReader()
        self._calls = PointToPointCalls()
        self._base: dict[str, int] = {}
        #: Rows of each thread whose group was not known, which its group's numbers must pass over.
        self._unnumbered: Counter[int] = Counter()
        self._unchecked: list[FlightEntry] = []
        self._pairs: dict[tuple[str, int, bool], int] = defaultdict(int)
        self._offset_ns = 0
        self._dropped_before = 0
        self._trusted = True
        self._stopped = False
        tail = InspectorTail.of_environment()
        self._inspector = None if tail is None else InspectorJoin(tail)

    def start(self) -> None:
        """Begin observing; what was issued before is not seen but counted where the flight recorder knows it."""
        self._offset_ns = self._library.clock_offset_ns()
        self._library.drain()
        self._dropped_before = self._library.dropped()
        self._calls.start()
        self._library.enable()
        self._threads.refresh()
        process_groups()
        for entry in self._flight.read():
            if not entry.is_p2p:
                self._base[entry.group] = max(self._base.get(entry.group, 0), entry.collective_seq_id)
        self._flight.allow_next()
        if not self._flight.available:
            self._say(
                "collectives-sequence",
                "info",
                "PyTorch's flight recorder is off: collectives are numbered from the first one observed",
            )

    def stop(self) -> None:
        """Remove the callback. Rows of collectives that are still running appear in the last drain or not at all."""
        self._library.disable()
        self._calls.stop()
        self._stopped = True

    def drain(self) -> Mapping[str, Sequence[Any]]:
        """Collectives that ended since the last call; see :class:`~trine.profiler.protocols.CollectiveSource`."""
        raw = self._library.drain()
        dropped = self._library.dropped() - self._dropped_before
        if dropped:
            self._say(
                "collectives-dropped",
                "warning",
                f"at least {dropped} collectives were dropped: they came faster than they could be written; "
                "sequence numbers after that are left out",
            )
            self._trusted = False
        columns: dict[str, Any] = {}
        if len(raw):
            rows = self._describe(raw)
            self._number(rows)
            if self._unchecked or self._flight.due():
                self._check(rows)
            columns = self._columns(rows)
        if self._inspector is None:
            return columns
        sizes = {group.id: len(group.ranks) for group in process_groups()}
        return self._inspector.through(columns, sizes, last=self._stopped)

    # --- one drain, step by step ---

    def _describe(self, raw: Array) -> _Rows:
        names = [name.decode("utf-8", "replace") for name in raw["name"].tolist()]
        told = [text.decode("utf-8", "replace") for text in raw["operation"].tolist()]
        prefixed = [name.split(":", 1)[0] in _BACKENDS and ":" in name for name in names]
        count = len(raw)
        rows = _Rows(
            raw=raw,
            operation=[
                standard_operation(name.split(":", 1)[1])
                if known
                else standard_operation(text)
                if text
                else None
                for name, known, text in zip(names, prefixed, told, strict=True)
            ],
            label=[None if known else name for name, known in zip(names, prefixed, strict=True)],
            group=[text.decode("utf-8", "replace") or None for text in raw["group"].tolist()],
            sequence=[MISSING] * count,
            peer=[MISSING] * count,
            issued_ns=[MISSING] * count,
        )
        self._find_groups(rows)
        return rows

    def _find_groups(self, rows: _Rows) -> None:
        """Groups of gloo rows: by worker thread, and for point-to-point by the call that issued it."""
        raw = rows.raw
        workers = np.flatnonzero(raw["worker"] == 1).tolist()
        threads = raw["thread"].tolist()
        self._threads.ran(threads[row] for row in workers)
        if any(self._threads.group(threads[row]) is None for row in workers):
            self._threads.refresh()
            for ended in self._unnumbered.keys() - self._threads.alive:
                del self._unnumbered[ended]
            if self._threads.can_learn:
                self._ask_recorder(
                    rows, [row for row in workers if self._threads.group(threads[row]) is None]
                )
        for row in workers:
            group = rows.group[row] = self._threads.group(threads[row])
            if group is not None and self._unnumbered:
                # Of all its threads: which of them ran what differs between ranks, and their numbers must not.
                passed = sum(self._unnumbered.pop(thread, 0) for thread in self._threads.of_group(group))
                self._base[group] = self._base.get(group, 0) + passed
        start = (raw["start_ns"] + self._offset_ns).tolist()
        for row in np.flatnonzero(raw["worker"] == 0).tolist():
            rows.issued_ns[row] = start[row]
            if rows.operation[row] in ("send", "recv"):
                call = self._calls.find(threads[row], start[row])
                if call is not None:
                    rows.group[row] = rows.group[row] or call.group
                    rows.peer[row] = call.peer
        self._calls.forget_before(start[-1] - 5_000_000_000 if start else 0)
        if any(group is None for group in rows.group):
            self._say(
                "collectives-group",
                "info",
                "the process group of some collectives is unknown: gloo does not tell it, and its threads could not "
                "be told apart",
            )
        sizes = {group.id: len(group.ranks) for group in process_groups()}
        told = raw["group_size"].tolist()
        # Where all groups are of one size it does not matter which of them a row's is.
        only = next(iter(sizes.values())) if len(set(sizes.values())) == 1 else -1
        rows.size = [
            sizes.get(group or "", told[row] if told[row] > 0 else only)
            for row, group in enumerate(rows.group)
        ]

    def _ask_recorder(self, rows: _Rows, unknown: Sequence[int]) -> None:
        """Let the flight recorder tell the groups of threads that counting could not: those of ``unknown`` rows."""
        threads, sizes = rows.raw["thread"].tolist(), rows.raw["tensor_bytes"].tolist()
        ran = {(threads[row], _kind(rows.operation[row], sizes[row])) for row in unknown}
        urgent = self._stopped or self._threads.are_new({thread for thread, _ in ran})
        if ran and (urgent or self._flight.due(_SHARE_OF_UNKNOWN)):
            self._unchecked = self._read_recorder()
        self._threads.learn(ran)

    def _read_recorder(self) -> list[FlightEntry]:
        """What the flight recorder has beyond the last reading, without point-to-point, which it lacks on gloo."""
        entries = [entry for entry in self._flight.read() if not entry.is_p2p]
        self._threads.remember(
            (_kind(standard_operation(entry.operation), entry.in_bytes), entry.group) for entry in entries
        )
        return entries

    def _number(self, rows: _Rows) -> None:
        """Sequence within the group (collectives) or within the pair and direction (point-to-point)."""
        told = rows.raw["sequence"].tolist()
        threads = rows.raw["thread"].tolist()
        for row, group in enumerate(rows.group):
            if rows.operation[row] in ("send", "recv"):
                if group is not None and rows.peer[row] != MISSING:
                    key = (group, rows.peer[row], rows.operation[row] == "send")
                    self._pairs[key] += 1
                    rows.sequence[row] = self._pairs[key]
            elif told[row] != MISSING:
                rows.sequence[row] = told[row]
            elif group is not None and self._trusted:
                self._base[group] = self._base.get(group, 0) + 1
                rows.sequence[row] = self._base[group]
            elif group is None:
                self._unnumbered[threads[row]] += 1

    def _check(self, rows: _Rows) -> None:
        """Compare with the flight recorder: add times of issue; where it disagrees, believe it."""
        behind = time.time_ns() - time.perf_counter_ns()
        entries: dict[tuple[str, int], FlightEntry] = {}
        for entry in self._unchecked or self._read_recorder():
            entries[entry.group, entry.collective_seq_id] = entry
        self._unchecked = []
        wrong = 0
        start = (rows.raw["start_ns"] + self._offset_ns).tolist()
        for row, group in enumerate(rows.group):
            found = entries.get((group or "", rows.sequence[row]))
            if found is None or rows.operation[row] in ("send", "recv"):
                continue
            issued = found.time_created_ns - behind
            operation = standard_operation(found.operation)
            if rows.operation[row] is None:
                rows.operation[row] = operation
            told = found.in_bytes if operation in _SAME_SIZE else MISSING
            other_size = told not in (MISSING, rows.raw["tensor_bytes"][row])
            # The recorder's clock can be stepped: 50 ms are allowed for that.
            if rows.operation[row] != operation or other_size or issued > start[row] + 50_000_000:
                wrong += 1
            elif rows.issued_ns[row] == MISSING:
                rows.issued_ns[row] = min(issued, start[row])
        if wrong:
            self._resynchronise(rows, wrong)

    def _resynchronise(self, rows: _Rows, wrong: int) -> None:
        """What was believed about groups or order was wrong: leave it out rather than mislead."""
        for row in range(len(rows.group)):
            if rows.raw["worker"][row] == 1:
                rows.sequence[row] = MISSING
        self._trusted = False
        self._say(
            "collectives-sequence",
            "warning",
            f"{wrong} collectives were not in the order that PyTorch's flight recorder tells; sequence numbers are "
            "left out from there on",
        )

    def _columns(self, rows: _Rows) -> dict[str, Any]:
        raw = rows.raw
        worker = raw["worker"] == 1
        waits = np.array([operation in ("send", "recv") for operation in rows.operation])
        # On gloo point-to-point begins with the call and ends when its wait returns.
        gloo = worker | (waits & np.char.startswith(raw["name"], b"gloo:"))
        sizes = _sizes(rows)
        if self._inspector is None and not gloo.all():
            self._say(
                "collectives-untimed",
                "info",
                "collectives on a device have their issue but no start and end outside deep windows: NCCL's Inspector plugin "
                "would give them (docs/collectives.md)",
            )
        return {
            "operation": rows.operation,
            "label": rows.label,
            "group": rows.group,
            "sequence": np.array(rows.sequence, dtype=np.int64),
            "peer": np.array(rows.peer, dtype=np.int64),
            "in_bytes": sizes[0],
            "out_bytes": sizes[1],
            "bytes": sizes[2],
            "dtype": [dtype_of(code)[0] for code in raw["dtype"].tolist()],
            "issued_ns": np.array(rows.issued_ns, dtype=np.int64),
            "start_ns": np.where(gloo, raw["start_ns"] + self._offset_ns, MISSING),
            "end_ns": np.where(gloo, raw["end_ns"] + self._offset_ns, MISSING),
            "state": ["completed" if done else "issued" for done in gloo.tolist()],
        }

    def _say(self, id: str, severity: Any, message: str) -> None:
        if id not in self._noted:
            self._noted.add(id)
            self._note(id, severity, message)


#: Operations whose input the flight recorder and the Work tell alike on every rank, roots included.
_SAME_SIZE = frozenset({"all_reduce", "all_gather", "all_to_all", "broadcast"})
_BACKENDS = frozenset({"gloo", "nccl", "xccl", "ucc", "mpi", "hccl"})


def _kind(operation: str | None, given: int) -> Collective:
    return operation, given if operation in _SAME_SIZE else MISSING


def _sizes(rows: _Rows) -> tuple[Array, Array, Array]:
    """in_bytes, out_bytes and bytes as nccl-tests counts them, shape (rows,) each."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    raw = rows.raw
    described = zip(
        rows.operation,
        rows.size,
        raw["tensor_bytes"].tolist(),
        raw["in_elements"].tolist(),
        raw["out_elements"].tolist(),
        raw["dtype"].tolist(),
        strict=True,
    )
    for operation, size, tensors, in_elements, out_elements, dtype in described:
        width = dtype_of(dtype)[1]
        if in_elements != MISSING and width:
            given, made = in_elements * width, out_elements * width
        else:
            given = tensors
            made = _output_bytes(operation, tensors, size)
        columns[0].append(given)
        columns[1].append(made)
        columns[2].append(made if operation == "all_gather" else given)
    return tuple(np.array(column, dtype=np.int64) for column in columns)  # type: ignore[return-value]


def _output_bytes(operation: str | None, given: int, size: int) -> int:
    if operation in ("all_gather", "reduce_scatter") and size <= 0:
        return MISSING
    if operation == "all_gather":
        return given * size
    if operation == "reduce_scatter":
        return given // size
    return given
