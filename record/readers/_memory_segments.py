"""The first half of a memory snapshot: what the caching allocator held when it was taken.

Columns of integers, a row a segment or a block. Blocks of old snapshots (torch 1.13) have no address: they
lie behind one another from their segment's on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._memory_stacks import Stacks

__all__ = ["ACTIVE", "INACTIVE", "PENDING", "STATES", "Held", "read_segments"]

Array = npt.NDArray[Any]

STATES = ("segment", "active", "pending_free", "inactive")
SEGMENT, ACTIVE, PENDING, INACTIVE = range(4)

_STATES = {
    "active_allocated": ACTIVE,
    "active": ACTIVE,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,
    "inactive": INACTIVE,
}
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Held:
    """Segments (``state`` 0) and their blocks, in order of address within each segment."""

    device: Array
    segment: Array
    address: Array
    size: Array
    requested: Array
    state: Array
    stream: Array
    stack: Array  # numbers of Stacks
    pool: Array  # into pools
    pools: tuple[str, ...]
    expandable: bool
    odd: int  # blocks that are no dict or of unknown state

    @property
    def devices(self) -> list[int]:
        """Devices that hold segments, ascending."""
        return [int(device) for device in np.unique(self.device)]

    def rows(self, device: int, *states: int) -> Array:
        """Row numbers of a device's rows in those states."""
        return np.flatnonzero((self.device == device) & np.isin(self.state, states))


def read_segments(segments: Sequence[dict[str, Any]], stacks: Stacks) -> Held:
    """Columns of all segments and blocks."""
    pools: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    odd, expandable = 0, False
    for segment in segments:
        device, address, stream = (_integer(segment, key) for key in ("device", "address", "stream"))
        expandable = expandable or segment.get("is_expandable") is True
        pool = pools.setdefault(_pool(segment), len(pools))
        size, asked = _integer(segment, "total_size"), _integer(segment, "requested_size")
        stack = stacks.number(segment.get("frames"))
        rows.append((device, address, address, size, asked, SEGMENT, stream, stack, pool))
        listed = segment.get("blocks")
        following = address
        for block in listed if type(listed) is list else ():
            if type(block) is not dict:
                odd += 1
                continue
            name = block.get("state")
            state = _STATES.get(name) if type(name) is str else None
            odd += state is None
            size = _integer(block, "size")
            place = _integer(block, "address", following)
            asked = _integer(block, "requested_size", size)
            number = stacks.number(_frames(block))
            known = INACTIVE if state is None else state
            rows.append((device, address, place, size, asked, known, stream, number, pool))
            following = place + size
    device_, segment_, place_, size_, asked_, state_, stream_, stack_, pool_ = (
        np.array(rows, dtype=np.int64).reshape(-1, 9).T
    )
    return Held(
        device_,
        segment_,
        place_,
        size_,
        asked_,
        state_,
        stream_,
        stack_,
        pool_,
        tuple(pools),
        expandable,
        odd,
    )


def _integer(row: dict[str, Any], key: str, default: int = 0) -> int:
    """A field of a row; ``default`` where it is absent or no integer of 62 bits."""
    value = row.get(key, default)
    return value if type(value) is int and abs(value) < _LARGEST else default


def _frames(block: dict[str, Any]) -> Any:
    """Where a block was allocated: its own frames, or those of its history (torch 1.13 to 2.0)."""
    frames = block.get("frames")
    if frames is None:
        history = block.get("history")
        if type(history) is list and history and type(history[0]) is dict:
            frames = history[0].get("frames")
    return frames


def _pool(segment: dict[str, Any]) -> str:
    """``large``, ``small expandable``, ``large private 1.4``."""
    kind = segment.get("segment_type")
    words = [kind[:20] if type(kind) is str and kind.isprintable() else "unknown"]
    if segment.get("is_expandable") is True:
        words.append("expandable")
    pool = segment.get("segment_pool_id")
    if isinstance(pool, (tuple, list)) and any(pool) and all(type(part) is int for part in pool):
        words.append("private " + ".".join(str(part) for part in pool[:2]))
    return " ".join(words)
