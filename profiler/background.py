"""The background thread: takes what the training thread left, resolves it, and appends it to the record.

Twice a second it collects finished parts (on a device only those whose events are ready: it asks, it never waits),
drains the collectives, computes phases, and writes once. All its work counts against training, since both share the
interpreter, so rows are handled as columns wherever there may be many.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trine.record.model import MISSING, PHASES
from trine.record.store import RankWriter

from .clocks import Anchor
from .guard import Guard
from .marks import EventPool
from .phases import Spans, classify, partition, segments
from .protocols import CollectiveSource
from .regions import Region, Regions

__all__ = ["Background", "Part", "PendingLoss"]

_PERIOD_S = 0.5
#: After a failed write, as long until the next attempt: a full disk may empty.
_RETRY_S = 5.0
#: How long the end waits for a device that still works on the last steps.
_LAST_EVENTS_S = 2.0
#: Of parts, and of samples, that wait for the background thread. Beyond it they are counted, not kept.
MOST_WAITING = 50_000
#: Of collectives in one flush.
MOST_COLLECTIVES = 200_000
_MOST_SPANS = 20_000


@dataclass(slots=True)
class PendingLoss:
    """A loss that is on its way from a device: a pinned host copy, readable once its event is ready."""

    event: Any
    host: Any
    give_back: Callable[[PendingLoss], None]

    def value(self) -> float | None:
        """The loss, or ``None`` while it is on its way."""
        if not self.event.query():
            return None
        value = float(self.host.item())
        self.give_back(self)
        return value


@dataclass(slots=True)
class Part:
    """A step, or one batch of a step whose gradients accumulate, as the training thread left it."""

    index: int
    marks: list[Any]
    complete: bool = False
    has_backward: bool = False
    host_batch: bool = False
    tokens: int | None = None
    padding: int | None = None
    samples: int | None = None
    loss: float | PendingLoss | None = None
    flops: float | None = None


@dataclass(slots=True)
class _Rows:
    """Columns of resolved parts, and where the last of them ended."""

    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)


class Background:
    """Owns the writer. The training thread only appends to :attr:`parts` and :attr:`samples`."""

    def __init__(
        self,
        writer: RankWriter,
        source: CollectiveSource | None,
        events: EventPool | None,
        anchor: Anchor,
        guard: Guard,
        regions: Regions,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.parts: deque[Part] = deque()
        self.samples: deque[tuple[int, str, float]] = deque()
        #: (direction, stage, index, start, end) of a pipeline's work, in ``perf_counter_ns``.
        self.microbatches: deque[tuple[str, int, int, int, int]] = deque()
        self.overflow: dict[str, int] = {}
        #: (start, index) of parts, for giving collectives to steps; the training thread appends.
        self.boundaries: deque[tuple[int, int]] = deque([(0, 0)], maxlen=20_000)
        self._writer = writer
        self._source = source
        self._events = events
        self._anchor = anchor
        self._guard = guard
        self._regions = regions
        self._describe = describe
        self._stop = threading.Event()
        self._retry_at = 0.0
        self._spans: list[tuple[int, int]] = []
        self._end_ns = 0
        self._device_end: tuple[Any, int] | None = None
        self._thread = threading.Thread(target=self._run, name="trine-record", daemon=True)
        self.final: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def finish(self, final: Mapping[str, Any], timeout_s: float = 10.0) -> bool:
        """Write the rest with the last description; false when the disk did not take it within the time."""
        self.final = dict(final)
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def complete_last(self, part: Part) -> None:
        """The step of ``part``, the last that was appended, turns out to have ended with it."""
        self.parts.append(Part(part.index, [], complete=True))

    def count_overflow(self, what: str, count: int = 1) -> None:
        """Something came faster than it could be kept."""
        self.overflow[what] = self.overflow.get(what, 0) + count

    def take_microbatches(self, rows: Sequence[tuple[str, int, int, int, int]]) -> None:
        """What a stage of a pipeline did in a step. Called in the training thread."""
        if len(self.microbatches) + len(rows) > MOST_WAITING:
            self.count_overflow("microbatches", len(rows))
            return
        self.microbatches.extend(rows)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._guard.run("record", self.flush)
        self._guard.run("end of the record", self._finish)

    def _finish(self) -> None:
        deadline = time.monotonic() + _LAST_EVENTS_S
        self.flush()
        while self.parts and time.monotonic() < deadline:
            time.sleep(0.01)
            self.flush()
        self.flush(give_up=True)
        try:
            self._writer.close({**self._describe(), **(self.final or {})})
        except OSError as error:
            self._disk_failed(error, 0)

    def flush(self, give_up: bool = False) -> None:
        """Write what is ready. ``give_up``: also parts whose device times have not arrived, without their phases."""
        parts = self._take_parts(give_up)
        collectives = self._take_collectives()
        tables: dict[str, Mapping[str, Any]] = {}
        if parts:
            tables["parts"] = self._part_columns(parts)
        if collectives:
            tables["collectives"] = collectives
        readings = [self.samples.popleft() for _ in range(len(self.samples))]
        if readings:
            times, metrics, values = zip(*readings, strict=True)
            tables["samples"] = {
                "time_ns": np.asarray(times, dtype=np.int64) + self._anchor.offset_ns,
                "metric": metrics,
                "value": values,
            }
        worked = [self.microbatches.popleft() for _ in range(len(self.microbatches))]
        if worked:
            tables["microbatches"] = self._microbatch_columns(worked)
        regions = [self._regions.finished.popleft() for _ in range(len(self._regions.finished))]
        if regions:
            tables["regions"] = self._region_columns(regions)
        self._write(tables, boundary=not parts or parts[-1].complete)

    def _microbatch_columns(self, worked: Sequence[tuple[str, int, int, int, int]]) -> dict[str, Any]:
        directions, stages, indexes, starts, ends = zip(*worked, strict=True)
        started = np.asarray(starts, dtype=np.int64)
        return {
            "direction": directions,
            "stage": stages,
            "index": indexes,
            "start_ns": started + self._anchor.offset_ns,
            "end_ns": np.asarray(ends, dtype=np.int64) + self._anchor.offset_ns,
            "step": self._steps_at(started),
        }

    def _steps_at(self, times: Any) -> Any:
        """The step that each time lies in."""
        boundaries = list(self.boundaries)
        starts = np.array([start for start, _ in boundaries], dtype=np.int64)
        indexes = np.array([index for _, index in boundaries], dtype=np.int64)
        return indexes[np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)]

    def _region_columns(self, regions: Sequence[Region]) -> dict[str, Any]:
        if self._regions.lost:
            self.overflow["regions"] = self._regions.lost
        offset = self._anchor.offset_ns
        return {
            "kind": [region.kind for region in regions],
            "name": [region.name for region in regions],
            "start_ns": [region.start_ns + offset for region in regions],
            "end_ns": [region.end_ns + offset for region in regions],
        }

    def _write(self, tables: Mapping[str, Mapping[str, Any]], boundary: bool) -> None:
        rows = sum(len(next(iter(columns.values()))) for columns in tables.values())
        if time.monotonic() < self._retry_at:
            if rows:
                self.count_overflow("rows (the disk took no more)", rows)
            return
        try:
            if rows:
                self._writer.append(tables, boundary=boundary)
            self._writer.describe(self._describe())
        except OSError as error:
            self._disk_failed(error, rows)

    def _disk_failed(self, error: OSError, rows: int) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        if rows:
            self.count_overflow("rows (the disk took no more)", rows)
        if not self._guard.is_quiet("disk"):
            self._guard.fail("disk", error)

    def _take_parts(self, give_up: bool) -> list[Part]:
        taken = []
        while self.parts:
            part = self.parts[0]
            if isinstance(part.loss, PendingLoss):
                value = part.loss.value()
                if value is None and not give_up:
                    break
                part.loss = value
            if self._events is not None and not give_up and not _is_ready(part):
                break
            taken.append(self.parts.popleft())
        return taken

    def _take_collectives(self) -> dict[str, Any]:
        return {} if self._source is None else self._guard.run("collectives", self._drain, self._source) or {}

    def _drain(self, source: CollectiveSource) -> dict[str, Any]:
        drained = source.drain()
        columns = {name: column for name, column in drained.items() if len(column)}
        if not columns:
            return {}
        length = len(next(iter(columns.values())))
        if length > MOST_COLLECTIVES:
            self.count_overflow("collectives", length - MOST_COLLECTIVES)
            columns = {name: column[:MOST_COLLECTIVES] for name, column in columns.items()}
            length = MOST_COLLECTIVES
        return self._anchored(columns, length)

    def _anchored(self, columns: dict[str, Any], length: int) -> dict[str, Any]:
        """Times made Unix, spans kept for exposure, each row given to the step in which it was issued."""
        times: dict[str, Any] = {}
        for name in ("issued_ns", "start_ns", "end_ns"):
            given = columns.get(name)
            times[name] = np.full(length, MISSING) if given is None else np.asarray(given, dtype=np.int64)
        timed = (times["start_ns"] != MISSING) & (times["end_ns"] != MISSING)
        self._spans += zip(times["start_ns"][timed].tolist(), times["end_ns"][timed].tolist(), strict=True)
        if len(self._spans) > _MOST_SPANS:  # a very long step: the union says as much
            union = Spans([start for start, _ in self._spans], [end for _, end in self._spans])
            self._spans = list(zip(union.starts, union.ends, strict=True))
        issued = np.where(times["issued_ns"] != MISSING, times["issued_ns"], times["start_ns"])
        columns["step"] = np.where(issued == MISSING, MISSING, self._steps_at(issued))
        for name, column in times.items():
            columns[name] = np.where(column == MISSING, MISSING, column + self._anchor.offset_ns)
        return columns

    def _part_columns(self, parts: Sequence[Part]) -> dict[str, list[Any]]:
        rows = _Rows()
        spans = Spans([start for start, _ in self._spans], [end for _, end in self._spans])
        last_ns = 0
        for part in parts:
            if not part.marks:
                rows.add(**self._ending(part.index))
                continue
            codes, host, stamps = segments(part.marks)
            kinds = classify(codes[:-1], has_backward=part.has_backward, host_batch=part.host_batch)
            if self._events is None:
                busy = [after - before for before, after in pairwise(stamps)]
                bounds: list[int] = host
                phases: list[int] | None = partition(kinds, host, busy, spans)
            else:
                times = self._device_times(host, stamps)
                bounds = times or host
                phases = None if times is None else partition(kinds, times, None, spans)
            last_ns = host[-1]
            self._end_ns = bounds[-1] + self._anchor.offset_ns
            rows.add(
                index=part.index,
                start_ns=bounds[0] + self._anchor.offset_ns,
                end_ns=self._end_ns,
                tokens=MISSING if part.tokens is None else part.tokens,
                padding_tokens=MISSING if part.padding is None else part.padding,
                samples=MISSING if part.samples is None else part.samples,
                loss=float("nan") if not isinstance(part.loss, float) else part.loss,
                flops=float("nan") if part.flops is None else part.flops,
                complete=int(part.complete),
                **{
                    f"phase_{name}_ns": MISSING if phases is None else phases[row]
                    for row, name in enumerate(PHASES)
                },
            )
        # A collective that ended in a part still open is needed once more.
        self._spans = [(start, end) for start, end in self._spans if end > last_ns]
        return rows.columns

    def _ending(self, index: int) -> dict[str, Any]:
        """A row of no length that says: the step ended with the row before."""
        nothing = {f"phase_{name}_ns": 0 for name in PHASES} | {
            "tokens": 0,
            "padding_tokens": 0,
            "samples": 0,
        }
        unknown = {"loss": float("nan"), "flops": float("nan")}
        return {
            "index": index,
            "start_ns": self._end_ns,
            "end_ns": self._end_ns,
            "complete": 1,
            **nothing,
            **unknown,
        }

    def _device_times(self, host: Sequence[int], stamps: Sequence[Any]) -> list[int] | None:
        """Ascending times of the marks on the device, in ``perf_counter_ns``; ``None`` when an event is missing.

        Elapsed times are chained from the part before. The device cannot reach a mark before the host set it, so a
        chain that says so has drifted and is set to the host's time.
        """
        if any(stamp is None or not stamp.query() for stamp in stamps):
            self._device_end = None
            return None
        start = host[0]
        if self._device_end is not None:
            event, end = self._device_end
            start = max(start, end + round(event.elapsed_time(stamps[0]) * 1e6))
        times = [start]
        for stamp in stamps[1:]:
            times.append(max(times[-1], start + round(stamps[0].elapsed_time(stamp) * 1e6)))
        assert self._events is not None
        if self._device_end is not None:
            self._events.give_back(self._device_end[0])
        for stamp in stamps[:-1]:
            self._events.give_back(stamp)
        self._device_end = (stamps[-1], times[-1])
        return times


def _is_ready(part: Part) -> bool:
    """Whether the device has passed the part's last mark; then it has passed all."""
    last = part.marks[-1] if part.marks else None
    return last is None or bool(last.query())
