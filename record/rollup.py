"""Rolling old detail up: what is left of a rank's older segments when its record outgrows its room.

Per hundred steps a histogram stays (count, sums of phases, shortest and longest, quarter-octave bins of the step
time), totals per kind of collective, the last reading of each sample, and the slowest steps whole, with their
collectives. When the roll-ups themselves outgrow a quarter of the room they are rolled again, ten times coarser.

The order is safe against a kill at any instant: the roll-up names the files it replaces, is renamed into place,
and only then are those deleted. A reader passes over files that a roll-up names.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._rolled_regions import rolled_regions
from .frames import LOST, TABLES, FrameFile, Frames, decode_rows, encode_frame, read_frames
from .model import MISSING, PHASES

__all__ = ["Content", "content_of", "live_files", "merge_parts", "roll_up"]

Array = npt.NDArray[Any]

STEPS_PER_HISTOGRAM = 100
#: Whole steps that stay of each histogram.
SLOWEST_KEPT = 2
#: Bin b holds durations in [2**(b/4), 2**((b+1)/4)) ns: 19 % wide, so a quantile is known to 19 %.
BINS_PER_OCTAVE = 4
_SUMMED = ("tokens", "padding_tokens", "samples", *(f"phase_{name}_ns" for name in PHASES))


@dataclass(slots=True)
class Content:
    """Rows and roll-ups of some files of one rank. ``tables``: columns, text as codes into ``strings``."""

    strings: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Array]]] = field(default_factory=dict)
    histograms: list[dict[str, Any]] = field(default_factory=list)
    collective_totals: list[dict[str, Any]] = field(default_factory=list)
    torn_bytes: int = 0
    damaged: int = 0

    def table(self, name: str) -> dict[str, Array] | None:
        """All rows of a table, or ``None`` when no file had any frame of it."""
        pieces = self.tables.get(name)
        if not pieces:
            return None
        return {column: np.concatenate([piece[column] for piece in pieces]) for column in TABLES[name]}

    def add(self, file: FrameFile) -> None:
        """Take in the frames of one file, whose strings start anew."""
        local: list[str] = []
        codes = {value: code for code, value in enumerate(self.strings)}
        self.torn_bytes += file.torn_bytes
        self.damaged += file.damaged
        for message in file.messages:
            try:
                self._take(message, local, codes)
            except (KeyError, TypeError, ValueError, OverflowError):  # sound by its checksum, yet not ours
                self.damaged += 1

    def _take(self, message: dict[str, Any], local: list[str], codes: dict[str, int]) -> None:
        kind = message["kind"]
        if kind == "rollup":
            self.histograms.extend(message["histograms"])
            self.collective_totals.extend(message["collectives"])
        elif kind == "rows":
            columns = decode_rows(message, local)  # of an unknown table too: it may hold others' strings
            if not columns:
                return
            self._translate(message["table"], columns, local, codes)
            self.tables.setdefault(message["table"], []).append(columns)

    def _translate(
        self, table: str, columns: dict[str, Array], local: list[str], codes: dict[str, int]
    ) -> None:
        """Codes of one file to codes of this content. A damaged frame may have taken strings with it: those are missing."""
        codes[LOST] = -1
        for value in local:
            if value not in codes:
                codes[value] = len(self.strings)
                self.strings.append(value)
        translation = np.array([codes[value] for value in local] + [-1], dtype=np.int64)
        for name, kind in TABLES[table].items():
            if kind == "text":
                column = columns[name]
                column = np.where((column >= 0) & (column < len(local)), column, len(local))
                columns[name] = translation[column]


def content_of(paths: Iterable[Path]) -> Content:
    """What some files hold, in order. Raises ``OSError`` when one cannot be read."""
    content = Content()
    for path in paths:
        content.add(read_frames(path))
    return content


def live_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Roll-ups and segments that count, oldest first: those that no roll-up replaces."""
    # Files alone: reading a pipe of such a name would wait for ever.
    rollups, segments = (
        sorted(path for path in folder.glob(pattern) if path.is_file())
        for pattern in ("rollup-*.trine", "rows-*.trine")
    )
    replaced: set[str] = set()
    for path in rollups:
        with contextlib.suppress(OSError):
            for message in read_frames(path, limit=1).messages:
                replaced.update(message.get("replaces", ()))
    return (
        [path for path in rollups if path.name not in replaced],
        [path for path in segments if path.name not in replaced],
    )


