"""Tasks of a step with device work: kernels on their streams, launched by a host that goes on meanwhile.

The host is one timeline, cut where it launches and where it waits. A kernel that communicates is a transfer of its rank's
link, after the computing kernel that was launched last before it; a kernel that starts within 20 µs of a transfer's end,
and was launched before that, waited for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.whatif._host_tasks import phases_at
from trine.optim.plan.whatif.graph import LINK, RankStep, Task
from trine.optim.plan.whatif.operators import Operator, operator_of
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

__all__ = ["steps_of_kernels"]

Array = npt.NDArray[Any]

_COMMUNICATION, _COMPUTE = DEVICE_KINDS.index("communication"), DEVICE_KINDS.index("compute")
_SYNC, _RUNTIME = HOST_KINDS.index("sync"), HOST_KINDS.index("runtime")
#: Work that starts this soon after a transfer's end waited for it.
HANDOVER_NS = 20_000
_BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
             "hipDeviceSynchronize", "hipEventSynchronize")  # fmt: skip
_WAIT = Operator("wait", None, None, 0, "fp32")
_TRANSFER = Operator("transfer", None, None, 0, "fp32")
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
        last = int(device["end_ns"][rows].max())
        tasks = _tasks(rank, host, device, rows, start, end)
        found.append((index, RankStep(rank.rank, tuple(tasks), (max(last, end) - start) / 1e9)))
    return found


def _tasks(rank: Rank, host: Table, device: Table, rows: Array, start: int, end: int) -> list[Task]:
    """In the order of their launches, between which the host's own time lies."""
    launched = np.minimum(host["start_ns"][device["launch"][rows]], device["start_ns"][rows])
    order = np.lexsort((device["start_ns"][rows], launched))
    rows, launched = rows[order], launched[order]
    delay = _delay(device, rows, launched)
    phase_of = phases_at(host, start, end)
    stops = _blocking(host, start, end)
    sizes = _bytes_by_row(rank.collectives)
    tasks: list[Task] = []
    at, last_compute = start, None
    ends: list[tuple[int, int]] = []  # transfers, and when each ended
    counts: dict[str, int] = {}
    newest: dict[int, int] = {}  # stream → its newest task
    place = 0
    for row, launch in zip(rows.tolist(), launched.tolist(), strict=True):
        while place < len(stops) and stops[place][0] <= launch:
            at = _wait(tasks, at, stops[place], phase_of, newest)
            place += 1
        launch = max(launch, at)
        glue = Task((launch - at) / 1e9, phase_of(launch))
        tasks.append(glue)
        at = launch
        begin, stop = int(device["start_ns"][row]), int(device["end_ns"][row])
        communicates = device["kind"][row] == _COMMUNICATION
        after = [glue.number]
        if communicates and last_compute is not None:
            after.append(last_compute)
        after += [number for number, ended in ends if 0 <= begin - ended <= HANDOVER_NS and launch < ended]
        name = device.strings.text(int(device["name"][row])) or ""
        seconds = (stop - begin) / 1e9
        if communicates:
            size, operation = sizes.get(row, (0, name))
            counts[operation] = counts.get(operation, 0) + 1
            task = Task(seconds, phase_of(launch), LINK, _TRANSFER, operation, tuple(after), issued=operation,
                        key=f"{operation} {counts[operation]}", bytes=size)  # fmt: skip
            ends.append((task.number, stop))
        else:
            stream = int(device["stream"][row])
            task = Task(seconds, phase_of(launch), f"stream {stream}", _operator(host, int(device["launch"][row])), name,
                        tuple(after), sequence=_sequence(host, int(device["launch"][row])), events=1)  # fmt: skip
            last_compute = task.number
            # The way from the launch to the device passes beside the host: it counts where the stream is idle.
            if stream not in newest and delay > 0:
                tasks.append(Task(delay, task.phase, f"stream {stream}", after=(glue.number,)))
            newest[stream] = task.number
        tasks.append(task)
    for stop_ in stops[place:]:
        at = _wait(tasks, at, stop_, phase_of, newest)
    tasks.append(Task(max(end - at, 0) / 1e9, "other"))
    return tasks


def _wait(tasks: list[Task], at: int, stop: tuple[int, int], phase_of: Any, newest: dict[int, int]) -> int:
    """The host's time until a blocking call, and the call: it returns when all that was launched has ended."""
    begin = max(stop[0], at)
    tasks.append(Task((begin - at) / 1e9, phase_of(begin)))
    tasks.append(Task(0.0, phase_of(begin), operator=_WAIT, after=tuple(newest.values())))
    return max(stop[1], begin)


def _delay(device: Table, rows: Array, launched: Array) -> float:
    """From a launch to the start on an idle stream: the shortest that was seen, s."""
    found = device["start_ns"][rows] - launched
    return float(found.min()) / 1e9 if len(found) else 0.0


def _blocking(host: Table, start: int, end: int) -> Sequence[tuple[int, int]]:
    codes = [host.strings.find(name) for name in _BLOCKING]
    inside = (host["start_ns"] >= start) & (host["end_ns"] <= end)
    rows = np.flatnonzero(inside & (np.isin(host["name"], codes)))
    rows = rows[np.argsort(host["start_ns"][rows], kind="stable")]
    return list(zip(host["start_ns"][rows].tolist(), host["end_ns"][rows].tolist(), strict=True))


def _bytes_by_row(table: Table | None) -> dict[int, tuple[int, str]]:
    if table is None:
        return {}
    names = table.text("operation").tolist()
    return {
        row: (max(size, 0), str(name))
        for row, size, name in zip(table["device_row"].tolist(), table["bytes"].tolist(), names, strict=True)
        if row >= 0
    }


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
