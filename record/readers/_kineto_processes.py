"""Several processes in one file: which rows are whose.

People put the traces of several ranks into one file to see them side by side, some with the process ids and
correlations changed to be unlike, most without. Two processes of one file may then have the same process id
(containers all begin at 1), the same device 0 and the same correlations, and a kernel joined by its correlation
alone would be launched by a stranger. Rows are told apart by

1. the section of the file that they stand in: Kineto closes each recording with a span of category ``Trace`` and
   names its processes once, so files that were put together one after the other fall apart again. One process
   that recorded several windows in turn is still one;
2. their process id, where host work of several process ids is mixed;
3. for device rows that are mixed: by which process' calls explain them (correlation, kind of call, and a call
   comes before its work). What several processes explain equally well is joined with none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model import HOST_KINDS, MISSING

__all__ = ["Part", "parts_of"]

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_WORKING = tuple(HOST_KINDS.index(kind) for kind in ("operator", "runtime"))
#: A process id with less of the host's work than this is a slip of the writer, not a process of its own.
_SMALLEST_SHARE = 0.01
_FEWEST_ROWS = 8
#: Device clocks are matched to the host's to about this.
_CLOCK_NS = 100_000
#: The owner of a device explains more of its work than anyone else by at least this share of it.
_CLEAR_LEAD = 0.02


@dataclass(slots=True)
class Part:
    """One process of a file: its id as written, and its rows in each table's columns."""

    process: str
    rows: dict[str, Array] = field(default_factory=dict)
    strays: list[str] = field(
        default_factory=list
    )  # other process ids under which some of its host spans stand
    unclear: int = 0  # device rows that may be its or another's, and were given to none


def parts_of(
    tables: Mapping[str, Columns | None], several: bool, processes: list[str], owner: Callable[[int], str]
) -> list[Part]:
    """The processes of a file in order of appearance; one, with all rows, where nothing speaks for more.

    ``tables`` are the columns ``host``, ``device``, ``memory`` and ``syncs`` with their origins; ``several`` is
    whether more than one recording was closed or a process named more than once; ``processes`` are the process ids
    by number, ``owner(thread)`` is a thread's process id.
    """
    host = tables.get("host")
    whole = [Part("", {name: np.arange(_length(columns)) for name, columns in tables.items() if columns})]
    if host is None:
        return whole
    pids, pid_of_host = _host_processes(host, owner)
    whole[0].process, *whole[0].strays = _by_work(host, pid_of_host, pids)
    in_turn = several and _overlap(host)
    if not in_turn and len(pids) == 1:
        return whole
    section = host["_section"] if in_turn else np.zeros(_length(host), np.int32)
    units = _units(host, pid_of_host, section)
    if len(set(units.values())) < 2:
        return whole
    names = _names(units, pids)
    of_host = _of_host_rows(units, pid_of_host, section)
    rows: dict[str, Array] = {"host": of_host}
    if (memory := tables.get("memory")) is not None:
        rows["memory"] = _of_host_rows(units, _recoded(memory, processes, pids), _section(memory, in_turn))
    unclear = 0
    for name in ("device", "syncs"):
        columns = tables.get(name)
        if columns is not None:
            rows[name] = _of_device_rows(columns, host, of_host, units, _section(columns, in_turn))
            unclear += int(np.count_nonzero(rows[name] < 0)) if name == "device" else 0
    return [
        Part(process, {name: np.flatnonzero(of == number) for name, of in rows.items()}, unclear=unclear)
        for number, process in enumerate(names)
    ]


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _overlap(host: Columns) -> bool:
    """Whether sections run at one time. Those of a file that was sorted by time, or of one process, come in turn."""
    until = None
    for section in np.unique(host["_section"]).tolist():
        starts = host["start_ns"][host["_section"] == section]
        if until is not None and int(starts.min()) < until:
            return True
        until = max(int(starts.max()), until or int(starts.max()))
    return False