def roll_up(folder: Path, *, budget_bytes: int, keep_segments: int) -> bool:
    """Roll the oldest segments up until the folder's files fit in ``budget_bytes``; says whether anything was done.

    The newest ``keep_segments`` stay as they are. Raises ``OSError``.
    """
    done = False
    while True:
        rollups, segments = live_files(folder)
        sizes = {path: path.stat().st_size for path in (*rollups, *segments)}
        rolled = sum(sizes[path] for path in rollups)
        if rolled > budget_bytes // 4 and len(rollups) > 1:
            _replace_files(folder, rollups, _rolled_again(content_of(rollups), budget_bytes // 8))
        elif sum(sizes.values()) > budget_bytes and len(segments) > keep_segments:
            # Two at a time: a roll-up of little costs as much to keep as one of much.
            oldest = segments[: min(2, len(segments) - keep_segments)]
            _replace_files(folder, oldest, _rolled(content_of(oldest)))
        else:
            return done
        done = True


def merge_parts(parts: dict[str, Array]) -> tuple[dict[str, Array], Array]:
    """Parts joined to steps; also which steps are whole: batches at the end whose optimizer step never came are not.

    Neighbouring parts of one index are a step: times span them, durations and counts add up, the loss is the last that
    was given. Inputs and outputs: columns of ``parts``, nanoseconds.
    """
    index = parts["index"]
    first = np.flatnonzero(np.r_[True, index[1:] != index[:-1]]) if len(index) else np.zeros(0, np.int64)
    last = np.r_[first[1:], len(index)] - 1 if len(index) else first
    steps = {"index": index[first], "start_ns": parts["start_ns"][first], "end_ns": parts["end_ns"][last]}
    for name in _SUMMED:
        steps[name] = _sum_known(parts[name], first)
    # Between two parts of a step lies the little that closing one and opening the next takes.
    between = (steps["end_ns"] - steps["start_ns"]) - _sum_known(parts["end_ns"] - parts["start_ns"], first)
    other = steps["phase_other_ns"]
    steps["phase_other_ns"] = np.where(other == MISSING, MISSING, other + between)
    steps["loss"] = _last_known(parts["loss"], first, last)
    steps["flops"] = _sum_floats(parts["flops"], first)
    return steps, parts["complete"][last] == 1


def _sum_known(column: Array, first: Array) -> Array:
    """Sums of runs that start at ``first``; MISSING where any of the run is missing."""
    if not len(first):
        return column
    missing = column == MISSING
    sums = np.add.reduceat(np.where(missing, 0, column), first)
    return np.where(np.logical_or.reduceat(missing, first), MISSING, sums)


def _sum_floats(column: Array, first: Array) -> Array:
    if not len(first):
        return column
    known = np.logical_or.reduceat(~np.isnan(column), first)
    return np.where(known, np.add.reduceat(np.nan_to_num(column), first), np.nan)


def _last_known(column: Array, first: Array, last: Array) -> Array:
    result = column[last].copy()
    for row in np.flatnonzero(np.isnan(result) & (last > first)):
        known = column[first[row] : last[row] + 1]
        known = known[~np.isnan(known)]
        if len(known):
            result[row] = known[-1]
    return result


@dataclass(slots=True)
class _Rolled:
    """What a roll-up file will hold; ``tables`` with text as ``str | None``."""

    histograms: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    tables: dict[str, dict[str, Any]]

    def encode(self, replaces: list[str]) -> bytes:
        frames = Frames()
        data = frames.head("segment", replaces=replaces)
        data += encode_frame(
            {"kind": "rollup", "histograms": self.histograms, "collectives": self.collectives}
        )
        return data + b"".join(frames.rows(table, columns) for table, columns in self.tables.items())


def _rolled(content: Content) -> _Rolled:
    width = STEPS_PER_HISTOGRAM
    return _Rolled(_histograms(content, width), _collective_totals(content, width), _kept(content, width))


def _rolled_again(content: Content, goal_bytes: int) -> _Rolled:
    """Roll-ups joined, the finest made ten times coarser until they fit the goal."""
    width = min((histogram["width"] for histogram in content.histograms), default=STEPS_PER_HISTOGRAM)
    while True:
        rolled = _Rolled(
            _coarser_histograms(content.histograms, width),
            _coarser_totals(content.collective_totals, width),
            _kept(content, width),
        )
        if len(rolled.encode([])) <= goal_bytes or len(rolled.histograms) <= 1:
            return rolled
        width *= 10


def _replace_files(folder: Path, paths: list[Path], rolled: _Rolled) -> None:
    data = rolled.encode([path.name for path in paths])
    number = 1 + max((int(p.stem.split("-")[1]) for p in folder.glob("rollup-*.trine")), default=0)
    target = folder / f"rollup-{number:06d}.trine"
    temporary = folder / f".{target.name}"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    for path in paths:
        path.unlink()


def _histograms(content: Content, width: int) -> list[dict[str, Any]]:
    parts = content.table("parts")
    if parts is None:
        return []
    steps, _ = merge_parts(parts)
    duration = steps["end_ns"] - steps["start_ns"]
    bucket = steps["index"] // width
    result = []
    for value in np.unique(bucket):
        rows = bucket == value
        lengths = np.maximum(duration[rows], 1)
        bins, counts = np.unique((np.log2(lengths) * BINS_PER_OCTAVE).astype(np.int64), return_counts=True)
        losses = steps["loss"][rows][~np.isnan(steps["loss"][rows])]
        result.append(
            {
                "width": width,
                "first": int(steps["index"][rows].min()),
                "last": int(steps["index"][rows].max()),
                "steps": int(rows.sum()),
                "start_ns": int(steps["start_ns"][rows].min()),
                "end_ns": int(steps["end_ns"][rows].max()),
                "duration_ns": int(duration[rows].sum()),
                "shortest_ns": int(duration[rows].min()),
                "longest_ns": int(duration[rows].max()),
                "bins": [[int(b), int(c)] for b, c in zip(bins, counts, strict=True)],
                "last_loss": float(losses[-1]) if len(losses) else None,
                "sums": {name: _known_sum(steps[name][rows]) for name in _SUMMED},
            }
        )
    return result


def _known_sum(column: Array) -> int | None:
    return None if (column == MISSING).any() else int(column.sum())


def _coarser_histograms(histograms: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for histogram in histograms:
        wide = max(width, histogram["width"])
        groups.setdefault((histogram["first"] // wide, wide), []).append(histogram)
    result = []
    for (_, wide), group in groups.items():
        bins: dict[int, int] = {}
        for histogram in group:
            for value, count in histogram["bins"]:
                bins[value] = bins.get(value, 0) + count
        losses = [h["last_loss"] for h in group if h["last_loss"] is not None]
        sums: dict[str, int | None] = {}
        for name in _SUMMED:
            values = [h["sums"].get(name) for h in group]
            sums[name] = None if None in values else sum(values)
        result.append(
            {
                "width": wide,
                "first": min(h["first"] for h in group),
                "last": max(h["last"] for h in group),
                "steps": sum(h["steps"] for h in group),
                "start_ns": min(h["start_ns"] for h in group),
                "end_ns": max(h["end_ns"] for h in group),
                "duration_ns": sum(h["duration_ns"] for h in group),
                "shortest_ns": min(h["shortest_ns"] for h in group),
                "longest_ns": max(h["longest_ns"] for h in group),
                "bins": sorted([value, count] for value, count in bins.items()),
                "last_loss": losses[-1] if losses else None,
                "sums": sums,
            }
        )
    return result


def _collective_totals(content: Content, width: int) -> list[dict[str, Any]]:
    rows = content.table("collectives")
    if rows is None:
        return []
    # Columns at once: a segment may hold a million rows, and a loop in Python would keep the GIL from training.
    bucket = np.where(rows["step"] == MISSING, MISSING, rows["step"] // width)
    keys = np.stack([bucket, rows["operation"], rows["group"], rows["dtype"]], axis=1)
    kinds, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    timed = (rows["start_ns"] != MISSING) & (rows["end_ns"] != MISSING)
    duration = np.where(timed, rows["end_ns"] - rows["start_ns"], 0)
    sums = {name: np.zeros(len(kinds), dtype=np.int64) for name in ("calls", "bytes", "duration_ns", "timed")}
    np.add.at(sums["calls"], inverse, 1)
    np.add.at(sums["bytes"], inverse, np.where(rows["bytes"] == MISSING, 0, rows["bytes"]))
    np.add.at(sums["duration_ns"], inverse, duration)
    np.add.at(sums["timed"], inverse, timed)
    return [
        {
            "width": width,
            "first": None if first == MISSING else first * width,
            "operation": _text(content, operation),
            "group": _text(content, group),
            "dtype": _text(content, dtype),
            **{name: int(column[row]) for name, column in sums.items()},
        }
        for row, (first, operation, group, dtype) in enumerate(kinds.tolist())
    ]


def _text(content: Content, code: int) -> str | None:
    return None if code < 0 else content.strings[code]


def _coarser_totals(totals: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for total in totals:
        wide = max(width, total["width"])
        first = None if total["first"] is None else total["first"] // wide * wide
        key = (wide, first, total["operation"], total["group"], total["dtype"])
        target = merged.get(key)
        if target is None:
            merged[key] = {**total, "width": wide, "first": first}
        else:
            for name in ("calls", "bytes", "duration_ns", "timed"):
                target[name] += total[name]
    return list(merged.values())


def _kept(content: Content, width: int) -> dict[str, dict[str, Any]]:
    """Rows that stay whole: of each bucket the slowest steps with their collectives, each metric's last reading, and
    regions, joined where they are many."""
    result: dict[str, dict[str, Any]] = {}
    parts = content.table("parts")
    kept: Array = np.zeros(0, np.int64)
    if parts is not None:
        steps, _ = merge_parts(parts)
        order = np.lexsort((-(steps["end_ns"] - steps["start_ns"]), steps["index"] // width))
        bucket = (steps["index"] // width)[order]
        start_of_bucket = np.searchsorted(bucket, bucket)
        kept = steps["index"][order[np.arange(len(order)) - start_of_bucket < SLOWEST_KEPT]]
        result["parts"] = _rows(content, "parts", parts, np.isin(parts["index"], kept))
    collectives = content.table("collectives")
    if collectives is not None:
        result["collectives"] = _rows(content, "collectives", collectives, np.isin(collectives["step"], kept))
    samples = content.table("samples")
    if samples is not None:
        result["samples"] = _rows(content, "samples", samples, _last_readings(samples, content, width))
    regions = content.table("regions")
    if regions is not None:
        few = rolled_regions(regions)
        result["regions"] = _rows(content, "regions", few, np.ones(len(few["start_ns"]), dtype=bool))
    return {name: columns for name, columns in result.items() if len(next(iter(columns.values())))}


def _last_readings(samples: dict[str, Array], content: Content, width: int) -> Array:
    """The last reading of each metric in as many equal stretches of time as there are histograms."""
    time = samples["time_ns"]
    if not len(time):
        return np.zeros(0, dtype=bool)
    stretches = max(1, math.ceil(len(time) / (width * max(1, len(np.unique(samples["metric"]))))))
    span = max(1, int(time.max() - time.min()) + 1)
    stretch = (time - time.min()) * stretches // span
    # The first of each (stretch, metric) in reversed order is the last in time.
    pairs = np.stack([stretch, samples["metric"]], axis=1)[::-1]
    _, last = np.unique(pairs, axis=0, return_index=True)
    keep = np.zeros(len(time), dtype=bool)
    keep[len(time) - 1 - last] = True
    return keep


def _rows(content: Content, table: str, columns: dict[str, Array], mask: Array) -> dict[str, Any]:
    texts = np.array([*content.strings, None], dtype=object)
    return {
        name: texts[columns[name][mask]] if kind == "text" else columns[name][mask]
        for name, kind in TABLES[table].items()
    }
