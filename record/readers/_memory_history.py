"""The second half of a memory snapshot: one device's events, paired into allocations and summed to totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory_categories import Inferred, Trait, infer
from ._memory_events import Events
from ._memory_segments import ACTIVE, PENDING, SEGMENT, Held
from ._memory_stacks import Stacks

__all__ = ["Allocations", "Device", "read_history"]

Array = npt.NDArray[Any]

_OTHER, _ALLOC, _REQUESTED, _FREED, _SEGMENT, _UNSEGMENT, _OOM = range(7)

#: The caching allocator rounds every request up to this (kMinBlockSize).
ROUNDING = 512
_MOST_MARKS = 4096


@dataclass(frozen=True, slots=True)
class Allocations:
    """Paired allocations. ``start`` is an event row, -1 where it was before the history; ``end`` the row of its
    release, the number of events where there is none. ``block`` is its row in :class:`Held`, -1 where it was released."""

    start: Array
    end: Array
    size: Array  # bytes as the allocator counts them
    stack: Array  # of the allocation; 0 where unknown
    block: Array


@dataclass(frozen=True, slots=True)
class Device:
    """One device's history."""

    index: int
    time_ns: Array
    action: Array
    address: Array
    size: Array
    stream: Array
    stack: Array
    of: Array  # allocation of each event, -1 where it is none
    allocations: Allocations
    inferred: Inferred
    allocated: Array
    reserved: Array | None
    held_bytes: int  # of allocations from before the history
    before: int  # allocated bytes before the first event
    pending_peak_bytes: int
    retries: int
    timed: bool
    anchored: bool  # totals come from what was held at the end
    odd: int  # events that are no dict or of unknown action
    overwritten: int  # allocations whose release is missing
    vanished: int  # allocations without release that the snapshot does not hold
    #: Out of memory: (time_ns, requested, free on the device (-1 unknown), reserved by this process (0 unknown)).
    failures: tuple[tuple[int, int, int, int], ...] = ()
    marks: tuple[tuple[str, int, int], ...] = field(default=())  # annotations: (name, start_ns, end_ns)

    @property
    def step_ends_ns(self) -> Array:
        """Ends of optimizer steps (annotated, else by stacks), or of backward passes where there are none."""
        ends = [end for name, _, end in self.marks if name.startswith("Optimizer.step#")]
        if ends:
            return np.array(ends, dtype=np.int64)
        return self.time_ns[self.inferred.step_rows]

    def about(self) -> dict[str, Any]:
        """What the tables cannot hold, as plain values."""
        return {
            "events": len(self.action),
            "first_ns": int(self.time_ns[0]) if len(self.time_ns) else None,
            "last_ns": int(self.time_ns[-1]) if len(self.time_ns) else None,
            "timed": self.timed,
            "held_bytes": self.held_bytes,
            "lower_bound": bool(self.held_bytes or not len(self.action)),
            "pending_peak_bytes": self.pending_peak_bytes,
            "retries": self.retries if len(self.action) else None,
            "out_of_memory": [list(failure) for failure in self.failures[-16:]],
            "step_ends_ns": self.step_ends_ns[-_MOST_MARKS:].tolist(),
            "sized_bytes": self.inferred.sized,
        }


