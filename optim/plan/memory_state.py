"""Bytes that live between steps: parameters, gradients and the optimizer's state of each stage's rank, and
where they lie.

Rajbhandari et al. 2020 (ZeRO, section 5), Ψ elements a rank before sharding over N, half precision with 32-bit masters:

    stage 0    2Ψ + gΨ + 12Ψ            stage 2    2Ψ + (g + 12)Ψ/N
    stage 1    2Ψ + gΨ + 12Ψ/N          stage 3    (2 + g + 12)Ψ/N, and what is gathered

g: 2 in the paper; software sums gradients in 4 bytes, or in 4 beside 2. Experts have their own data group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trine.optim.plan.columns import Column, Sizes
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import Integers, Layouts
from trine.optim.plan.memory_activations import element_bytes
from trine.optim.plan.memory_traits import MemoryTraits
from trine.optim.plan.ranks import (
    Places,
    expert_replicas,
    in_replicas,
    place_elements,
    stays_gathered,
    sums_whole,
)
from trine.optim.plan.workload import Workload

__all__ = ["State", "state_of"]


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of each place, arrays (3, layouts), on the device; ``hosted`` etc.: of a rank, elsewhere.

    ``gradients``: what is held until the step; ``summed``: where that is more, between micro-batches; ``ending``: as one ends.
    ``gathers``: around a layer's backward; ``head_gathers``: around the loss's. ``temporary``: at the step.
    ``away``: bytes of a rank by tier (``cpu``, ``nvme``, ``remote``).
    """

    parameters: Column
    gradients: Column
    summed: Column
    ending: Column
    optimizer: Column
    temporary: Column
    gathers: Column
    head_gathers: Column
    elements: Column
    away: dict[str, Column]


@dataclass(frozen=True, slots=True)
class _Elements:
    """Of each place's rank before sharding, and over how many ranks ZeRO splits them; experts have their own data group."""

    shared: Column
    experts: Column
    stage: Integers
    ranks: Column
    expert_ranks: Column

    @property
    def all(self) -> Column:
        return np.asarray(self.shared + self.experts)

    def bytes_held(self, bytes_each: Column, from_stage: int) -> Column:
        """What a rank has of ``bytes_each`` an element that is split from a stage on."""
        split = self.stage >= from_stage
        shared = self.shared / np.where(split, self.ranks, 1.0)
        experts = self.experts / np.where(split, self.expert_ranks, 1.0)
        return np.asarray(bytes_each * (shared + experts))


def state_of(
    workload: Workload,
    stack: Stack,
    traits: MemoryTraits,
    layouts: Layouts,
    places: Places,
    *,
    frozen: bool = False,
) -> State:
    """Of every layout and place. ``frozen``: weights are not trained, and neither have gradients nor state."""
    elements = _elements(workload, stack, layouts, places)
    stage, trained = layouts["zero_stage"], 0.0 if frozen else 1.0
    weight, gradient, optimizer = _element_bytes(traits, layouts)
    if frozen:
        weight = np.minimum(weight, element_bytes(layouts))
    sizes = {
        "parameter_offload": _weights_held(traits, layouts, elements, weight),
        "gradients": trained * elements.bytes_held(gradient, 2),
        "optimizer_offload": trained * elements.bytes_held(optimizer, 1),
    }
    fp8 = layouts.is_kind("precision", "fp8") & (stage < 3)
    cached = np.where(fp8, traits.fp8_weight_bytes, 0.0) * elements.all
    gathers, head_gathers = _gathers(workload, stack, traits, layouts, places, elements.all, trained)
    away, parameters, optimizer_bytes, gradients = _offloaded(layouts, sizes)
    summed, ending = (trained * each * elements.all for each in _summed(traits, layouts))
    return State(
        parameters=parameters + cached,
        gradients=gradients,
        summed=np.maximum(gradients, summed),
        ending=np.maximum(gradients, summed + ending),
        optimizer=optimizer_bytes,
        temporary=np.where(
            layouts["optimizer_offload"] > 0, 0.0, trained * _at_step(traits, layouts, elements)
        ),
        gathers=gathers,
        head_gathers=head_gathers,
        elements=elements.all,
        away=away,
    )


def _elements(workload: Workload, stack: Stack, layouts: Layouts, places: Places) -> _Elements:
    shared, experts = place_elements(Sizes.of(workload), stack.expert_tensor, layouts, places)
    ranks = layouts.shard_ranks.astype(np.float64)
    expert_ranks = expert_replicas(ranks, stack.expert_tensor, layouts)
    return _Elements(shared, experts, layouts["zero_stage"], ranks, expert_ranks)


def _element_bytes(traits: MemoryTraits, layouts: Layouts) -> tuple[Column, Column, Column]:
    """Of weights, gradients and optimizer state."""
    wide = element_bytes(layouts) == 4.0
    shorter = layouts.is_kind("precision", "fp16") | (layouts["zero_stage"] >= 2)
    gradient = np.where(shorter, traits.fp16_gradient_bytes, traits.bf16_gradient_bytes)
    gradient = np.where(_replica_masters(traits, layouts), 2.0, gradient)
    plain = wide | (not traits.masters and ~_replica_masters(traits, layouts))
    return np.where(plain, 4.0, 2.0), np.where(plain, 4.0, gradient), np.where(plain, 8.0, 12.0)


