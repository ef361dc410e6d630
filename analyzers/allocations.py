"""Events of an allocator as allocations: when each began and ended, and which are alive at a moment.

A row of the ``memory`` table is an event of one device. Rows that are about segments, failures and marks
(:data:`OTHER_ACTIONS`) change no allocation and are left out by :func:`allocator_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.memory_categories import MEMORY_OF
from trine.record.model import MISSING, Rank, Table

__all__ = ["OTHER_ACTIONS", "Ledger", "Paired", "allocator_rows", "ledger", "pair", "within"]

Array = npt.NDArray[Any]

#: Actions that allocate and release nothing.
OTHER_ACTIONS = ("segment_alloc", "segment_free", "out_of_memory", "snapshot", "free")


@dataclass(frozen=True, slots=True)
class Paired:
    """Allocations of one device. ``start`` is an event row, -1 where it was before the first event; ``end`` the row of
    the release, the number of events where there is none. ``of`` (events,) is each event's allocation, -1 for none."""

    start: Array
    end: Array
    size: Array
    of: Array


def allocator_rows(table: Table) -> Array:
    """Rows that allocate or release, in order."""
    codes = [table.strings.find(name) for name in OTHER_ACTIONS]
    return np.flatnonzero(~np.isin(table["action"], codes) & (table["bytes"] != MISSING))