def read_history(
    index: int, rows: Array, events: Events, held: Held, stacks: Stacks, annotations: Sequence[Any]
) -> Device:
    """A device's events (``rows`` of ``events``, in order) with what its segments say of the end."""
    action, stack, address, size, stream, time_us = (
        np.asarray(column)[rows]
        for column in (
            events.action,
            events.stack,
            events.address,
            events.size,
            events.stream,
            events.time_us,
        )
    )
    size = np.maximum(size, 0)
    time, timed = _times(time_us)
    if not (action == _REQUESTED).any():
        action[action == _FREED] = _REQUESTED
    allocations, of, overwritten, vanished = _paired(index, action, address, size, stack, held)
    delta = _deltas(allocations, len(rows))
    anchored = bool(len(held.rows(index, SEGMENT)))
    before = int(allocations.size[allocations.start < 0].sum())
    if anchored:
        before = int(held.size[held.rows(index, ACTIVE)].sum()) - int(delta.sum())
    allocated = np.maximum(before + np.cumsum(delta), 0)
    traits = np.array(stacks.traits, dtype=np.int64)
    inferred = _inferred(action, stack, allocations, traits)
    reserved = _reserved(index, action, size, allocated, held, anchored)
    return Device(
        index=index,
        time_ns=time,
        action=action,
        address=address,
        size=size,
        stream=stream,
        stack=stack,
        of=of,
        allocations=allocations,
        inferred=inferred,
        allocated=allocated,
        reserved=reserved,
        held_bytes=int(allocations.size[allocations.start < 0].sum()),
        before=before,
        pending_peak_bytes=_pending_peak(index, action, size, held),
        retries=_retries(action, traits[stack] if len(stack) else stack),
        timed=timed,
        anchored=anchored,
        odd=int((action == _OTHER).sum()),
        overwritten=overwritten,
        vanished=vanished if anchored else 0,
        failures=_failures(rows, events, action, time, size, reserved),
        marks=_marks(index, annotations),
    )


def _failures(
    rows: Array, events: Events, action: Array, time: Array, size: Array, reserved: Array | None
) -> tuple[tuple[int, int, int, int], ...]:
    """Allocations that failed. The device's free memory stands where other events have their address."""
    failed = np.flatnonzero(action == _OOM)
    free = np.array([events.free.get(row, -1) for row in rows[failed].tolist()], dtype=np.int64)
    held = reserved[failed] if reserved is not None else np.zeros(len(failed), dtype=np.int64)
    columns = (column.tolist() for column in (time[failed], size[failed], free, held))
    return tuple(zip(*columns, strict=True))


def _times(time: Array) -> tuple[Array, bool]:
    """Times that never go back, in ns, and whether the source has any (torch 2.0 has none: then the order's number)."""
    if not len(time) or (time <= 0).all() or bool((time > 1 << 52).any()):
        return np.arange(len(time), dtype=np.int64), not len(time)
    return np.maximum.accumulate(np.maximum(time, time[time > 0][0])) * 1000, True


def _paired(
    index: int, action: Array, address: Array, size: Array, stack: Array, held: Held
) -> tuple[Allocations, Array, int, int]:
    """Allocations with their releases, by address; the allocation of each event; and what did not fit."""
    count = len(action)
    rows = np.flatnonzero((action == _ALLOC) | (action == _REQUESTED))
    order = rows[np.lexsort((rows, address[rows]))]
    begins = action[order] == _ALLOC
    same = np.zeros(len(order) + 1, dtype=bool)  # same[i]: order[i] has the address of order[i - 1]
    same[1:-1] = address[order[1:]] == address[order[:-1]]
    after = np.append(begins[1:], True) if len(order) else begins
    released = begins & same[1:] & ~after
    replaced = begins & same[1:] & after
    orphan = ~begins & ~(same[:-1] & np.append(False, begins[:-1])) if len(order) else begins
    following = np.append(order[1:], count) if len(order) else order
    end = np.where(released | replaced, following, count)

    starts, frees = order[begins], order[orphan]
    blocks = held.rows(index, ACTIVE)
    lasting = end[begins] == count
    found = _block_of(address[starts], lasting, held.address[blocks])
    lone = np.setdiff1d(np.arange(len(blocks)), found[found >= 0])
    block = np.concatenate(
        [
            np.where(found >= 0, blocks[found] if len(blocks) else -1, -1),
            np.full(len(frees), -1),
            blocks[lone],
        ]
    )
    requested = np.concatenate([size[starts], size[frees], held.size[blocks[lone]]])
    bytes_ = (requested + ROUNDING - 1) // ROUNDING * ROUNDING
    bytes_ = np.where(block >= 0, held.size[block] if len(held.size) else bytes_, bytes_)
    allocations = Allocations(
        start=np.concatenate([starts, np.full(len(frees) + len(lone), -1)]),
        end=np.concatenate([end[begins], frees, np.full(len(lone), count)]),
        size=bytes_,
        stack=np.concatenate([stack[starts], np.zeros(len(frees), dtype=np.int64), held.stack[blocks[lone]]]),
        block=block,
    )
    of = np.full(count, -1, dtype=np.int64)
    numbers = np.arange(len(bytes_))
    freed = (allocations.end < count) & np.concatenate(
        [released[begins], np.ones(len(frees), dtype=bool), np.zeros(len(lone), dtype=bool)]
    )
    of[allocations.end[freed]] = numbers[freed]
    of[starts] = numbers[: len(starts)]
    return allocations, of, int(replaced.sum()), int((lasting & (found < 0)).sum())


