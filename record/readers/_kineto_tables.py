"""Columns into the model's tables: clocks, launches, nesting, steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import is_launch
from ..model import HOST_KINDS, MISSING, Strings, Table
from ._kineto_categories import host_kind_of_name
from ._kineto_terms import EVENT_RECORD

__all__ = [
    "Launches",
    "device_table",
    "host_table",
    "joined",
    "launches",
    "mark_blocking_copies",
    "memory_table",
    "names_that",
    "parents",
    "step_of",
    "steps_table",
    "synchronizations_table",
]

Array = npt.NDArray[Any]

_MODULE = re.compile(r"nn\.Module: (\S+)")
_PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
#: Old files round to whole microseconds, so a child may seem to outlast its parent by one.
_ROUNDING_NS = 1_000
#: Of pointer jumping; spans of one thread do not close a hundred levels at once but in a made file.
_MOST_ROUNDS = 100
_RUNTIME, _SYNC = HOST_KINDS.index("runtime"), HOST_KINDS.index("sync")


def joined(parts: list[dict[str, Array]]) -> dict[str, Array] | None:
    """One array per column of a list of chunks, emptied on the way; ``None`` of no rows at all."""
    if not parts:
        return None
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    parts.clear()
    return columns if len(next(iter(columns.values()))) else None


def host_table(columns: dict[str, Array], base_ns: int, strings: Strings) -> Table:
    """The host table: kinds refined by name, nesting per thread; steps are filled in later."""
    columns["start_ns"] += base_ns
    columns["end_ns"] += base_ns
    _refine(columns, strings)
    columns["correlation"][~np.isin(columns["kind"], (_RUNTIME, _SYNC))] = MISSING
    columns["parent"] = parents(columns["thread"], columns["start_ns"], columns["end_ns"])
    _name_modules(columns, strings)
    return Table("host", columns, strings)


def _refine(columns: dict[str, Array], strings: Strings) -> None:
    kinds, names = columns["kind"], columns["name"]
    for kind in range(len(HOST_KINDS)):
        rows = kinds == kind
        codes = np.unique(names[rows])
        refined = {
            int(code): better
            for code in codes
            if code >= 0 and (better := host_kind_of_name(strings.values[code], kind)) != kind
        }
        for better in set(refined.values()):
            wanted = [code for code, value in refined.items() if value == better]
            kinds[rows & np.isin(names, wanted)] = better


def _name_modules(columns: dict[str, Array], strings: Strings) -> None:
    """Fill ``module`` from the enclosing ``nn.Module: X_0`` spans of a trace with stacks, outermost first, joined by dots.

    What the source states itself ("Module Hierarchy") stays.
    """
    own = {
        code: match[1]
        for code, name in enumerate(strings.values)
        if (match := _MODULE.match(name)) is not None
    }
    if not own:
        return
    parent, names = columns["parent"], columns["name"]
    rows = np.flatnonzero(np.isin(names, list(own)))
    is_module = np.zeros(len(names), bool)
    is_module[rows] = True
    around = _nearest(is_module, parent)
    paths: dict[int, str] = {}
    for row in rows[np.lexsort((-columns["end_ns"][rows], columns["start_ns"][rows]))].tolist():
        outer = paths.get(int(around[row]))
        name = own[int(names[row])]
        paths[row] = f"{outer}.{name}" if outer else name
    codes = np.full(len(names) + 1, -1, np.int32)  # the last is for rows outside any module
    for row, path in paths.items():
        codes[row] = strings.code(path)
    found = codes[np.where(is_module, np.arange(len(names)), around)]
    columns["module"] = np.where(columns["module"] < 0, found, columns["module"])


def _nearest(marked: Array, parent: Array) -> Array:
    """Of each row the nearest enclosing row that is marked, -1 where none is."""
    found = parent.copy()
    rows = np.flatnonzero((found >= 0) & ~marked[found])
    while len(rows):
        found[rows] = parent[found[rows]]
        above = found[rows]
        rows = rows[(above >= 0) & ~marked[above]]
    return found


def parents(thread: Array, start: Array, end: Array) -> Array:
    """Row of the innermost enclosing span on the same thread, -1 where there is none. All shapes ``(n,)``.

    Rows by start, longest first. The latest row that is open when another begins is found for all rows at once:
    each begins with the row before it, and where that has ended takes over what that row points at (pointer
    jumping, so a run of n siblings takes log n rounds).
    """
    count = len(start)
    found = np.full(count, -1, np.int64)
    if not count:
        return found
    order = np.lexsort((-end, start, thread))
    begins = start[order]
    ends = np.append(end[order], np.iinfo(np.int64).max)  # the last is what encloses all
    latest = np.arange(-1, count)
    latest[:-1][np.r_[True, np.diff(thread[order]) != 0]] = count
    latest[-1] = count
    before = latest.copy()
    rows = np.flatnonzero(ends[latest[:-1]] <= begins)
    rounds = 0
    while len(rows) and rounds < _MOST_ROUNDS:
        latest[rows] = latest[latest[rows]]
        rows = rows[ends[latest[rows]] <= begins[rows]]
        rounds += 1
    if len(rows):
        latest = np.array(_latest_open(before.tolist(), begins.tolist(), ends.tolist()))
    above = latest[:-1].copy()
    # Where spans cross, an enclosing one may lie deeper. Old files round, so a child may seem to outlast its parent.
    rows = np.flatnonzero(ends[above] < ends[:-1] - _ROUNDING_NS)
    while len(rows):
        above[rows] = latest[above[rows]]
        rows = rows[ends[above[rows]] < ends[rows]]
    inside = above < count
    found[order[inside]] = order[above[inside]]
    return found


def _latest_open(latest: list[int], begins: list[int], ends: list[int]) -> list[int]:
    """The same one row at a time, which no depth of nesting makes slow: each row is left behind once."""
    for row, begin in enumerate(begins):
        above = latest[row]
        while ends[above] <= begin:
            above = latest[above]
        latest[row] = above
    return latest


def device_table(columns: dict[str, Array], base_ns: int, strings: Strings) -> Table:
    """The device table; launches and steps are filled in later."""
    columns["start_ns"] += base_ns
    columns["end_ns"] += base_ns
    return Table("device", columns, strings)


@dataclass(frozen=True, slots=True)
class Launches:
    """Row in ``host`` of the call that launched each device row, -1 where there is none or more than one could be.

    ``unclear`` counts the latter, ``shared`` the correlations that more than one call has.
    """

    rows: Array
    unclear: int = 0
    shared: int = 0


def launches(device: Table, host: Table) -> Launches:
    """Calls of device rows, by correlation.

    A correlation that several calls have (several windows or processes in one file) means the last call before
    the work. Every call that launches has work of its own, so where an earlier one is left without any, it is
    not known whose the work is, and it gets no launch at all.
    """
    calls = np.flatnonzero(host["correlation"] != MISSING)
    order = calls[np.lexsort((host["start_ns"][calls], host["correlation"][calls]))]
    keys = host["correlation"][order]
    wanted = device["correlation"]
    low = np.searchsorted(keys, wanted, side="left")
    high = np.searchsorted(keys, wanted, side="right")
    found = np.full(len(device), -1, np.int64)
    usable = (high > low) & (wanted != MISSING)
    found[usable] = order[low[usable]]
    several = np.flatnonzero(usable & (high - low > 1))
    several = several[np.argsort(low[several], kind="stable")]
    unclear = shared = 0
    launching = names_that(is_launch, host.strings) if len(several) else np.empty(0, bool)
    # A device's clock may run behind the host's: some work then seems to begin before its call.
    single = usable & (high - low == 1)
    lag = device["start_ns"][single] - host["start_ns"][found[single]]
    begun = device["start_ns"] - (min(0, int(np.percentile(lag, 1))) if len(lag) else 0)
    for rows in np.split(several, np.flatnonzero(np.diff(low[several])) + 1) if len(several) else ():
        candidates = _separate(order[low[rows[0]] : high[rows[0]]], host, launching)
        chosen = np.searchsorted(host["start_ns"][candidates], begun[rows], side="right") - 1
        idle = np.setdiff1d(np.arange(len(candidates)), chosen)
        doubtful = (chosen > idle[0]) if len(idle) else np.zeros(len(rows), bool)
        found[rows] = np.where(doubtful, -1, candidates[np.maximum(chosen, 0)])
        unclear += int(np.count_nonzero(doubtful))
        shared += len(candidates) > 1
    if unclear:  # then a call that launches once, and seems to have launched more, has some of another's work
        many = np.bincount(found[found >= 0], minlength=len(host)) > 1
        many &= ~names_that(lambda name: "GraphLaunch" in name, host.strings)[host["name"]]
        doubtful = (found >= 0) & many[np.maximum(found, 0)]
        found[doubtful] = -1
        unclear += int(np.count_nonzero(doubtful))
    return Launches(found, unclear, shared)


def names_that(hold: Callable[[str], bool], strings: Strings) -> Array:
    """Of each string of a pool whether something holds of it, and False at the end, for rows without a name."""
    return np.array([*map(hold, strings.values), False], dtype=bool)


def _separate(calls: Array, host: Table, launching: Array) -> Array:
    """Those of some calls that may have launched, in order of time.

    A runtime call and the driver call in it are one; a call that never launches has its correlation in common
    with another process' launch.
    """
    able = launching[host["name"][calls]]
    calls = calls[able] if able.any() else calls
    parent = host["parent"]
    enclosing: set[int] = set()
    for call in calls.tolist():
        above = int(parent[call])
        while above >= 0 and above not in enclosing:
            enclosing.add(above)
            above = int(parent[above])
    return np.array([call for call in calls.tolist() if call not in enclosing], dtype=np.int64)


def mark_blocking_copies(device: Table, host: Table) -> None:
    """A copy of pageable memory that ends within its "asynchronous" call blocked the host: a sync."""
    pageable = [code for code, name in enumerate(device.strings.values) if "Pageable" in name]
    rows = np.flatnonzero(np.isin(device["name"], pageable) & (device["launch"] >= 0))
    calls = device["launch"][rows]
    blocked = calls[host["end_ns"][calls] >= device["end_ns"][rows]]
    host["kind"][blocked] = _SYNC


def steps_table(host: Table) -> tuple[Table | None, int]:
    """Steps from ``ProfilerStep#N`` annotations, in order of start, and how many marks repeat an index."""
    index = {}
    for code, name in enumerate(host.strings.values):
        match = _PROFILER_STEP.match(name)
        if match:
            index[code] = int(match[1])
    rows = np.flatnonzero(np.isin(host["name"], list(index)) & (host["end_ns"] > host["start_ns"]))
    if not len(rows):
        return None, 0
    rows = rows[np.lexsort((-host["end_ns"][rows], host["start_ns"][rows]))]
    seen: set[int] = set()
    kept = []
    for row in rows.tolist():
        number = index[int(host["name"][row])]
        if number not in seen:
            seen.add(number)
            kept.append((number, int(host["start_ns"][row]), int(host["end_ns"][row])))
    numbers, starts, ends = zip(*kept, strict=True)
    columns = {"index": numbers, "start_ns": starts, "end_ns": ends}
    return Table("steps", columns, host.strings), len(rows) - len(kept)


