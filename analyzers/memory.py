"""Memory of a rank: peaks, what was alive at the peak, and the curve.

From allocator events where a trace has them, else from the periodic samples of a native record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Rank, Table

from .results import MemorySummary

__all__ = ["summarize_memory"]

Array = npt.NDArray[Any]

#: Points kept of a curve; each bucket keeps its highest, so the peak is never thinned away.
_MOST_POINTS = 2000

#: Categories that a record's metadata can fill, and the key of ``metadata["model"]`` that does.
_FROM_MODEL = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer_state", "optimizer_bytes"),
)


#: Metrics of a record's samples, the first that is there wins. Devices come first: on one, the
#: host's memory is not what runs out.
_ALLOCATED = ("memory/allocated_bytes", "memory/resident_bytes")
_PEAK = (
    "memory/peak_bytes",
    "memory/peak_allocated_bytes",
    "memory/peak_resident_bytes",
    "memory/resident_peak_bytes",
)
_RESERVED = ("memory/reserved_bytes",)
_RESERVED_PEAK = ("memory/peak_reserved_bytes", "memory/reserved_peak_bytes")
_RETRIES = ("memory/allocator_retries", "memory/retries")


def summarize_memory(
    rank: Rank, start_ns: int | None = None, end_ns: int | None = None
) -> MemorySummary | None:
    """Memory of a rank, of the times from ``start_ns`` to ``end_ns`` alone where given.

    ``None`` where the source recorded none.
    """
    if rank.samples is not None:
        found = _from_samples(rank, rank.samples, start_ns, end_ns)
        if found is not None:
            return found
    tables = [table for table in (rank.memory, *(w.memory for w in rank.windows)) if table is not None]
    summaries = [_from_events(rank, table, start_ns, end_ns) for table in tables]
    known = [summary for summary in summaries if summary is not None]
    return max(known, key=lambda summary: summary.peak_bytes or 0, default=None)


# --- allocator events --------------------------------------------------------------------------


def _from_events(rank: Rank, table: Table, start_ns: int | None, end_ns: int | None) -> MemorySummary | None:
    on_device = table["device"] >= 0
    kind = "device" if on_device.any() else "host"
    device = _busiest_device(table["device"][on_device]) if kind == "device" else -1
    mine = table["device"] == device if kind == "device" else ~on_device
    table = table.select(mine)
    table = table.select(np.argsort(table["time_ns"], kind="stable"))
    allocated, lower_bound = _allocated(table)
    inside = _inside(table["time_ns"], start_ns, end_ns)
    if not inside.any():
        return None
    peak_row = int(np.flatnonzero(inside)[allocated[inside].argmax()])
    reserved = table["reserved_bytes"]
    has_reserved = kind == "device" and bool((reserved[inside] != MISSING).all())
    return MemorySummary(
        peak_bytes=int(allocated[peak_row]),
        reserved_peak_bytes=int(reserved[inside].max()) if has_reserved else None,
        capacity_bytes=_capacity(rank, device) if kind == "device" else None,
        at_peak=_at_peak(
            rank, table, peak_row, int(allocated[peak_row]), int(reserved[peak_row]) if has_reserved else None
        ),
        lower_bound=lower_bound,
        retries=None,
        kind="device" if kind == "device" else "host",
        series=_thinned(
            table["time_ns"][inside], allocated[inside], reserved[inside] if has_reserved else None
        ),
    )


def _busiest_device(devices: Array) -> int:
    found, counts = np.unique(devices, return_counts=True)
    return int(found[counts.argmax()])


def _allocated(table: Table) -> tuple[Array, bool]:
    """Bytes alive after each event, and whether that is a lower bound.

    Where the source gives no totals they are summed from the events; what was alive before the
    first event is then unknown, but at least what is released later without an allocation.
    """
    total = table["allocated_bytes"]
    if (total != MISSING).all():
        return total, False
    running = np.cumsum(table["bytes"])
    return running - min(0, int(running.min())), True


def _at_peak(rank: Rank, table: Table, peak_row: int, peak: int, reserved: int | None) -> dict[str, int]:
    """Category → bytes at the peak; sums to it, besides ``reserved_but_free``."""
    codes = np.unique(table["category"])
    categories: dict[str, int] = {}
    if (codes >= 0).any():
        upto = table.select(slice(0, peak_row + 1))
        for code in codes:
            name = table.strings.text(int(code)) or "unattributed"
            alive = int(upto["bytes"][upto["category"] == code].sum())
            if alive > 0:
                categories[name] = categories.get(name, 0) + alive
    else:
        categories = _from_metadata(rank.metadata, peak)
    known = sum(categories.values()) - categories.get("unattributed", 0)
    categories["unattributed"] = max(0, peak - known)
    if reserved is not None:
        categories["reserved_but_free"] = max(0, reserved - peak)
    return categories


def _from_metadata(metadata: Mapping[str, Any], peak: int) -> dict[str, int]:
    model = metadata.get("model") or {}
    found = {name: int(model[key]) for name, key in _FROM_MODEL if model.get(key)}
    # On a host the peak is the whole process; on a device, parts that exceed the peak cannot be right.
    return found if sum(found.values()) <= peak else {}


# --- samples -----------------------------------------------------------------------------------


def _from_samples(
    rank: Rank, samples: Table, start_ns: int | None, end_ns: int | None
) -> MemorySummary | None:
    metrics = {name: _metric(samples, name, start_ns, end_ns) for name in samples.strings.values}
    metrics = {name: series for name, series in metrics.items() if len(series[0])}

    def first(names: tuple[str, ...]) -> tuple[Array, Array] | None:
        return next((metrics[name] for name in names if name in metrics), None)

    allocated = first(_ALLOCATED)
    if allocated is None:
        return None
    on_device = "memory/allocated_bytes" in metrics
    peaks, reserved, reserved_peaks, retries = map(first, (_PEAK, _RESERVED, _RESERVED_PEAK, _RETRIES))
    # The allocator's own peak counts between samples; without it the samples' highest is a lower bound.
    peak = max(int(series[1].max()) for series in (allocated, peaks) if series is not None)
    at_reserved = [int(series[1].max()) for series in (reserved, reserved_peaks) if series is not None]
    reserved_peak = max(at_reserved, default=None)
    at_peak = _from_metadata(rank.metadata, peak)
    at_peak["unattributed"] = peak - sum(at_peak.values())
    if reserved_peak is not None:
        at_peak["reserved_but_free"] = max(0, reserved_peak - peak)
    aligned = reserved is not None and len(reserved[0]) == len(allocated[0])
    return MemorySummary(
        peak_bytes=peak,
        reserved_peak_bytes=reserved_peak,
        capacity_bytes=_capacity(rank, None),
        at_peak=at_peak,
        lower_bound=peaks is None,
        retries=int(retries[1].max()) if retries is not None else None,
        kind="device" if on_device else "host",
        series=_thinned(*allocated, reserved[1] if aligned and reserved is not None else None),
    )


def _metric(samples: Table, name: str, start_ns: int | None, end_ns: int | None) -> tuple[Array, Array]:
    rows = samples["metric"] == samples.strings.find(name)
    time, value = samples["time_ns"][rows], samples["value"][rows]
    keep = _inside(time, start_ns, end_ns) & np.isfinite(value)
    time, value = time[keep], value[keep].astype(np.int64)
    order = np.argsort(time, kind="stable")
    return time[order], value[order]


# --- both --------------------------------------------------------------------------------------


def _inside(time: Array, start_ns: int | None, end_ns: int | None) -> Array:
    keep = time != MISSING
    if start_ns is not None:
        keep &= time >= start_ns
    if end_ns is not None:
        keep &= time <= end_ns
    return np.asarray(keep)


def _capacity(rank: Rank, device: int | None) -> int | None:
    declared = (rank.metadata.get("device") or {}).get("memory_bytes")
    if declared:
        return int(declared)
    sizes = [d.memory_bytes for d in rank.devices if d.memory_bytes and device in (None, d.index)]
    return int(sizes[0]) if sizes else None


def _thinned(
    time: Array, allocated: Array, reserved: Array | None
) -> tuple[tuple[int, int, int | None], ...]:
    """At most :data:`_MOST_POINTS` points, the highest of each stretch of events."""
    count = len(time)
    rows = np.arange(count)
    if count > _MOST_POINTS:
        edges = np.linspace(0, count, _MOST_POINTS + 1).astype(np.int64)[:-1]
        highest = np.maximum.reduceat(allocated, edges)
        bucket = np.searchsorted(edges, rows, side="right") - 1
        at_highest = np.flatnonzero(allocated == highest[bucket])
        _, first = np.unique(bucket[at_highest], return_index=True)
        rows = at_highest[first]
    free = [None] * len(rows) if reserved is None else reserved[rows].tolist()
    return tuple(zip(time[rows].tolist(), allocated[rows].tolist(), free, strict=True))
