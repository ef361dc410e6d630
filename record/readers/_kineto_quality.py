"""Everything that was odd about a trace becomes a note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..kernels import is_launch
from ..model import MISSING, Rank, Table
from ._kineto_columns import Columns
from ._kineto_stream import Findings
from ._kineto_tables import names_that

__all__ = ["say_what_was_odd"]

Severity = Literal["info", "warning", "error"]
_Note = tuple[str, Severity, str]
Array = npt.NDArray[Any]


def say_what_was_odd(
    rank: Rank, columns: Columns, findings: Findings, said: int | None, bare_list: bool = False
) -> None:
    """Add notes to a rank; ``said`` is the rank that its file states."""
    notes = (
        *_of_the_file(rank, columns, findings, bare_list),
        *_of_the_events(columns),
        *_of_the_tables(rank),
        *_of_the_device(rank),
        *_of_collectives(rank),
    )
    for note in notes:
        rank.note(*note)
    if said is not None and said != rank.rank:
        rank.note(
            "rank-renamed", "warning", f"{rank.source} says it is rank {said} and is read as rank {rank.rank}"
        )


def _of_the_file(rank: Rank, columns: Columns, findings: Findings, bare_list: bool) -> Iterator[_Note]:
    if bare_list:
        yield (
            "bare-list",
            "info",
            f"{rank.source} is a bare list of events, as torch 1.8 wrote them; it says nothing of its rank and devices",
        )
    if findings.damaged:
        yield (
            "damaged-file",
            "error",
            f"{rank.source} is damaged ({findings.damaged}); the events before the damage are used",
        )
    if findings.truncated:
        yield (
            "truncated-file",
            "error",
            f"{rank.source} ends in the middle; its {columns.events:,} complete events are used",
        )
    if findings.tail_lost:
        yield (
            "unreadable-metadata",
            "warning",
            f"{rank.source}: what stands after its events is broken JSON and was left out",
        )
    if findings.repaired:
        yield (
            "repaired-events",
            "warning",
            f"{findings.repaired:,} events were invalid JSON and could be repaired",
        )
    if findings.dropped:
        yield (
            "dropped-events",
            "error",
            f"{findings.dropped:,} events were invalid JSON beyond repair and are left out",
        )


def _of_the_events(columns: Columns) -> Iterator[_Note]:
    if columns.untimed:
        yield "untimed-events", "warning", f"{columns.untimed:,} events have no usable time and are left out"
    if columns.negative_durations:
        yield (
            "negative-durations",
            "warning",
            f"{columns.negative_durations:,} events last less than nothing; they count as of no length",
        )
    if columns.unclosed:
        yield (
            "unclosed-events",
            "warning",
            f"{columns.unclosed:,} spans end without a beginning and are left out",
        )
    if columns.beyond_64_bit:
        longest = max(value.bit_length() for value in columns.beyond_64_bit)
        yield (
            "beyond-64-bit",
            "info",
            (
                f"1 integer does not fit 64 bits (it needs {longest}) and counts as missing"
                if len(columns.beyond_64_bit) == 1
                else f"{len(columns.beyond_64_bit):,} integers do not fit 64 bits (the longest has {longest}) and count as missing"
            ),
        )
    if columns.unknown:
        yield (
            "unknown-categories",
            "info",
            f"events of unknown categories are left out: {_counted(columns.unknown)}",
        )
    if columns.ignored:
        yield (
            "left-out-events",
            "info",
            (
                "copies of host spans on device rows, markers, counters and the profiler's own work are no work of the job's "
                f"and are left out: {_counted(columns.ignored)}"
            ),
        )
    old = [name for name in columns.categories if name in _OLD]
    if old:
        yield (
            "old-categories",
            "info",
            f"categories are named as by torch 1.8 and 1.9 ({', '.join(sorted(old))})",
        )


#: Category names of torch 1.8 and 1.9.
_OLD = ("Operator", "Runtime", "Kernel", "Memcpy", "Memset")


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in kinds.most_common(5))


def _of_the_tables(rank: Rank) -> Iterator[_Note]:
    host = rank.host
    if rank.steps is None:
        yield (
            "no-steps",
            "info",
            "no step marks (ProfilerStep#N) were recorded; the whole trace is one window",
        )
    if host is not None:
        yield from _of_times(host, rank.metadata.get("base_time_ns") or 0)
        unnamed = int(np.count_nonzero(host["name"] == host.strings.find("INVALID")))
        if unnamed:
            yield (
                "unnamed-calls",
                "info",
                f"{unnamed:,} runtime calls are named INVALID: the profiler is older than the driver; they count as calls",
            )
    waits = rank.synchronizations
    if waits is not None:
        kinds = ", ".join(sorted({kind or "unknown" for kind in waits.text("kind").tolist()}))
        yield (
            "waits-recorded",
            "info",
            f"{len(waits):,} waits on the device or for it were recorded ({kinds})",
        )
    memory = rank.memory
    if memory is not None and (memory["allocated_bytes"] == MISSING).all():
        yield (
            "memory-without-totals",
            "info",
            "allocations were recorded without totals; what was held before the trace began is not known",
        )


_FEWEST_TIMES = 100


def _of_times(host: Table, base_ns: int) -> Iterator[_Note]:
    starts = host["start_ns"] - base_ns
    decimals = bool((starts % 1000 != 0).any())
    if not decimals and len(host) >= _FEWEST_TIMES:
        yield (
            "whole-microseconds",
            "info",
            "times are whole microseconds: a span is known to 1 us at either end, and shorter ones have no length",
        )
    elif decimals and int(starts.max()) >= 2**43 * 1000:
        yield (
            "absolute-times",
            "info",
            (
                "times are absolute with decimals: device starts are kept to the 256 ns that a double holds of them, "
                "as other tools read them; host times and all lengths are exact"
            ),
        )


# --- the device ------------------------------------------------------------------------------------


def _of_the_device(rank: Rank) -> Iterator[_Note]:
    device, host = rank.device, rank.host
    calls = None if host is None else _launching_calls(host)
    if device is None:
        made = 0 if calls is None else len(calls)
        called = f"; {made:,} calls launched some: was only the host profiled?" if made else ""
        yield (
            "no-device-events",
            "info",
            f"no device work was recorded; the breakdown is of the host's operators{called}",
        )
        return
    missing = int(np.count_nonzero(device["launch"] < 0))
    if missing:
        some = f"{missing:,} of {len(device):,} device events have no launch record"
        why = f"{some}, so they belong to no step"
        yield "no-launch-record", _severity(missing, len(device)), why
    if host is not None and calls is not None:
        yield from _of_launches(device, host, calls)
    overlapping = _overlapping_on_a_stream(device)
    if overlapping:
        yield (
            "overlapping-on-stream",
            "info",
            f"{overlapping:,} device events begin while another runs on the same stream; time is counted once",
        )
    yield from _of_lag(rank)
    if host is not None and any(name.startswith("hip") for name in _called(host)):
        numbers = ", ".join(map(str, np.unique(device["device"]).tolist()[:8]))
        yield (
            "agent-device-numbers",
            "info",
            f"device numbers ({numbers}) are ROCm's agents, not the indexes of GPUs",
        )


def _severity(count: int, of: int) -> Severity:
    return "info" if count * 10 < of else "warning"


def _launching_calls(host: Table) -> Array:
    """Rows of calls that put work on a device and say which."""
    named = names_that(is_launch, host.strings)[host["name"]]
    return np.flatnonzero(named & (host["correlation"] != MISSING))


def _called(host: Table) -> list[str]:
    """Names of runtime calls, each once."""
    codes = np.unique(host["name"][host["correlation"] != MISSING])
    return [host.strings.values[code] for code in codes.tolist() if code >= 0]


def _of_launches(device: Table, host: Table, calls: Array) -> Iterator[_Note]:
    idle = calls[~np.isin(host["correlation"][calls], device["correlation"])]
    if len(idle):
        names = Counter(host.strings.text(int(code)) or "" for code in host["name"][idle].tolist())
        yield (
            "no-work-record",
            _severity(len(idle), len(calls)),
            (
                f"{len(idle):,} of {len(calls):,} launching calls have no device event ({_counted(names)}): captured into a "
                "graph, cut off by the end of the trace, or not recorded"
            ),
        )
    graphs = np.flatnonzero(names_that(lambda name: "GraphLaunch" in name, host.strings)[host["name"]])
    work = int(np.count_nonzero(np.isin(device["launch"], graphs)))
    if len(graphs):
        yield (
            "graph-launches",
            "info",
            f"{len(graphs):,} launches of graphs ran {work:,} device events, which belong to their launch's step",
        )


#: Whole microseconds at either end, and starts as doubles hold them.
_ROUNDING_NS = 1_256


def _overlapping_on_a_stream(device: Table) -> int:
    """Device events that begin before an earlier one on their stream ends."""
    order = np.lexsort((device["start_ns"], device["stream"], device["device"]))
    start, end = device["start_ns"][order], device["end_ns"][order]
    new = (np.diff(device["stream"][order]) != 0) | (np.diff(device["device"][order]) != 0)
    if not len(new):
        return 0
    count = 0
    for begin, stop in zip(*_runs(new), strict=True):
        latest = np.maximum.accumulate(end[begin:stop])
        count += int(np.count_nonzero(start[begin + 1 : stop] < latest[:-1] - _ROUNDING_NS))
    return count


def _runs(new: Array) -> tuple[list[int], list[int]]:
    """Begins and ends of runs of equal values, from where a value differs from the one before."""
    cuts = (np.flatnonzero(new) + 1).tolist()
    return [0, *cuts], [*cuts, len(new) + 1]


def _of_lag(rank: Rank) -> Iterator[_Note]:
    """Work that ends after the step that follows its own."""
    device, steps = rank.device, rank.steps
    if device is None or steps is None or len(steps) < 2:
        return
    rows = np.flatnonzero(device["step"] != MISSING)
    order = np.argsort(steps["index"])
    position = order[np.searchsorted(steps["index"][order], device["step"][rows])]
    behind = device["end_ns"][rows] - steps["end_ns"][position]
    typical = float(np.median(steps["end_ns"] - steps["start_ns"]))
    if len(behind) and behind.max() > typical:
        yield (
            "device-lags-host",
            "info",
            (
                f"the device runs up to {behind.max() / 1e6:.1f} ms ({behind.max() / typical:.1f} steps) behind the host; its "
                "work counts in the step that launched it"
            ),
        )


def _of_collectives(rank: Rank) -> Iterator[_Note]:
    table = rank.collectives
    if table is None:
        return
    on_host = int(np.count_nonzero(table["device_row"] < 0))
    if on_host:
        yield (
            "host-collectives",
            "info",
            f"{on_host:,} collectives ran on the host (gloo, MPI); their times are those of the threads that ran them",
        )
    silent = int(np.count_nonzero((table["group"] < 0) & (table["device_row"] >= 0)))
    if silent:
        yield (
            "no-collective-metadata",
            "info",
            (
                f"{silent:,} of {len(table):,} collectives carry no metadata; what they are is told from names and the calls "
                "around them, and their group is not known"
            ),
        )