def pair(address: Array, change: Array) -> Paired:
    """Pair releases (``change`` < 0, in bytes) with the allocation before them at the same ``address``; both (events,).

    A release without one belongs to an allocation from before the first event. An allocation whose address is
    given out again ends there, since its release was lost.
    """
    count = len(address)
    rows = np.flatnonzero(change != 0)
    order = rows[np.lexsort((rows, address[rows]))]
    begins = change[order] > 0
    same = np.zeros(len(order) + 1, dtype=bool)
    same[1:-1] = address[order[1:]] == address[order[:-1]]
    follows_alloc = np.zeros(len(order), dtype=bool)
    follows_alloc[1:] = same[1:-1] & begins[:-1]
    following = np.append(order[1:], count)
    end = np.where(begins & same[1:], following, count)
    starts, orphans = order[begins], order[~begins & ~follows_alloc]
    of = np.full(count, -1, dtype=np.int64)
    of[starts] = np.arange(len(starts))
    ends = end[begins]
    freed = np.flatnonzero(ends < count)
    released = freed[change[ends[freed]] < 0]
    of[ends[released]] = released
    of[orphans] = len(starts) + np.arange(len(orphans))
    return Paired(
        start=np.concatenate([starts, np.full(len(orphans), -1, dtype=np.int64)]),
        end=np.concatenate([ends, orphans]),
        size=np.concatenate([change[starts], -change[orphans]]),
        of=of,
    )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The allocations of one device, by event. ``allocated`` (events,) is the total after each; ``reserved`` has the
    same shape where the source knows it. ``codes`` (events,) are the categories' codes in ``table``'s strings.
    ``paired`` is None where the source has no addresses. ``inside`` says which events lie in the times asked for,
    ``begun`` which are no ``held`` rows: those lay out what was there before, all at one time."""

    device: int
    table: Table
    time_ns: Array
    change: Array
    allocated: Array
    reserved: Array | None
    reserved_peak_bytes: int | None
    lower_bound: bool
    codes: Array
    paired: Paired | None
    inside: Array
    begun: Array

    @property
    def peak(self) -> int:
        """The event with most allocated; of several, the first."""
        seen = np.flatnonzero(self.inside & self.begun)
        if not len(seen):
            seen = np.flatnonzero(self.inside)[-1:]
        return int(seen[self.allocated[seen].argmax()])

    def levels(self, rows: Array) -> tuple[Array, Array]:
        """(codes, bytes alive of each after each of ``rows``); shape (codes, rows)."""
        found = np.unique(self.codes)
        levels = np.zeros((len(found), len(rows)), dtype=np.int64)
        for place, code in enumerate(found):
            running = np.cumsum(np.where(self.codes == code, self.change, 0))
            levels[place] = running[rows] + self._before(int(code), running)
        return found, levels

    def level(self, name: str) -> Array:
        """Bytes alive of a category after each event; shape (events,)."""
        code = self.table.strings.find(name)
        running = np.cumsum(np.where(self.codes == code, self.change, 0))
        return np.asarray(running + self._before(code, running))

    def _before(self, code: int, running: Array) -> int:
        """Bytes of a category that are older than the first event: what is released and was never allocated."""
        if self.paired is None:
            return -min(0, int(running.min(initial=0)))
        old = np.flatnonzero(self.paired.start < 0)
        return int(self.paired.size[old[self.codes[self.paired.end[old]] == code]].sum())

    def alive(self, row: int) -> Array:
        """The allocations that are alive after an event."""
        assert self.paired is not None
        return np.flatnonzero((self.paired.start <= row) & (self.paired.end > row))


def ledger(rank: Rank, table: Table, start_ns: int | None = None, end_ns: int | None = None) -> Ledger | None:
    """The ledger of the device with the highest total (of the host where no device has events), of the times from
    ``start_ns`` to ``end_ns`` alone where given. None where nothing lies in them."""
    on_device = table["device"] >= 0
    devices = np.unique(table["device"][on_device]) if on_device.any() else np.array([-1])
    found = [
        one
        for device in devices.tolist()
        if (one := _of_device(rank, table, device, start_ns, end_ns)) is not None
    ]
    # Totals that begin at nothing (a device that only a copy touched) are small; so the highest is the busiest.
    return max(found, key=lambda one: int(one.allocated[one.peak]), default=None)


def _of_device(
    rank: Rank, table: Table, device: int, start_ns: int | None, end_ns: int | None
) -> Ledger | None:
    mine = table["device"] == device if device >= 0 else table["device"] < 0
    whole = table.select(np.flatnonzero(mine & (table["time_ns"] != MISSING)))
    whole = whole.select(np.argsort(whole["time_ns"], kind="stable"))
    seen = within(whole["time_ns"], start_ns, end_ns)
    reserved = whole["reserved_bytes"]
    knows_reserved = device >= 0 and bool(seen.any()) and bool((reserved[seen] != MISSING).all())
    part = whole.select(allocator_rows(whole))
    inside = within(part["time_ns"], start_ns, end_ns)
    if not inside.any():
        return None
    change = part["bytes"]
    allocated, summed = _totals(part)
    return Ledger(
        device=device,
        table=part,
        time_ns=part["time_ns"],
        change=change,
        allocated=allocated,
        reserved=part["reserved_bytes"] if knows_reserved else None,
        reserved_peak_bytes=int(reserved[seen].max()) if knows_reserved else None,
        lower_bound=summed or _history_lost(rank, device),
        codes=part["category"],
        paired=None if (part["address"] == MISSING).any() else pair(part["address"], change),
        inside=inside,
        begun=part["action"] != part.strings.find("held"),
    )


def within(time: Array, start_ns: int | None, end_ns: int | None) -> Array:
    """Which times are known and lie from ``start_ns`` to ``end_ns``, both included; None is no bound."""
    keep = time != MISSING
    if start_ns is not None:
        keep &= time >= start_ns
    if end_ns is not None:
        keep &= time <= end_ns
    return np.asarray(keep)


def _totals(table: Table) -> tuple[Array, bool]:
    """Bytes alive after each event, and whether they had to be summed from the events.

    What was alive before the first event is then unknown, but at least what is released later without an allocation.
    """
    total = table["allocated_bytes"]
    if (total != MISSING).all():
        return total, False
    running = np.cumsum(table["bytes"])
    return running - min(0, int(running.min())), True


def _history_lost(rank: Rank, device: int) -> bool:
    """Whether more may have been allocated than the events show."""
    if "memory_timeline" in (rank.metadata.get(MEMORY_OF), rank.format):
        return True
    devices = (rank.metadata.get("memory_snapshot") or {}).get("devices") or {}
    return bool((devices.get(device) or {}).get("lower_bound"))