def _replica_masters(traits: MemoryTraits, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Where whole weights in 16 bits have masters beside them in software that keeps 32-bit shards elsewhere."""
    return np.asarray(traits.replica_masters & in_replicas(layouts) & (element_bytes(layouts) < 4.0))


def _weights_held(traits: MemoryTraits, layouts: Layouts, elements: _Elements, weight: Column) -> Column:
    """Software whose shards are the masters keeps them beside what ZeRO 2 leaves gathered from forward to backward."""
    held = elements.bytes_held(weight, 3)
    if traits.masters:
        return held
    gathered = np.minimum(element_bytes(layouts), weight) * elements.all
    return np.where(layouts["zero_stage"] == 2, gathered + elements.bytes_held(weight, 2), held)


def _summed(traits: MemoryTraits, layouts: Layouts) -> tuple[Column, Column]:
    """Of an element's gradient while micro-batches run: a whole 32-bit sum; a micro-batch's own in 16 bits, if that is beside it.

    Of two micro-batches the first one's are put back for the last, and so is a pipeline's only sum.
    """
    beside = _replica_masters(traits, layouts) & (layouts["pipeline"] == 1) & (layouts["microbatches"] > 2)
    whole = sums_whole(layouts, traits.sums_whole_gradients) | beside
    return np.where(whole, 4.0, 0.0), np.where(beside, 2.0, 0.0)


def _at_step(traits: MemoryTraits, layouts: Layouts, elements: _Elements) -> Column:
    """Beyond gradients: 32-bit ones of a rank's share, which take the place of whole 16-bit ones or lie beside them."""
    stage = layouts["zero_stage"]
    bytes_each = np.where(stage > 0, traits.step_bytes, 0.0)
    own = np.where(stage > 0, 4.0, 4.0 - 2.0)
    return elements.bytes_held(np.where(_replica_masters(traits, layouts), own, bytes_each), 1)


def _layer_elements(workload: Workload, stack: Stack, layouts: Layouts) -> Column:
    """Of a rank's share of the largest kind of layer, whole over its data ranks."""
    mixture = workload.mixture_layers > 0
    routed = workload.experts * workload.expert_parameters if mixture else 0
    rest = workload.layer_parameters(mixture=mixture) - routed
    tensor = layouts["tensor"].astype(np.float64)
    parts = layouts["expert"] * (tensor if stack.expert_tensor else 1.0)
    return np.asarray(rest / tensor + routed / parts)


def _gathers(
    workload: Workload,
    stack: Stack,
    traits: MemoryTraits,
    layouts: Layouts,
    places: Places,
    elements: Column,
    trained: float,
) -> tuple[Column, Column]:
    """Under ZeRO 3: blocks in use and ahead, with a block's whole gradients in both precisions; embedding and
    head around the loss.

    A pipeline keeps its stage gathered over the micro-batches of a step. Weights that lie elsewhere come for each
    use. Gradients that are held whole until the last micro-batch are counted among gradients.
    """
    tensor = layouts["tensor"].astype(np.float64)
    layer = _layer_elements(workload, stack, layouts)
    stage_layers = places.layers * layer
    tables = 0 if workload.tied_embeddings else workload.vocab * workload.hidden
    outside = (places.first * workload.embedding_parameters + places.last * tables) / tensor
    half = element_bytes(layouts)
    if traits.live_parameters:
        # Modules are gathered one by one: what stays gathered, and the largest.
        unit = np.maximum(workload.ffn, workload.hidden) * workload.hidden / tensor
        ahead = np.minimum(traits.live_parameters + unit, elements)
        outside = 0.0 * outside
    else:
        unit = layer
        ahead = np.minimum(layer * (1 + traits.prefetch), stage_layers)
    piped = stays_gathered(layouts)
    head = places.last * workload.vocab * workload.hidden / tensor
    # Below stage 3, and where they are summed whole, gradients are counted anyway.
    sharded = layouts["zero_stage"] >= 3
    anew = sharded & ~sums_whole(layouts, traits.sums_whole_gradients)
    whole = trained * np.where(anew, half * (unit + head), 0.0)
    backward = half * (np.where(piped, stage_layers, ahead) + outside) + whole
    loss = half * (np.where(piped, stage_layers, unit) + outside)
    on = sharded | (layouts["parameter_offload"] > 0)
    return np.where(on, backward, 0.0), np.where(on, loss, 0.0)


def _offloaded(
    layouts: Layouts, sizes: dict[str, Column]
) -> tuple[dict[str, Column], Column, Column, Column]:
    """Bytes by tier of a rank, and what stays: parameters, optimizer state, gradients.

    Gradients leave with the optimizer's state, whose update reads them (ZeRO-Offload, Ren et al. 2021), where
    they are sharded; else the device sums them and sends them at the step.
    """
    stage = layouts["zero_stage"]
    optimizer_tier, parameter_tier = layouts["optimizer_offload"], layouts["parameter_offload"]
    gone = (optimizer_tier > 0) & (stage >= 2)
    gradients = np.where(gone, 0.0, sizes["gradients"])
    away: dict[str, Column] = {}
    for code, tier in ((1, "cpu"), (2, "nvme"), (3, "remote")):
        own = np.where(optimizer_tier == code, sizes["optimizer_offload"], 0.0)
        own = own + np.where(parameter_tier == code, sizes["parameter_offload"], 0.0)
        away[tier] = own
    # Gradients pass through the host's memory whichever tier the state lies in.
    away["cpu"] = away["cpu"] + np.where(optimizer_tier > 0, sizes["gradients"], 0.0)
    return (
        away,
        np.where(parameter_tier > 0, 0.0, sizes["parameter_offload"]),
        np.where(optimizer_tier > 0, 0.0, sizes["optimizer_offload"]),
        gradients,
    )
