"""What a tile is made of while it is in flight, and how its bytes are read and written."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from trine.optim.runtime.tiers.files import Region
from trine.optim.runtime.tiers.slabs import Slab
from trine.optim.runtime.tiers.slots import Slot
from trine.optim.runtime.tiers.spans import Span

__all__ = [
    "Live",
    "Part",
    "Tile",
    "as_bytes",
    "events_of",
    "raw",
    "read_all",
    "reads_of",
    "regions_of",
    "write_all",
]


@dataclass(slots=True, eq=False)
class Live:
    """A slot in the step that runs."""

    parameter: torch.Tensor  # as it stands in the group: plain
    gradient: torch.Tensor
    state: dict[str, Any]
    left: int  # spans that are still to come
    fresh: bool  # the optimizer makes the state in this step
    #: What the optimizer left, in its order of keys: numbers, and whole tensors of moments that are new.
    made: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Part:
    """A span that is loaded, or on its way."""

    slot: Slot
    span: Span
    live: Live
    parameter: torch.Tensor  # what the optimizer steps on, and its gradient and state
    gradient: torch.Tensor
    state: dict[str, Any]
    back: list[tuple[torch.Tensor, torch.Tensor]]  # (where, from what buffer): after the update
    rounded: torch.Tensor | None  # buffer for what a master is rounded to
    reads: list[tuple[Region, torch.Tensor]]


@dataclass(slots=True, eq=False)
class Tile:
    """Parts that are loaded, updated and stored together."""

    parts: list[Part]
    slab: Slab | None
    events: list[Any]
    reading: Future[None] | None = None


def regions_of(slot: Slot) -> list[Region]:
    """Of a slot, on disk."""
    return [*slot.regions.values(), *([] if slot.parameter is None else [slot.parameter])]


def raw(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bytes, where they lie in one piece each."""
    if not (target.is_contiguous() and source.is_contiguous()):
        return target, source
    return target.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)


def events_of(event: Any) -> list[Any]:
    """None or one."""
    return [] if event is None else [event]


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """As uint8, over the same memory."""
    return values.detach().view(torch.uint8)


def reads_of(part: Part) -> list[tuple[Region, int, int, torch.Tensor]]:
    """What a part needs from the disk."""
    return [(region, part.span.start, part.span.end, as_bytes(buffer)) for region, buffer in part.reads]


def read_all(reads: list[tuple[Region, int, int, torch.Tensor]]) -> None:
    """In turn; on a thread."""
    for region, start, end, buffer in reads:
        region.read(start, end, buffer)


def write_all(writes: list[tuple[Region, int, int, torch.Tensor]]) -> None:
    """In turn; on a thread."""
    for region, start, end, values in writes:
        region.write(start, end, values)
