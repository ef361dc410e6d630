"""Memory of a rank: peaks, what was alive at the peak, and the curve.

From allocator events where a trace has them, else from the periodic samples of a native record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import Rank, Table

from .allocations import Ledger, ledger, within
from .results import MemorySummary

__all__ = ["snapshot_facts", "summarize_memory"]

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
    found = ledger(rank, table, start_ns, end_ns)
    if found is None:
        return None
    peak_row = found.peak
    peak = int(found.allocated[peak_row])
    on_device = found.device >= 0
    about = snapshot_facts(rank, found.device)
    drawn = np.flatnonzero(found.inside & found.begun)
    reserved = found.reserved
    return MemorySummary(
        peak_bytes=peak,
        reserved_peak_bytes=found.reserved_peak_bytes,
        capacity_bytes=_capacity(rank, found.device) if on_device else None,
        at_peak=_at_peak(rank, found, peak_row, peak, None if reserved is None else int(reserved[peak_row])),
        lower_bound=found.lower_bound,
        retries=about.get("retries"),
        kind="device" if on_device else "host",
        series=_thinned(
            found.time_ns[drawn], found.allocated[drawn], None if reserved is None else reserved[drawn]
        ),
    )


def snapshot_facts(rank: Rank, device: int) -> Mapping[str, Any]:
    """What a memory snapshot says of a device beside its tables; empty for other sources."""
    devices = (rank.metadata.get("memory_snapshot") or {}).get("devices") or {}
    return devices.get(device) or {}


def _at_peak(rank: Rank, found: Ledger, peak_row: int, peak: int, reserved: int | None) -> dict[str, int]:
    """Category → bytes at the peak; sums to it, besides ``reserved_but_free``."""
    categories: dict[str, int] = {}
    if (found.codes >= 0).any():
        codes, levels = found.levels(np.array([peak_row]))
        for code, alive in zip(codes.tolist(), levels[:, 0].tolist(), strict=True):
            if alive > 0:
                name = found.table.strings.text(code) or "unattributed"
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
    keep = within(time, start_ns, end_ns) & np.isfinite(value)
    time, value = time[keep], value[keep].astype(np.int64)
    order = np.argsort(time, kind="stable")
    return time[order], value[order]


# --- both --------------------------------------------------------------------------------------


def _capacity(rank: Rank, device: int | None) -> int | None:
    declared = (rank.metadata.get("device") or {}).get("memory_bytes")
    if declared:
        return int(declared)
    sizes = [d.memory_bytes for d in rank.devices if d.memory_bytes and device in (None, d.index)]
    if sizes:
        return int(sizes[0])
    # Where an allocation failed, what the process had and what was left is what it could have.
    facts = snapshot_facts(rank, device) if device is not None else {}
    reached = [
        reserved + free for _, _, free, reserved in facts.get("out_of_memory", ()) if free >= 0 and reserved
    ]
    return max(reached, default=None)


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