def _section(columns: Columns, in_turn: bool) -> Array:
    return columns["_section"] if in_turn else np.zeros(_length(columns), np.int32)


def _host_processes(host: Columns, owner: Callable[[int], str]) -> tuple[list[str], Array]:
    """Process ids of the host's rows, and each row's position among them."""
    threads, inverse = np.unique(host["thread"], return_inverse=True)
    owners = [owner(thread) for thread in threads.tolist()]
    pids = list(dict.fromkeys(owners))
    positions = np.array([pids.index(process) for process in owners], dtype=np.int32)
    return pids, positions[inverse]


def _by_work(host: Columns, pid: Array, pids: list[str]) -> list[str]:
    """Process ids, those with the most work first."""
    work = np.bincount(pid[np.isin(host["kind"], _WORKING)], minlength=len(pids))
    return [pids[position] for position in np.argsort(-work, kind="stable").tolist()]


def _recoded(columns: Columns, processes: list[str], pids: list[str]) -> Array:
    """Positions of rows' process ids among the host's, -1 for others."""
    known = {process: position for position, process in enumerate(pids)}
    codes = np.array([known.get(process, -1) for process in processes], dtype=np.int32)
    return np.asarray(codes[columns["_process"]])


# --- host rows -------------------------------------------------------------------------------------

#: (position of the process id, section) → number of the process that it is.
Units = dict[tuple[int, int], int]


