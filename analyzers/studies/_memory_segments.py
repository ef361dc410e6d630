"""Fragmentation as a memory snapshot shows it: what the allocator holds and cannot give out, by pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.record.model import Table

__all__ = ["Fragmentation", "PoolUse", "fragmentation"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool's segments. ``split_bytes`` are free blocks in segments that are in use; ``free_bytes`` segments wholly
    free, which the allocator can give back."""

    pool: str
    segments: int
    reserved_bytes: int
    active_bytes: int
    split_bytes: int
    free_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What one device's allocator held when the snapshot was taken. ``rounding_bytes`` of active blocks were not asked
    for; ``pending_bytes`` are released, but another stream still uses them. ``expandable`` is whether segments
    can grow (``expandable_segments``)."""

    reserved_bytes: int
    active_bytes: int
    pending_bytes: int
    split_bytes: int
    free_bytes: int
    largest_free_bytes: int
    rounding_bytes: int
    expandable: bool
    pools: tuple[PoolUse, ...]


def fragmentation(table: Table, device: int, expandable: bool) -> Fragmentation | None:
    """The state of one device's segments; None where the snapshot holds none of it."""
    rows = table.select(table["device"] == device)
    code = {name: rows.strings.find(name) for name in ("segment", "active", "pending_free", "inactive")}
    whole = rows.select(rows["state"] == code["segment"])
    blocks = rows.select(rows["state"] != code["segment"])
    if not len(whole):
        return None
    size = blocks["bytes"]
    active, pending, inactive = (
        blocks["state"] == code[name] for name in ("active", "pending_free", "inactive")
    )
    used = np.unique(blocks["segment"][active | pending])
    in_used = np.isin(blocks["segment"], used)
    pools = []
    for pool in np.unique(whole["pool"]).tolist():
        mine = blocks["pool"] == pool
        free = size[mine & inactive]
        pools.append(
            PoolUse(
                pool=rows.strings.text(pool) or "unknown",
                segments=int((whole["pool"] == pool).sum()),
                reserved_bytes=int(whole["bytes"][whole["pool"] == pool].sum()),
                active_bytes=int(size[mine & active].sum()),
                split_bytes=int(size[mine & inactive & in_used].sum()),
                free_bytes=int(size[mine & inactive & ~in_used].sum()),
                largest_free_bytes=int(free.max(initial=0)),
            )
        )
    asked = np.minimum(blocks["requested_bytes"], size)
    return Fragmentation(
        reserved_bytes=int(whole["bytes"].sum()),
        active_bytes=int(size[active].sum()),
        pending_bytes=int(size[pending].sum()),
        split_bytes=sum(pool.split_bytes for pool in pools),
        free_bytes=sum(pool.free_bytes for pool in pools),
        largest_free_bytes=max(pool.largest_free_bytes for pool in pools),
        rounding_bytes=int((size - asked)[active].sum()),
        expandable=expandable or any("expandable" in pool.pool for pool in pools),
        pools=tuple(sorted(pools, key=lambda pool: -pool.reserved_bytes)),
    )