def _block_of(address: Array, lasting: Array, blocks: Array) -> Array:
    """For each lasting allocation the index of the block at its address, else -1."""
    if not len(blocks):
        return np.full(len(address), -1, dtype=np.int64)
    order = np.argsort(blocks, kind="stable")
    place = np.minimum(np.searchsorted(blocks[order], address), len(blocks) - 1)
    found = order[place]
    return np.where(lasting & (blocks[found] == address), found, -1)


def _deltas(allocations: Allocations, count: int) -> Array:
    """Change of the allocated bytes by each event."""
    delta = np.zeros(count + 1, dtype=np.int64)
    known = allocations.start >= 0
    np.add.at(delta, allocations.start[known], allocations.size[known])
    np.subtract.at(delta, allocations.end, allocations.size)
    return delta[:count]


def _inferred(action: Array, stack: Array, allocations: Allocations, traits: Array) -> Inferred:
    """Categories, from the events that speak of the program: allocations and releases."""
    rows = np.flatnonzero((action == _ALLOC) | (action == _REQUESTED))
    place = np.full(len(action) + 1, len(rows), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    start = np.where(allocations.start >= 0, place[allocations.start], -1)
    alive = np.where(allocations.start < 0, traits[allocations.stack], 0)
    found = infer(
        traits[stack[rows]], action[rows] == _ALLOC, start, place[allocations.end], allocations.size, alive
    )
    return Inferred(found.categories, found.sized, rows[found.step_rows])


def _reserved(
    index: int, action: Array, size: Array, allocated: Array, held: Held, anchored: bool
) -> Array | None:
    """Reserved bytes after each event; None where neither segments nor their events are known."""
    change = np.where(action == _SEGMENT, size, np.where(action == _UNSEGMENT, -size, 0))
    if not anchored and not change.any():
        return None
    running = np.cumsum(change)
    if anchored:
        total = int(held.size[held.rows(index, SEGMENT)].sum())
        return np.asarray(np.maximum(total - (running[-1] if len(running) else 0) + running, 0))
    return np.asarray(np.maximum(running - min(0, int(running.min())), allocated))


def _pending_peak(index: int, action: Array, size: Array, held: Held) -> int:
    """The most that was released but still used by other streams, seen where something was allocated."""
    change = np.where(action == _REQUESTED, size, np.where(action == _FREED, -size, 0))
    at_end = int(held.size[held.rows(index, PENDING)].sum())
    seen = np.cumsum(change)
    if not (action == _FREED).any() or not (action == _ALLOC).any():
        return at_end
    return max(int((seen + at_end - seen[-1])[action == _ALLOC].max()), at_end, 0)


def _retries(action: Array, traits: Array) -> int:
    """How often the allocator gave cached segments back to get a new one: releases of segments directly before
    an allocation of one, other than ``empty_cache()``'s."""
    before = (action[:-1] == _UNSEGMENT) & (action[1:] == _SEGMENT)
    asked = (traits[:-1] & int(Trait.EMPTIES_CACHE)) != 0
    return int((before & ~asked).sum())


def _marks(index: int, annotations: Sequence[Any]) -> tuple[tuple[str, int, int], ...]:
    """Annotations that began and ended, by name, in order of their ends."""
    open_: dict[str, int] = {}
    found = []
    for each in annotations[:_MOST_MARKS] if isinstance(annotations, list) else ():
        if type(each) is not dict or each.get("device", index) != index:
            continue
        name, stage, time = each.get("name"), each.get("stage"), each.get("time_us")
        if type(name) is not str or type(time) is not int or not 0 < time < 1 << 52:
            continue
        if stage == "START":
            open_[name] = time * 1000
        elif stage == "END" and name in open_:
            found.append((name[:200], open_.pop(name), time * 1000))
    return tuple(found)
