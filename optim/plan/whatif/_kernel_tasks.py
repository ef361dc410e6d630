"""Tasks of a step with device work: kernels on their streams, launched by a host that goes on meanwhile.

The host is one timeline, cut where it launches and where it waits. A kernel that communicates is a transfer of its rank's
link, after the computing kernel that was launched last before it; a kernel that starts within 20 µs of a transfer's end,
and was launched before that, waited for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.whatif._host_tasks import ACCUMULATE, Phases, gradient_bytes
from trine.optim.plan.whatif._names import MESSAGES, Names
from trine.optim.plan.whatif.graph import LINK, RankStep, Task
from trine.optim.plan.whatif.operators import TRANSFER, WAIT, Operator, operator_of
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

__all__ = ["steps_of_kernels"]

Array = npt.NDArray[Any]

_COMMUNICATION, _COMPUTE = DEVICE_KINDS.index("communication"), DEVICE_KINDS.index("compute")
_SYNC, _RUNTIME = HOST_KINDS.index("sync"), HOST_KINDS.index("runtime")
#: Work that starts this soon after a transfer's end waited for it.
HANDOVER_NS = 20_000
#: A trace's first work that starts so long after its launch waited for work that is not on record.
LATE_NS = 1_000_000
#: Transfers that are looked at for that, the newest.
MOST_TRANSFERS = 8
_BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
             "hipDeviceSynchronize", "hipEventSynchronize")  # fmt: skip
_UNKNOWN = Operator("glue", None, None, 0, "fp32")


def steps_of_kernels(rank: Rank) -> list[tuple[int, RankStep]]:
    """(index, step) of every step of this trace that has device work with launches."""
    device, host, steps = rank.device, rank.host, rank.steps
    if device is None or host is None or steps is None or not len(device):
        return []
    found = []
    bounds = zip(steps["index"].tolist(), steps["start_ns"].tolist(), steps["end_ns"].tolist(), strict=True)
    for index, start, end in bounds:
        rows = np.flatnonzero(
            (device["step"] == index) & (device["launch"] >= 0) & (device["end_ns"] > device["start_ns"])
        )
        if end == MISSING or not len(rows):
            continue
        last = max(int(device["end_ns"][rows].max()), end)
        backlog = min(max(_busy_until(host, device, rows, index) - start, 0), last - start)
        tasks = _tasks(rank, host, device, rows, start, end)
        seconds = (last - start - backlog) / 1e9
        found.append((index, RankStep(rank.rank, tuple(tasks), seconds, backlog / 1e9)))
    return found


def _busy_until(host: Table, device: Table, rows: Array, index: int) -> int:
    """When the work of earlier steps had ended; before a trace's first, when its own first work began, had it to wait."""
    before = device["end_ns"][(device["step"] < index) & (device["step"] != MISSING)]
    if len(before):
        return int(before.max())
    first = rows[int(device["start_ns"][rows].argmin())]
    begun = int(device["start_ns"][first])
    return begun if begun - int(host["start_ns"][device["launch"][first]]) > LATE_NS else 0


def _tasks(rank: Rank, host: Table, device: Table, rows: Array, start: int, end: int) -> list[Task]:
    """In the order of their launches, between which the host's own time lies."""
    launched = np.minimum(host["start_ns"][device["launch"][rows]], device["start_ns"][rows])
    order = np.lexsort((device["start_ns"][rows], launched))
    rows, launched = rows[order], launched[order]
    building = _Building(host, device, start, end, _delay(device, rows, launched), _Calls(rank))
    stops = _blocking(host, start, end)
    place = 0
    stored = deque(_stored(host, start, end))
    for row, launch in zip(rows.tolist(), launched.tolist(), strict=True):
        while place < len(stops) and stops[place][0] <= launch:
            building.wait(*stops[place])
            place += 1
        while stored and stored[0][0] <= launch:
            building.store(stored.popleft()[1])
        building.launch(row, launch)
    for _, size in stored:
        building.store(size)
    for stop in stops[place:]:
        building.wait(*stop)
    building.tasks.append(Task(max(end - building.at, 0) / 1e9, "other"))
    return building.tasks


