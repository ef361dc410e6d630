"""The model's tables ``memory`` and ``segments`` of a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory_categories import CATEGORIES
from ..model import MISSING, Strings, Table
from ._memory_events import ACTIONS
from ._memory_history import Device
from ._memory_segments import STATES, Held
from ._memory_stacks import Stacks

__all__ = ["memory_table", "segments_table"]

Array = npt.NDArray[Any]


def memory_table(devices: Sequence[Device], held: Held, stacks: Stacks, strings: Strings) -> Table | None:
    """Rows of all devices: first what was held from before the history (``held``), then its events.

    A release has the category and owner of what it releases, and the stack of the release itself. Completed
    releases are left out: memory counts as free from the request on.
    """
    parts = [_rows(device, held, stacks, strings) for device in devices]
    parts = [part for part in parts if len(part["bytes"])]
    if not parts:
        return None
    if len(parts) == 1:
        return Table("memory", parts[0], strings)
    return Table(
        "memory", {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, strings
    )


def _rows(device: Device, held: Held, stacks: Stacks, strings: Strings) -> dict[str, Array]:
    own, events = device.allocations, len(device.action)
    categories = np.array([strings.code(name) for name in CATEGORIES], dtype=np.int32)[
        device.inferred.categories
    ]
    owners = np.array(stacks.owners, dtype=np.int32)
    texts = np.array(stacks.texts, dtype=np.int32)
    actions = np.array([strings.code(name) for name in ACTIONS], dtype=np.int32)
    before = np.flatnonzero(own.start < 0)
    rows = np.flatnonzero(
        ~np.isin(device.action, [ACTIONS.index(name) for name in ("free", "other", "mark")])
    )
    of = device.of[rows]
    action = device.action[rows]
    begins, ends = action == ACTIONS.index("alloc"), action == ACTIONS.index("free_requested")
    sizes = np.where(of >= 0, own.size[of] if len(own.size) else 0, device.size[rows])
    down = ends | (action == ACTIONS.index("segment_free"))
    paired = (begins | ends) & (of >= 0)
    missing = np.full(len(rows), -1, dtype=np.int32)
    first = int(device.time_ns[0]) if events else 0
    # Totals while what was held is laid out; the last is what the history begins with.
    laid = np.cumsum(own.size[before])
    if len(laid):
        laid += device.before - laid[-1]
    reserved_before = np.full(len(before), MISSING, dtype=np.int64)
    reserved = np.full(len(rows), MISSING, dtype=np.int64)
    if device.reserved is not None and events:
        change = device.size[0] if device.action[0] == ACTIONS.index("segment_alloc") else 0
        reserved_before[:] = device.reserved[0] - change
        reserved = device.reserved[rows]
    elif not events and device.anchored:
        reserved_before[:] = int(held.size[held.rows(device.index, 0)].sum())
    block = own.block[before]
    addresses = np.where(block >= 0, held.address[block], 0) if len(held.address) else np.zeros(len(before))
    freed = own.end[before]
    if events:
        addresses = np.where(block < 0, device.address[np.minimum(freed, events - 1)], addresses)
    zeros = np.zeros(len(before), dtype=np.int64)
    return {
        "time_ns": np.concatenate([zeros + first, device.time_ns[rows]]),
        "address": np.concatenate([addresses, device.address[rows]]).astype(np.int64),
        "bytes": np.concatenate(
            [own.size[before], np.where(down, -sizes, np.where(begins, sizes, device.size[rows]))]
        ),
        "category": np.concatenate(
            [categories[before], np.where(paired, categories[of] if len(categories) else -1, missing)]
        ),
        "owner": np.concatenate(
            [
                owners[own.stack[before]],
                np.where(paired, owners[own.stack[of]] if len(own.stack) else -1, owners[device.stack[rows]]),
            ]
        ),
        "device": np.full(len(before) + len(rows), device.index, dtype=np.int64),
        "allocated_bytes": np.concatenate([np.maximum(laid, 0), device.allocated[rows]]),
        "reserved_bytes": np.concatenate([reserved_before, reserved]),
        "action": np.concatenate([zeros + strings.code("held"), actions[action]]),
        "stream": np.concatenate(
            [
                np.where(block >= 0, held.stream[block], MISSING) if len(held.stream) else zeros + MISSING,
                device.stream[rows],
            ]
        ),
        "stack": np.concatenate([texts[own.stack[before]], texts[device.stack[rows]]]),
    }


def segments_table(held: Held, stacks: Stacks, strings: Strings) -> Table | None:
    """Segments and blocks; None where the snapshot has none."""
    if not len(held.address):
        return None
    pools = np.array([strings.code(pool) for pool in held.pools], dtype=np.int64)
    states = np.array([strings.code(state) for state in STATES], dtype=np.int64)
    columns = {
        "segment": held.segment,
        "address": held.address,
        "bytes": held.size,
        "requested_bytes": held.requested,
        "state": states[held.state],
        "device": held.device,
        "stream": held.stream,
        "pool": pools[held.pool],
        "owner": np.array(stacks.owners, dtype=np.int64)[held.stack],
        "stack": np.array(stacks.texts, dtype=np.int64)[held.stack],
    }
    return Table("segments", columns, strings)
