"""Reader of PyTorch's memory snapshots: ``torch.cuda.memory._dump_snapshot`` and pickled ``_snapshot()`` dicts.

A snapshot has two halves, and either may be empty: ``segments``, what the caching allocator held when it was
taken, and ``device_traces``, a ring of what happened before. The first anchors the second: totals after
each event are worked out *backwards* from what was held at the end, so they are exact however much of the
history the ring has lost; without segments they are summed forwards, and then are a lower bound.

Sizes are the allocator's: a request rounded up to 512 bytes, as ``torch.cuda.memory_allocated`` counts it.
A release counts where it is asked for; memory that other streams still used then is in ``pending_peak_bytes``.

Layout: torch/csrc/cuda/Module.cpp, ``THCPModule_memorySnapshot``, and torch/cuda/_memory_viz.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnreadableInput
from ..model import Job, Rank, RankSource, Strings
from ._memory_events import Events
from ._memory_history import Device, read_history
from ._memory_quality import notes_of
from ._memory_segments import read_segments
from ._memory_stacks import StackNumber, Stacks
from ._memory_tables import memory_table, segments_table
from ._pickle_stream import stream
from ._pickles import load, read_bytes
from ._unstated import job_of_unstated

__all__ = ["FORMAT", "open_job", "open_paths", "recognizes"]

FORMAT = "memory_snapshot"

_HEAD_BYTES = 1 << 16
#: Text of stacks that is kept, beside a quarter of the file.
_STACK_BYTES = 8 << 20
#: An event or block takes at least this much of the file; more of them than fit are one object named many times.
_BYTES_A_ROW = 12
_FREE_ROWS = 1000
#: Files up to this size are unpickled at once.
_SMALL_BYTES = 5 << 20


def recognizes(path: Path) -> bool:
    """Whether a file is a pickled snapshot, by its first names. Never raises."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return False
    if head[:1] not in (b"\x80", b"(", b"}", b"]"):
        return False
    return (b"device_traces" in head and b"segments" in head) or (b"total_size" in head and b"blocks" in head)


def open_job(path: Path) -> Job:
    """The job of one snapshot: one rank."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The ranks that these snapshots make, numbered by their names, else by their order."""
    return job_of_unstated(paths, origin, FORMAT, read_rank, "memory snapshots")


def read_rank(source: RankSource) -> Rank:
    """One snapshot as tables ``memory`` and ``segments``. Raises ``UnreadableInput`` with one line."""
    data = read_bytes(source.path)
    size = len(data)
    strings = Strings()
    stacks = Stacks(strings, _STACK_BYTES + size // 4)
    events = Events(stacks)
    snapshot = _snapshot(data, str(source.path), events, stacks)
    del data
    segments, traces, about = _parts(snapshot, source.path)
    del snapshot
    _bounded(segments, traces, size, source.path)
    rank = Rank(source.rank, str(source.path), FORMAT, strings)
    held = read_segments(segments, stacks)
    odd = 0
    devices: list[Device] = []
    for index, trace in enumerate(traces):
        rows = np.array([row for row in trace if type(row) is int and 0 <= row < len(events)], dtype=np.int64)
        odd += len(trace) - len(rows)
        if len(rows):
            devices.append(read_history(index, rows, events, held, stacks, about.get("annotations", ())))
    known = {device.index for device in devices}
    none = np.zeros(0, dtype=np.int64)
    devices += [
        read_history(index, none, events, held, stacks, ()) for index in held.devices if index not in known
    ]
    rank.memory = memory_table(devices, held, stacks, strings)
    rank.segments = segments_table(held, stacks, strings)
    rank.metadata["memory_snapshot"] = _metadata(devices, about)
    for id, severity, message in notes_of(devices, held, stacks, about, odd, has_traces=bool(known)):
        rank.note(id, severity, message)
    return rank


def _snapshot(data: bytes, where: str, events: Events, stacks: Stacks) -> Any:
    """The snapshot with a number of ``events`` in place of each event."""

    if len(data) > _SMALL_BYTES:

        def finished(row: dict[Any, Any], replace: Callable[[Any, Any], None]) -> Any:
            if "filename" in row and "line" in row:
                return stacks.frame(row)
            if type(row.get("action")) is not str:
                return row
            number = events.add(row, lasting=False)
            frames = row.get("frames")
            if type(frames) is list:
                replace(frames, StackNumber(events.stack[number]))
            return number

        return stream(data, where, finished)
    # All at once takes ten times the memory and a third of the time.
    snapshot = load(data, where)
    traces = snapshot.get("device_traces") if type(snapshot) is dict else None
    for trace in traces if type(traces) is list else ():
        if type(trace) is list and len(trace) <= len(data) // _BYTES_A_ROW + _FREE_ROWS:
            trace[:] = [events.add(row) if type(row) is dict and "action" in row else None for row in trace]
    return snapshot


def _parts(snapshot: Any, path: Path) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(segments, traces by device, the rest) of a snapshot of any version."""
    if type(snapshot) is list:  # torch.cuda.memory_snapshot(), and _snapshot() up to torch 1.13
        snapshot = {"segments": snapshot}
    if type(snapshot) is not dict or not ("segments" in snapshot or "device_traces" in snapshot):
        raise UnreadableInput(
            f"{path} is a pickle without segments and device_traces; write one with torch.cuda.memory._dump_snapshot"
        )
    segments, traces = snapshot.get("segments"), snapshot.get("device_traces")
    segments = [each for each in segments if type(each) is dict] if type(segments) is list else []
    traces = [each if type(each) is list else [] for each in traces] if type(traces) is list else []
    if not segments and not any(traces):
        raise UnreadableInput(
            f"{path} holds no segment and no event; was the device used, and was "
            "torch.cuda.memory._record_memory_history() called before?"
        )
    settings = snapshot.get("allocator_settings")
    annotations = snapshot.get("external_annotations")
    overflowed = snapshot.get("trace_alloc_overflowed")
    about = {
        "settings": settings if type(settings) is dict else {},
        "annotations": annotations if type(annotations) is list else (),
        "overflowed": overflowed,
        "most_entries": snapshot.get("trace_alloc_max_entries"),
    }
    return segments, traces, about


def _bounded(segments: list[Any], traces: list[Any], size: int, path: Path) -> None:
    """Refuse a small file that names one long list many times."""
    blocks = (each.get("blocks") for each in segments)
    rows = len(segments) + sum(len(each) for each in blocks if type(each) is list) + sum(map(len, traces))
    if rows > size // _BYTES_A_ROW + _FREE_ROWS:
        raise UnreadableInput(
            f"{path} names the same events again and again ({rows} in {size} bytes); write it again"
        )


def _metadata(devices: Sequence[Device], about: dict[str, Any]) -> dict[str, Any]:
    """What the tables cannot hold, as plain values."""
    settings = {
        str(key)[:80]: value
        for key, value in about["settings"].items()
        if type(value) in (str, int, float, bool) and len(str(value)) < 500
    }
    return {
        "allocator_settings": settings,
        "devices": {device.index: device.about() for device in devices},
    }