def step_of(times: Array, steps: Table) -> Array:
    """Index of the step whose mark is the last at or before each time; MISSING before the first."""
    position = np.searchsorted(steps["start_ns"], times, side="right") - 1
    return np.where(position >= 0, steps["index"][np.maximum(position, 0)], MISSING)


def memory_table(columns: dict[str, Array], base_ns: int, strings: Strings) -> Table:
    """The memory table, by time."""
    columns["time_ns"] += base_ns
    order = np.argsort(columns["time_ns"], kind="stable")
    return Table("memory", {name: column[order] for name, column in columns.items()}, strings)


def synchronizations_table(columns: dict[str, Array], base_ns: int, strings: Strings) -> Table | None:
    """Waits by time. The stream that recorded the event waited for is filled in from ``cuda_event`` where it is not said."""
    columns["start_ns"] += base_ns
    columns["end_ns"] += base_ns
    records = columns["kind"] == strings.find(EVENT_RECORD)
    for name in ("stream", "source_stream", "source_correlation"):
        columns[name] = np.where(columns[name] < 0, MISSING, columns[name])
    streams = dict(
        zip(columns["correlation"][records].tolist(), columns["stream"][records].tolist(), strict=True)
    )
    source = columns["source_stream"]
    for row in np.flatnonzero((source == MISSING) & (columns["source_correlation"] != MISSING)).tolist():
        source[row] = streams.get(int(columns["source_correlation"][row]), MISSING)
    rows = np.flatnonzero(~records)
    rows = rows[np.argsort(columns["start_ns"][rows], kind="stable")]
    picked = {name: column[rows] for name, column in columns.items()}
    return Table("synchronizations", picked, strings) if len(rows) else None
