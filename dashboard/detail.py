"""Level of detail: which rectangles of a lane a screen can show.

Below a limit every span is sent. Above it, spans of at least one pixel column stay as they are and
the shorter ones of a column merge into one cell with the kind that fills most of it and the share
of the column that is filled, so an all but idle stretch never looks busy. Pure and vectorised.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "LIMIT",
    "MERGED",
    "Lane",
    "Spans",
    "encode",
    "in_range",
    "make_lane",
    "nesting_depth",
    "pack",
    "reduce_lane",
]

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

#: Rectangles that a browser draws in a few milliseconds; above it the server merges.
LIMIT = 1_000_000
#: Name code of a merged cell.
MERGED = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Lane:
    """Spans of one row of the timeline, sorted by start. Times are float64 ns from the origin of the rank.

    ``reach`` is the running maximum of ends: it finds spans that began before a range and last into it,
    also where spans of a stream overlap.
    """

    label: str
    group: str
    depth: int
    start: Floats
    end: Floats
    kind: Bytes
    name: Codes
    reach: Floats

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Spans:
    """What is sent of a lane: ``fill`` is 255 for a span of its own, else the filled share of its cell."""

    start: Floats
    duration: Floats
    kind: Bytes
    name: Codes
    fill: Bytes
    merged: int  # how many spans the cells stand for


def make_lane(
    label: str,
    group: str,
    start: Integers,
    end: Integers,
    kind: Bytes,
    name: Codes,
    origin_ns: int,
    depth: int = 0,
) -> Lane:
    """Sort by start, subtract the origin while times are still integers, and precompute ``reach``."""
    order = np.argsort(start, kind="stable")
    starts = (start[order] - origin_ns).astype(np.float64)
    ends = (end[order] - origin_ns).astype(np.float64)
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    return Lane(
        label, group, depth, starts, ends, kind[order].astype(np.uint8), name[order].astype(np.uint32), reach
    )


def nesting_depth(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Depth of each row below its outermost ancestor, from ``parent`` rows (-1 none).

    Pointer doubling: log2(depth) passes over the column. Rows on a cycle, which no sound source has,
    count as depth 0.
    """
    count = len(parent)
    depth = (parent >= 0).astype(np.int64)
    jump = np.where((parent >= 0) & (parent < count), parent, -1)
    depth[jump < 0] = 0
    for _ in range(64):
        live = jump >= 0
        if not live.any():
            return depth
        target = jump[live]
        depth[live] += depth[target]
        jump[live] = jump[target]
    depth[jump >= 0] = 0
    return depth


def pack(start: Integers, end: Integers, most: int) -> npt.NDArray[np.int64]:
    """A row for each span so that those of a row do not overlap; spans beyond ``most`` rows share the last.

    Greedy by start: the first row that is free. One pass in Python, for tables of some ten thousand rows.
    """
    rows = np.zeros(len(start), dtype=np.int64)
    free_at: list[int] = []
    for index in np.argsort(start, kind="stable").tolist():
        begin = int(start[index])
        row = next((at for at, free in enumerate(free_at) if free <= begin), len(free_at))
        if row == len(free_at) and row < most:
            free_at.append(0)
        row = min(row, most - 1)
        free_at[row] = max(free_at[row], int(end[index]))
        rows[index] = row
    return rows


def in_range(lane: Lane, begin_ns: float, end_ns: float) -> slice:
    """Rows that may touch the range: a superset at its front only where spans overlap."""
    first = int(np.searchsorted(lane.reach, begin_ns, side="left"))
    last = int(np.searchsorted(lane.start, end_ns, side="right"))
    return slice(first, max(first, last))


def reduce_lane(lane: Lane, begin_ns: float, end_ns: float, columns: int | None) -> Spans:
    """Spans of the range; with ``columns``, those shorter than a column merge (see the module).

    A short span counts in the column where it starts; a cell's share is capped at one.
    """
    rows = in_range(lane, begin_ns, end_ns)
    start, end = lane.start[rows], lane.end[rows]
    kind, name = lane.kind[rows], lane.name[rows]
    touches = end >= begin_ns
    if not touches.all():
        start, end, kind, name = start[touches], end[touches], kind[touches], name[touches]
    length = end - start
    if columns is None or end_ns <= begin_ns:
        return Spans(start, length, kind, name, np.full(len(start), 255, np.uint8), 0)
    width = (end_ns - begin_ns) / columns
    short = length < width
    if not short.any():
        return Spans(start, length, kind, name, np.full(len(start), 255, np.uint8), 0)
    cells = _merge(start[short], length[short], kind[short], begin_ns, width, columns)
    keep = ~short
    starts = np.concatenate([start[keep], cells.start])
    order = np.argsort(starts, kind="stable")
    return Spans(
        starts[order],
        np.concatenate([length[keep], cells.duration])[order],
        np.concatenate([kind[keep], cells.kind])[order],
        np.concatenate([name[keep], cells.name])[order],
        np.concatenate([np.full(int(keep.sum()), 255, np.uint8), cells.fill])[order],
        cells.merged,
    )


def _merge(start: Floats, length: Floats, kind: Bytes, begin: float, width: float, columns: int) -> Spans:
    column = np.clip(((start - begin) / width).astype(np.int64), 0, columns - 1)
    kinds = int(kind.max()) + 1
    busy = np.bincount(column * kinds + kind, weights=length, minlength=columns * kinds).reshape(
        columns, kinds
    )
    events = np.bincount(column, minlength=columns)
    used = np.flatnonzero(events)
    share = np.minimum(busy[used].sum(axis=1) / width, 1.0)
    return Spans(
        np.asarray(begin + used * width, dtype=np.float64),
        np.full(len(used), width),
        busy[used].argmax(axis=1).astype(np.uint8),
        np.full(len(used), MERGED, np.uint32),
        # At least 1: something happened there. At most 254: 255 says that it is a span of its own.
        np.clip(np.round(share * 254), 1, 254).astype(np.uint8),
        len(start),
    )


def encode(
    lanes: Sequence[tuple[Lane, Spans]], names: Sequence[str], header: Mapping[str, Any], shift_ns: float
) -> bytes:
    """The binary answer: ``uint32 length, JSON header padded to 8, float64 start, float64 duration, uint32
    name, uint8 kind, uint8 fill``, lanes one after the other.

    The header gains ``lanes`` (label, group, depth, count) and ``names``: only the names used, renumbered.
    """
    codes = np.concatenate([spans.name for _, spans in lanes]) if lanes else np.zeros(0, np.uint32)
    used, renumbered = np.unique(codes, return_inverse=True)
    known = used != MERGED
    translate = np.where(known, np.cumsum(known) - 1, MERGED).astype(np.uint32)
    head = {
        **header,
        "merged": sum(spans.merged for _, spans in lanes),
        "lanes": [
            {"label": lane.label, "group": lane.group, "depth": lane.depth, "count": len(spans.start)}
            for lane, spans in lanes
        ],
        "names": [names[int(code)] for code in used[known]],
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = [struct.pack("<I", len(text)), text]
    body += [(spans.start + shift_ns).astype("<f8").tobytes() for _, spans in lanes]
    body += [spans.duration.astype("<f8").tobytes() for _, spans in lanes]
    body.append(translate[renumbered].astype("<u4").tobytes() if len(codes) else b"")
    body += [spans.kind.tobytes() for _, spans in lanes]
    body += [spans.fill.tobytes() for _, spans in lanes]
    return b"".join(body)
