"""How an optimizer step is cut into tiles. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNED", "Length", "Span", "tiles_of"]

#: Elements that spans begin at multiples of. Vectorised kernels treat whole vectors and the rest after them in two ways,
#: which may round differently: so the rest must be the tensor's own. 64 elements are the largest step of PyTorch's kernels
#: on a CPU (a cache line of bytes, 4 vectors of 16 floats).
ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, end) of one parameter, in the order of memory."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Length:
    """What a parameter is for its tiles."""

    elements: int
    element_bytes: int
    divisible: bool = True


def tiles_of(lengths: Sequence[Length], most_bytes: float) -> list[tuple[Span, ...]]:
    """Every element once, in tiles of at most ``most_bytes`` of parameters, in their order.

    Small parameters share a tile, large ones are cut at multiples of :data:`ALIGNED`. One that cannot be cut, or a tile
    that would hold less than that, is larger than ``most_bytes``.
    """
    tiles: list[tuple[Span, ...]] = []
    current: list[Span] = []
    room = most_bytes

    def finish() -> None:
        nonlocal room
        if current:
            tiles.append(tuple(current))
            current.clear()
        room = most_bytes

    for slot, length in enumerate(lengths):
        start = 0
        if not length.elements:  # an empty shard: it has a state too, as that of the other ranks
            current.append(Span(slot, 0, 0))
        while start < length.elements:
            left = length.elements - start
            if left * length.element_bytes <= room:
                count = left
            elif length.divisible and room >= ALIGNED * length.element_bytes:
                count = int(room // (ALIGNED * length.element_bytes)) * ALIGNED
            elif current:
                finish()
                continue
            else:
                count = min(left, ALIGNED) if length.divisible else left
            current.append(Span(slot, start, start + count))
            room -= count * length.element_bytes
            start += count
    finish()
    return tiles
