"""A host and a device, simulated: programs of launches, waits and host work become ranks with exact times.

So a test knows what would have happened without a part of the program: it runs the program without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Strings, Table

#: From a launching call's start to the kernel's, on a free stream, and what each call takes on the host.
DELAY_NS = 5_000
CALL_NS = 2_000
#: Between kernels that follow each other on a stream.
GAP_NS = 1_000
#: From the end of the work to the return of the call that waited for it.
RETURN_NS = 4_000


@dataclass(frozen=True)
class Launch:
    """A kernel; ``operator`` names the span around the call."""

    duration: int
    stream: int = 7
    name: str = "kernel"
    operator: str | None = None
    kind: str = "compute"


@dataclass(frozen=True)
class Host:
    """Host work in a span of its own, or in none."""

    duration: int
    name: str | None = None
    kind: str = "operator"


@dataclass(frozen=True)
class Sync:
    """A blocking call that waits for a stream."""

    stream: int = 7
    name: str = "cudaStreamSynchronize"
    operator: str | None = None


@dataclass(frozen=True)
class StreamWait:
    """A stream waits for all that another was given so far."""

    stream: int
    other: int


@dataclass(frozen=True)
class Step:
    """What runs in one step."""

    body: tuple[Any, ...]


@dataclass
class _Machine:
    now: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    host: list[dict[str, Any]] = field(default_factory=list)
    device: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    step: int = MISSING

    def span(self, start: int, end: int, kind: str, name: str, correlation: int = MISSING) -> int:
        row = {
            "start_ns": start,
            "end_ns": end,
            "kind": HOST_KINDS.index(kind),
            "thread": 1,
            "name": name,
            "correlation": correlation,
            "step": self.step,
        }
        self.host.append(row)
        return len(self.host) - 1

    def run(self, part: Any) -> None:
        begun = self.now
        number = len(self.host) + 1
        if isinstance(part, Host):
            self.now += part.duration
            if part.name is not None:
                self.span(begun, self.now, part.kind, part.name)
        elif isinstance(part, Launch):
            if part.operator is not None:
                self.now += CALL_NS // 2
            called = self.now
            free = self.ends.get(part.stream)
            start = called + DELAY_NS
            for other in (None if free is None else free + GAP_NS, self.held.pop(part.stream, None)):
                start = max(start, other) if other is not None else start
            self.ends[part.stream] = start + part.duration
            row = self.span(called, called + CALL_NS, "runtime", "cudaLaunchKernel", number)
            self.device.append(
                {
                    "start_ns": start,
                    "end_ns": start + part.duration,
                    "kind": DEVICE_KINDS.index(part.kind),
                    "device": 0,
                    "stream": part.stream,
                    "name": part.name,
                    "launch": row,
                    "step": self.step,
                    "correlation": number,
                }
            )
            self.now = called + CALL_NS
            if part.operator is not None:
                self.now += CALL_NS // 2
                self.span(begun, self.now, "operator", part.operator)
        elif isinstance(part, Sync):
            called = self.now
            end = max(called + CALL_NS, self.ends.get(part.stream, 0) + RETURN_NS)
            self.span(called, end, "sync", part.name, number)
            self.now = end
            if part.operator is not None:
                self.span(called, end + 500, "operator", part.operator)
                self.now = end + 500
        elif isinstance(part, StreamWait):
            self.span(self.now, self.now + 500, "runtime", "cudaStreamWaitEvent", number)
            self.held[part.stream] = max(self.held.get(part.stream, 0), self.ends.get(part.other, 0))
            self.waits.append(
                {
                    "kind": "stream_wait",
                    "start_ns": self.now,
                    "end_ns": self.now,
                    "device": 0,
                    "stream": part.stream,
                    "source_stream": part.other,
                    "source_correlation": number,
                    "correlation": number,
                }
            )
            self.now += 500
        else:
            raise TypeError(part)


def _table(name: str, rows: Sequence[dict[str, Any]], strings: Strings, texts: Sequence[str]) -> Table:
    columns = {
        key: [strings.code(row[key]) if key in texts else row[key] for row in rows]
        for key in (rows[0] if rows else ())
    }
    return Table(name, columns, strings)


def simulate(steps: Sequence[Step], *, given: bool = False, rank: int = 0) -> Rank:
    """The rank that runs these steps one after the other; ``given`` adds synchronisation events."""
    machine, marks = _Machine(), []
    for number, step in enumerate(steps):
        machine.step, begun = number, machine.now
        machine.now += 100
        for part in step.body:
            machine.run(part)
        marks.append((number, begun, machine.now))
        machine.now += 100
    for number, begun, end in marks:
        machine.step = number
        machine.span(begun, end, "annotation", f"ProfilerStep#{number}")
    strings = Strings()
    host = _table("host", machine.host, strings, ("name",))
    host.columns["parent"][:] = parents_of(machine.host)
    return Rank(
        rank,
        "simulated",
        "kineto",
        strings,
        steps=Table(
            "steps",
            {
                "index": [mark[0] for mark in marks],
                "start_ns": [mark[1] for mark in marks],
                "end_ns": [mark[2] for mark in marks],
            },
            strings,
        ),
        device=_table("device", machine.device, strings, ("name",)),
        host=host,
        synchronizations=_table("synchronizations", machine.waits, strings, ("kind",)) if given else None,
    )


def parents_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The innermost span of the same thread around each, -1 for none; slow and plain."""
    found = []
    for number, row in enumerate(rows):
        around = [
            (other["end_ns"] - other["start_ns"], place)
            for place, other in enumerate(rows)
            if place != number
            and other["thread"] == row["thread"]
            and other["start_ns"] <= row["start_ns"]
            and other["end_ns"] >= row["end_ns"]
            and (other["end_ns"] - other["start_ns"], place) > (row["end_ns"] - row["start_ns"], number)
        ]
        found.append(min(around)[1] if around else -1)
    return found