class _Building:
    """A step's tasks so far, and what the next ones may have to wait for; ``at`` is where the host is, ns."""

    def __init__(
        self,
        host: Table,
        device: Table,
        start: int,
        end: int,
        delay_s: float,
        calls: _Calls,
    ) -> None:
        self.host, self.device, self.at = host, device, start
        self.tasks: list[Task] = []
        self._phases = Phases(host, start, end)
        self._delay_s, self._calls = delay_s, calls
        self._last_compute: int | None = None
        self._last_place: int | None = None  # of the same, in ``tasks``
        self._ends: list[tuple[int, int]] = []  # transfers, and when each ended
        self._newest: dict[int, int] = {}  # stream → its newest task
        self._idle: set[int] = set()  # streams that the host has waited for since
        self._until = 0  # when the last of them ended

    def wait(self, start: int, end: int) -> None:
        """The host's time until a blocking call, and the call: it returns when all that was launched has ended."""
        begin, end = max(start, self.at), max(end, self.at)
        phase = self._phases.at(begin)
        self.tasks += self._phases.stretch(self.at, begin)
        if self._until > begin:
            self.tasks.append(Task(0.0, phase, operator=WAIT, after=tuple(self._newest.values())))
            begin = min(max(self._until, begin), end)
        # Without work of this step to wait for, the call takes what it took.
        self.tasks.append(Task((end - begin) / 1e9, phase))
        self._idle |= set(self._newest)
        self.at = end

    def store(self, size: int) -> None:
        """A gradient of so many bytes is there once what was launched last has ended."""
        if (place := self._last_place) is not None:
            task = self.tasks[place]
            self.tasks[place] = replace(task, gradient_bytes=task.gradient_bytes + size)

    def launch(self, row: int, launched: int) -> None:
        """A piece of device work, after the host's time until its launch."""
        launched = max(launched, self.at)
        self.tasks += self._phases.stretch(self.at, launched)
        glue = self.tasks[-1]
        self.at = launched
        begin, end = int(self.device["start_ns"][row]), int(self.device["end_ns"][row])
        after = [glue.number]
        for number, ended in self._ends[-MOST_TRANSFERS:]:
            if 0 <= begin - ended <= HANDOVER_NS and launched < ended:
                after.append(number)
        name = self.device.strings.text(int(self.device["name"][row])) or ""
        if self.device["kind"][row] == _COMMUNICATION:
            if self._last_compute is not None:
                after.append(self._last_compute)
            for task in self._calls.transfers(row, name, glue.phase, (end - begin) / 1e9, after):
                self.tasks.append(task)
                self._ends.append((task.number, end))
        else:
            self._kernel(row, name, glue, (end - begin) / 1e9, after)

    def _kernel(self, row: int, name: str, glue: Task, seconds: float, after: list[int]) -> None:
        stream, launch = int(self.device["stream"][row]), int(self.device["launch"][row])
        lane = f"stream {stream}"
        # The way from the launch to the device passes beside the host: it counts where the stream is idle.
        if self._delay_s > 0 and (stream in self._idle or stream not in self._newest):
            self.tasks.append(Task(self._delay_s, glue.phase, lane, after=(glue.number,)))
            self._idle.discard(stream)
        task = Task(
            seconds, glue.phase, lane, _operator(self.host, launch), name, tuple(after),
            sequence=_sequence(self.host, launch), events=1,
        )  # fmt: skip
        self._last_place = len(self.tasks)
        self.tasks.append(task)
        self._last_compute = self._newest[stream] = task.number
        self._until = max(self._until, int(self.device["end_ns"][row]))


def _delay(device: Table, rows: Array, launched: Array) -> float:
    """From a launch to the start on an idle stream: the median, s; nought where no stream was ever idle."""
    end = np.maximum.accumulate(device["end_ns"][rows])
    free = np.append(launched[:1] * 0 + device["start_ns"][rows][:1], end[:-1]) <= launched
    found = (device["start_ns"][rows] - launched)[free]
    return float(np.median(found)) / 1e9 if len(found) else 0.0


def _stored(host: Table, start: int, end: int) -> Sequence[tuple[int, int]]:
    """(end, bytes) of every gradient that autograd stores in a step, in their order."""
    rows = np.flatnonzero(
        (host["name"] == host.strings.find(ACCUMULATE))
        & (host["start_ns"] >= start)
        & (host["end_ns"] <= end)
    )
    text = host.strings.text
    sizes = [gradient_bytes(text(int(host["shapes"][row])), text(int(host["types"][row]))) for row in rows]
    return sorted(zip(host["end_ns"][rows].tolist(), sizes, strict=True))


def _blocking(host: Table, start: int, end: int) -> Sequence[tuple[int, int]]:
    codes = [host.strings.find(name) for name in _BLOCKING]
    inside = (host["start_ns"] >= start) & (host["end_ns"] <= end)
    rows = np.flatnonzero(inside & (np.isin(host["name"], codes)))
    rows = rows[np.argsort(host["start_ns"][rows], kind="stable")]
    return list(zip(host["start_ns"][rows].tolist(), host["end_ns"][rows].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective or message that a kernel carries out."""

    operation: str
    group: str | None
    peer: int
    bytes: int


class _Calls:
    """A rank's collectives by their kernels, as a step's transfers; of a kernel that is in no table its name is all."""

    def __init__(self, rank: Rank) -> None:
        self._by_row = _calls_by_row(rank.collectives)
        self._names = Names(rank)

    def transfers(
        self, row: int, kernel: str, phase: str, seconds: float, after: Sequence[int]
    ) -> Sequence[Task]:
        """Those of one kernel, which may carry several messages at once."""
        found = []
        for call in self._by_row.get(row, (_Call(kernel, None, MISSING, 0),)):
            name = self._names.next(call.operation, call.group, call.peer, call.bytes)
            task = Task(
                seconds, phase, LINK, TRANSFER, call.operation, tuple(after), issued=call.operation,
                key=name.key, group=name.group, channel=name.channel, bytes=call.bytes,
            )  # fmt: skip
            found.append(task)
        return found


def _calls_by_row(table: Table | None) -> Mapping[int, Sequence[_Call]]:
    found: dict[int, list[_Call]] = defaultdict(list)
    if table is None:
        return found
    columns = (table.text("operation"), table.text("group"), table["peer"], table["bytes"])
    for row, operation, group, peer, size in zip(
        table["device_row"].tolist(), *(column.tolist() for column in columns), strict=True
    ):
        if row >= 0:
            call = _Call(str(operation), group, peer, max(size, 0))
            found[row] = [*found[row], call] if operation in MESSAGES else [call]
    return found


def _operator(host: Table, launch: int) -> Operator:
    """Of the nearest operator around a launch that says what it works on."""
    row = int(host["parent"][launch])
    texts = host.strings
    while row >= 0:
        shapes = texts.text(int(host["shapes"][row]))
        found = operator_of(
            texts.text(int(host["name"][row])) or "", shapes, texts.text(int(host["types"][row]))
        )
        if found.kind in ("product", "memory"):
            return found
        row = int(host["parent"][row])
    return _UNKNOWN


def _sequence(host: Table, launch: int) -> int:
    row = launch
    while row >= 0:
        own = int(host["sequence"][row])
        if own != MISSING and own >= 0:
            return own
        row = int(host["parent"][row])
    return -1
