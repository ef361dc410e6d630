"""What of each tensor this rank holds, in the coordinates of the tensor in the model that was given; and DCP's plans for it.

A plain tensor is one part that every replica holds alike, a DTensor one box, and a parameter that stands in another order
(:class:`~trine.optim.techniques._assembly.Reordered`) several. DCP's planners make write and read items of them; what
several ranks hold is written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trine.optim.techniques._assembly import Reordered
from trine.record.errors import UnreadableInput

__all__ = ["LoadPlanner", "Part", "SavePlanner", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: ``values`` (its shape) begin at ``offsets`` of the whole, which has the shape ``whole``."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor

    @property
    def index(self) -> MetadataIndex:
        """What DCP calls it."""
        return MetadataIndex(self.name, self.offsets)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal where the plan to write it is."""
        return (self.name, self.whole, self.offsets, tuple(self.values.shape), self.values.dtype)

    def chunk(self) -> ChunkStorageMetadata:
        """The box, for DCP."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())


def parts_of(tensors: Mapping[str, torch.Tensor], reordered: Mapping[str, Reordered]) -> list[Part]:
    """What this rank holds of them; empty shards are left out. ``reordered`` is by the tensors' own names.

    Parts are views: reading them copies live memory, and writing to them changes it.
    """
    found: list[Part] = []
    for name, tensor in tensors.items():
        whole = tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue
            _, offsets = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            part = Part(name, whole, tuple(offsets), tensor.to_local())
        else:
            part = Part(name, whole, (0,) * tensor.dim(), tensor)
        if part.values.numel() or not tensor.numel():
            order = reordered.get(name)
            found.extend([part] if order is None else _in_given_order(part, order))
    return found


def _in_given_order(part: Part, order: Reordered) -> list[Part]:
    """The part cut where its rows part company, each piece at its place in the model that was given."""
    at = order.dimension
    first = part.offsets[at]
    end = first + part.values.shape[at]
    found: list[Part] = []
    for here, there, rows in order.blocks:
        start, stop = max(first, here), min(end, here + rows)
        if start < stop:
            offsets = list(part.offsets)
            offsets[at] = there + start - here
            values = part.values.narrow(at, start - first, stop - start)
            found.append(Part(part.name, part.whole, tuple(offsets), values))
    return found


class SavePlanner(DefaultSavePlanner):
    """Plans and hands out parts: live ones, or copies where ``copies`` has been filled."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.index: part for part in parts}
        #: Of what this rank is to write, by DCP's index.
        self.copies: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """All that this rank holds; ranks that hold the same are told apart by the global plan."""
        items = []
        for index, part in self._parts.items():
            # Whether memory is pinned or wants gradients is this run's own.
            properties = TensorProperties(dtype=part.values.dtype)
            data = TensorWriteData(chunk=part.chunk(), properties=properties, size=torch.Size(part.whole))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """What is written for an item."""
        found = self.copies.get(index)
        return self._parts[index].values if found is None else found


class LoadPlanner(DefaultLoadPlanner):
    """Reads into parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.index: part for part in parts}

    def create_local_plan(self) -> LoadPlan:
        """Raises ``UnreadableInput`` where the checkpoint does not hold all of a part."""
        assert isinstance(self.metadata, Metadata)
        by_name: dict[str, list[Part]] = {}
        for part in self._parts.values():
            by_name.setdefault(part.name, []).append(part)
        items: list[ReadItem] = []
        for name, parts in by_name.items():
            described = self.metadata.state_dict_metadata.get(name)
            if not isinstance(described, TensorStorageMetadata):
                raise UnreadableInput(f"the checkpoint has no {name}")
            found = create_read_items_for_chunk_list(name, described, [part.chunk() for part in parts])
            wanted = sum(part.values.numel() for part in parts)
            if sum(math.prod(item.lengths) for item in found) != wanted:
                raise UnreadableInput(f"the checkpoint holds only a part of {name}")
            items.extend(found)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """What an item is read into."""
        return self._parts[index].values
