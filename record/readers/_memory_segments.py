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

__all__ = ["ACTIVE", "INACTIVE", "PENDING", "STATES", "Held", "integers", "read_segments"]

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


def integers(rows: Sequence[dict[str, Any]], key: str, default: int = 0) -> Array:
    """A field of each row as int64; what is no integer of 62 bits becomes ``default``."""
    values = [row.get(key, default) for row in rows]
    kinds = set(map(type, values))
    if kinds <= {int, bool}:
        try:
            found = np.array(values, dtype=np.int64)
        except OverflowError:
            pass
        else:
            return np.where(np.abs(found) < _LARGEST, found, default)
    kept = [int(v) if type(v) in (int, float) and abs(v) < _LARGEST else default for v in values]
    return np.array(kept, dtype=np.int64)


def read_segments(segments: Sequence[dict[str, Any]], stacks: Stacks) -> Held:
    """Columns of all segments and blocks."""
    pools: dict[str, int] = {}
    parts: list[tuple[Array, ...]] = []
    odd, expandable = 0, False
    for segment in segments:
        device, address, size = (_integer(segment, key) for key in ("device", "address", "total_size"))
        stream = _integer(segment, "stream")
        expandable = expandable or segment.get("is_expandable") is True
        pool = pools.setdefault(_pool(segment), len(pools))
        listed = segment.get("blocks")
        blocks = [each for each in listed if type(each) is dict] if type(listed) is list else []
        odd += (len(listed) if type(listed) is list else 0) - len(blocks)
        states = [
            _STATES.get(each.get("state"), -1) if type(each.get("state")) is str else -1 for each in blocks
        ]
        odd += states.count(-1)
        sizes = integers(blocks, "size")
        places = integers(blocks, "address", -1)
        if (places < 0).any():
            places = address + np.cumsum(sizes) - sizes
        requested = integers(blocks, "requested_size", -1)
        columns = (
            np.full(len(blocks) + 1, device),
            np.full(len(blocks) + 1, address),
            np.append(address, places),
            np.append(size, sizes),
            np.append(_integer(segment, "requested_size"), np.where(requested < 0, sizes, requested)),
            np.append(SEGMENT, np.where(np.array(states, dtype=np.int64) < 0, INACTIVE, states)),
            np.full(len(blocks) + 1, stream),
            np.array([stacks.number(segment.get("frames")), *(stacks.number(_frames(b)) for b in blocks)]),
            np.full(len(blocks) + 1, pool),
        )
        parts.append(columns)
    joined = [np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)] if parts else []
    device, segment_, address_, size_, requested_, state, stream_, stack, pool_ = (
        joined or [np.zeros(0, dtype=np.int64)] * 9
    )
    return Held(
        device,
        segment_,
        address_,
        size_,
        requested_,
        state,
        stream_,
        stack,
        pool_,
        tuple(pools),
        expandable,
        odd,
    )


def _integer(row: dict[str, Any], key: str) -> int:
    value = row.get(key, 0)
    return value if type(value) is int and abs(value) < _LARGEST else 0


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
    if type(pool) in (tuple, list) and any(pool) and all(type(part) is int for part in pool):
        words.append("private " + ".".join(str(part) for part in pool[:2]))
    return " ".join(words)
