"""What the ranks of a pipeline hold: how many layers, and elements of weights. Time and memory count by the same formulas.

Megatron's order of ranks: tensor innermost, then context and data, pipeline outermost. Experts of a layer are spread over
neighbours: over ranks of data, context and tensor together, or (``expert_tensor``) each expert over its tensor group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.stages import stage_layers

__all__ = [
    "Places",
    "busiest_elements",
    "crossing_share",
    "expert_replicas",
    "expert_stride",
    "first_elements",
    "in_replicas",
    "place_elements",
    "places_of",
    "stays_gathered",
    "sums_whole",
]


@dataclass(frozen=True, slots=True)
class Places:
    """Ranks of a pipeline that may hold most: the first, the second and the last. Arrays (3, layouts).

    ``rank``: its place; ``first`` and ``last``: whether it has the embedding, the head; ``layers`` and
    ``mixture``: how many it has, and how many of them are of experts.
    """

    rank: Column
    first: Column
    last: Column
    layers: Column
    mixture: Column

    @property
    def dense(self) -> Column:
        """Layers that are not of experts."""
        return self.layers - self.mixture


def places_of(sizes: Sizes, layouts: Layouts) -> Places:
    """The three ranks of every layout; with one or two stages they repeat each other."""
    pipeline = layouts["pipeline"].astype(np.float64)
    rank = np.stack([0 * pipeline, np.minimum(1, pipeline - 1), pipeline - 1])
    folded = layouts.is_kind("schedule", "zb-v", "dualpipe-v") & (pipeline > 1)
    first = (rank == 0).astype(np.float64)
    end = (rank == pipeline - 1).astype(np.float64)
    last = np.where(folded, first, end)
    middle, ends = stage_layers(sizes.layers, pipeline)
    layers = np.where((first + end) > 0, ends, middle)
    # The first layers are the dense ones.
    before = np.where(rank == 0, 0.0, ends + (rank - 1) * middle)
    dense = np.clip(sizes.layers - sizes.mixture_layers - before, 0, layers)
    return Places(rank, first, last, layers, np.where(sizes.mixture_layers > 0, layers - dense, 0.0))


def place_elements(
    sizes: Sizes, expert_tensor: Column | bool, layouts: Layouts, places: Places
) -> tuple[Column, Column]:
    """Of each place: what all data ranks have, and experts. Norms are whole on every tensor rank. A tied table lies on the
    first rank and, once more, on the last."""
    tensor = layouts["tensor"].astype(np.float64)
    norms = sizes.norm_parameters
    shared = places.dense * ((sizes.dense_layer_parameters - norms) / tensor + norms)
    beside = np.where(sizes.mixture_layers > 0, sizes.mixture_rest_parameters - norms, 0.0)
    shared = shared + places.mixture * (beside / tensor + norms)
    ways = np.minimum(layouts["expert"], sizes.experts) * np.where(expert_tensor, tensor, 1.0)
    experts = places.mixture * sizes.experts * sizes.expert_parameters / ways
    both = (layouts["pipeline"] == 1) | (places.first * places.last > 0)
    head = np.where(both & (sizes.tied > 0), 0.0, sizes.vocab * sizes.hidden / tensor)
    outside = places.first * (sizes.embedding_parameters + sizes.other_parameters) / tensor
    return shared + outside + places.last * (head + sizes.final_norm_parameters), experts


def first_elements(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> tuple[Column, Column]:
    """Of the first stage's rank, which ends its backward last: later stages synchronise while it still computes."""
    places = places_of(sizes, layouts)
    shared, experts = place_elements(sizes, conditions.expert_tensor, layouts, places)
    return shared[0], experts[0]


def busiest_elements(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> tuple[Column, Column]:
    """Of the rank that holds most: an update of all ranks ends with its."""
    places = places_of(sizes, layouts)
    shared, experts = place_elements(sizes, conditions.expert_tensor, layouts, places)
    most, rows = np.argmax(shared + experts, axis=0), np.arange(len(layouts))
    return shared[most, rows], experts[most, rows]


def expert_stride(conditions: Conditions, layouts: Layouts) -> Column:
    """Ranks from one that holds an expert to the next with another: a whole tensor group where it is split over one."""
    return np.asarray(np.where(conditions.expert_tensor > 0, layouts["tensor"], 1.0))


def expert_replicas(ranks: Column, expert_tensor: Column | bool, layouts: Layouts) -> Column:
    """Of so many ranks with different data, how many hold the same experts."""
    wider = np.where(expert_tensor, 1.0, layouts["tensor"])
    return np.asarray(np.maximum(np.floor(ranks * wider / layouts["expert"]), 1.0))


def crossing_share(layouts: Layouts, node: Column) -> Column:
    """Of the messages between neighbouring stages, which leave a node: neighbours are data · context · tensor ranks apart."""
    pipeline = layouts["pipeline"].astype(np.float64)
    stride = (layouts["data"] * layouts["context"] * layouts["tensor"]).astype(np.float64)
    crossing = np.ceil(pipeline * stride / node) - 1
    share = np.clip(crossing / np.maximum(pipeline - 1, 1.0), 0.0, 1.0)
    return np.where(pipeline > 1, share, 0.0)


def stays_gathered(layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Where ZeRO 3 gathers a layer once a step and reduces it once: a pipeline keeps its stage whole over the micro-batches, as
    PyTorch's FSDP does there; weights that lie elsewhere come for each use."""
    return np.asarray((layouts["pipeline"] > 1) & (layouts["parameter_offload"] == 0))


def sums_whole(layouts: Layouts, whole: Column | bool) -> npt.NDArray[np.bool_]:
    """Where gradients that ZeRO shards are held whole until they are reduced, once a step: in a pipeline, whose stages PyTorch
    synchronises after their last micro-batch (torch.distributed.pipelining.stage, ``perform_reduce_grad``), and where software
    accumulates so (``whole``)."""
    several = layouts["microbatches"] > 1
    once = (layouts["pipeline"] > 1) | (several & np.asarray(whole, dtype=np.bool_))
    return np.asarray((layouts["zero_stage"] >= 2) & once)


def in_replicas(layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Where every rank has whole weights, or a stage of them alone: DistributedDataParallel's ranks, or none. FSDP2 has the others,
    and holds them in 32 bits."""
    data = layouts["data"] * layouts["context"]
    cut = (layouts["tensor"] > 1) | (layouts["expert"] > 1) | (layouts["context"] > 1)
    return np.asarray((layouts["zero_stage"] < 2) & ~cut & ((layouts["pipeline"] == 1) | (data == 1)))