def _units(host: Columns, pid: Array, section: Array) -> Units:
    """Process ids within sections that did real work, and which of them are one process."""
    working = np.isin(host["kind"], _WORKING)
    span = int(section.max()) + 1
    keys = pid.astype(np.int64) * span + section
    found, counts = np.unique(keys[working], return_counts=True)
    found = found[counts >= max(_FEWEST_ROWS, _SMALLEST_SHARE * counts.sum() / max(len(found), 1))]
    timed = []
    for key in found.tolist():
        rows = keys == key
        begin, end = int(host["start_ns"][rows].min()), int(host["end_ns"][rows].max())
        timed.append((key // span, begin, end, key % span))
    units: Units = {}
    last: dict[int, list[tuple[int, int]]] = {}  # process id → (end so far, number) of its processes
    for position, begin, end, place in sorted(timed):
        for index, (until, number) in enumerate(last.setdefault(position, [])):
            if begin >= until:  # the next window of the same process
                last[position][index] = (end, number)
                units[position, place] = number
                break
        else:
            number = len(set(units.values()))
            last[position].append((end, number))
            units[position, place] = number
    return units


def _names(units: Units, pids: list[str]) -> list[str]:
    count = len(set(units.values()))
    names = [""] * count
    for (position, _), number in units.items():
        names[number] = pids[position]
    return names


def _of_host_rows(units: Units, pid: Array, section: Array) -> Array:
    """Number of each row's process. A stray process id goes with the process of its section, else with the first."""
    found = np.full(len(pid), -1, np.int32)
    for (position, place), number in units.items():
        found[(pid == position) & (section == place)] = number
    default = {place: number for (_, place), number in sorted(units.items(), reverse=True)}
    for place in np.unique(section[found < 0]).tolist():
        found[(found < 0) & (section == place)] = default.get(place, 0)
    return found


# --- device rows -----------------------------------------------------------------------------------


def _of_device_rows(device: Columns, host: Columns, of_host: Array, units: Units, section: Array) -> Array:
    """Number of each device row's process, -1 where several could be it."""
    found = np.full(_length(device), -1, np.int32)
    for place in np.unique(section).tolist():
        rows = np.flatnonzero(section == place)
        candidates = sorted({number for (_, there), number in units.items() if there == place})
        if len(candidates) == 1:
            found[rows] = candidates[0]
            continue
        everyone = candidates or sorted(set(units.values()))
        calls = {number: _Calls(host, of_host == number) for number in everyone}
        _by_device(device, rows, calls, found)
    return found


class _Calls:
    """The calls of one process, looked up by correlation; of several with one correlation the last before a time."""

    def __init__(self, host: Columns, own: Array) -> None:
        rows = np.flatnonzero(own & (host["correlation"] != MISSING))
        rows = rows[np.lexsort((host["start_ns"][rows], host["correlation"][rows]))]
        self.correlation, self.start = host["correlation"][rows], host["start_ns"][rows]

    def lag(self, correlation: Array, start: Array) -> Array:
        """Time from the call to the work in ns, MISSING where no call of that correlation came before it."""
        found = np.full(len(correlation), MISSING, np.int64)
        if not len(self.start):
            return found
        low = np.searchsorted(self.correlation, correlation, side="left")
        high = np.searchsorted(self.correlation, correlation, side="right")
        for row in np.flatnonzero((high > low) & (correlation != MISSING)).tolist():
            lags = start[row] - self.start[low[row] : high[row]]
            before = lags[lags >= -_CLOCK_NS]
            if len(before):
                found[row] = before.min()
        return found


def _by_device(device: Columns, rows: Array, calls: Mapping[int, _Calls], found: Array) -> None:
    """Devices have owners as a rule; where one is shared, each row is looked at alone."""
    numbers = list(calls)
    keys = np.unique(
        np.stack([device["_process"][rows].astype(np.int64), device["device"][rows]], axis=1),
        axis=0,
        return_inverse=True,
    )[1].reshape(-1)
    lags = np.stack(
        [calls[number].lag(device["correlation"][rows], device["start_ns"][rows]) for number in numbers]
    )
    tied: dict[int, Array] = {}  # device → cost of each process that explains its work as well as any other
    owners: set[int] = set()
    of_key: dict[int, Array] = {}
    for key in np.unique(keys).tolist():
        of_key[key] = here = np.flatnonzero(keys == key)
        explained = lags[:, here] != MISSING
        launched = explained.any(axis=0)
        if not launched.any():
            continue
        share = explained[:, launched].mean(axis=1)
        if share.max() < 1 - _CLEAR_LEAD or _repeated(device["correlation"][rows[here]]):
            alone = explained.sum(axis=0) == 1
            found[rows[here[alone]]] = np.array(numbers, np.int32)[explained.argmax(axis=0)[alone]]
            continue
        best = share >= share.max() - _CLEAR_LEAD
        if np.count_nonzero(best) == 1:
            owners.add(int(np.argmax(best)))
            found[rows[here]] = numbers[int(np.argmax(best))]
        else:
            tied[key] = np.where(best, _costs(lags[:, here[launched]]), np.inf)
    for key, owner in _assigned(tied, owners).items():
        found[rows[of_key[key]]] = numbers[owner]


def _costs(lags: Array) -> Array:
    """How far from its calls a device's work is, for each process. Work before its call is the least likely."""
    far = np.where(lags == MISSING, np.nan, np.where(lags < 0, -4.0 * lags, lags))
    return np.nanmedian(far, axis=1)


def _assigned(tied: Mapping[int, Array], owners: set[int]) -> dict[int, int]:
    """Devices that several processes explain equally well: the cheapest pairs first, and first those who own none."""
    pairs = sorted(
        (float(cost), key, owner)
        for key, costs in tied.items()
        for owner, cost in enumerate(costs.tolist())
        if np.isfinite(cost)
    )
    found: dict[int, int] = {}
    for once in (True, False):
        for _, key, owner in pairs:
            if key not in found and not (once and owner in owners):
                found[key] = owner
                owners.add(owner)
    return found


def _repeated(correlation: Array) -> bool:
    """Whether a device's correlations come again too often for graphs to be the reason."""
    known = correlation[correlation != MISSING]
    counts = np.unique(known, return_counts=True)[1]
    return len(counts) > 0 and float(np.mean(counts > 1)) > 0.5
