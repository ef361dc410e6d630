"""How many bytes a layout needs on each device, and what they are: of the rank that needs most, in columns over layouts.

    found = memory_of(workload, cluster, stack_named("megatron-core"), layouts)
    found.peak_bytes, found.stage, found.parts["activations"], found.fits, found.host_bytes

A stage's peak is one of four moments: the loss (all that is in flight, and the logits), the first layer's
backward (all that is in flight, what that layer makes again, its gathered weights and gradients), the last
one's, the optimizer's step. The categories are those of that moment, and sum to the peak. What is not tensors
follows: the allocator's fragments, collectives' buffers, the device's context.

What published figures mean differs: ``allocated_bytes`` are tensors (``torch.cuda.max_memory_allocated``),
``reserved_bytes`` what the allocator took for them (``max_memory_reserved``), ``peak_bytes`` what the device
had to give (``nvidia-smi``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trine.optim.plan.closed_form import in_flight
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.columns import Column, Sizes
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory_activations import layer_bytes, logit_bytes, tokens_of
from trine.optim.plan.memory_state import State, state_of
from trine.optim.plan.memory_traits import MemoryTraits, memory_spread, memory_traits
from trine.optim.plan.ranks import Places, in_replicas, places_of
from trine.optim.plan.workload import Workload

__all__ = ["CATEGORIES", "USABLE", "MemoryEstimate", "memory_of"]

#: What a rank's memory is made of. ``temporary``: what a layer's backward makes again, and what the
#: optimizer's step needs.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathers",
    "temporary",
    "communication",
    "allocator",
    "framework",
)
#: Of a device's nominal memory, what its driver gives to programs: 79.3 of 80 GiB, 39.6 of 40.
USABLE = 0.99
#: Families of devices without a context.
_NO_CONTEXT = ("cpu", "tpu")
#: NCCL's buffers of one connection: Simple 4 MiB, LL128 4.7 MiB, LL 0.5 MiB (src/transport, NCCL_BUFFSIZE and
#: its like), and connections a channel: a ring's, and a tree's.
_CONNECTION_BYTES, _CONNECTIONS = 9.2 * 2**20, 2
#: Channels of a communicator inside a node of switched links, and between nodes.
_CHANNELS_INSIDE, _CHANNELS_BETWEEN = 24, 8
#: Layers whose activations stay on the device while others' are moved away: one in use, one on its way.
_ON_THE_WAY = 2


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Of every layout, its rank that needs most. ``parts``: bytes by :data:`CATEGORIES`, which sum to ``peak_bytes``.

    ``stage``: that rank's place in the pipeline, from 0. ``host_bytes``, ``disk_bytes`` and ``remote_bytes``:
    of a *node*, what offload puts there. ``hosts_hold``: what lies in hosts, their own and what comes from other
    nodes, is within their memory, where that is known. ``fits``: so, and the peak is within what the device gives.
    """

    parts: Mapping[str, Column]
    peak_bytes: Column
    stage: npt.NDArray[np.int64]
    host_bytes: Column
    disk_bytes: Column
    remote_bytes: Column
    capacity_bytes: float
    hosts_hold: npt.NDArray[np.bool_]
    fits: npt.NDArray[np.bool_]

    @property
    def needed_bytes(self) -> Column:
        """The peak; infinite where hosts do not hold what is moved there, and no device is large enough."""
        return np.where(self.hosts_hold, self.peak_bytes, np.inf)

    @property
    def low_bytes(self) -> Column:
        """Nine of ten published peaks lay between this and ``high_bytes`` (predicted by constants that they
        had no part in)."""
        return self.peak_bytes * memory_spread().low

    @property
    def high_bytes(self) -> Column:
        """See ``low_bytes``."""
        return self.peak_bytes * memory_spread().high

    @property
    def allocated_bytes(self) -> Column:
        """Tensors alone."""
        return self.reserved_bytes - self.parts["allocator"]

    @property
    def reserved_bytes(self) -> Column:
        """What PyTorch's allocator holds: tensors and fragments."""
        return self.peak_bytes - self.parts["framework"]


def memory_of(
    workload: Workload,
    cluster: Cluster,
    stack: Stack,
    layouts: Layouts,
    *,
    frozen: bool = False,
    traits: MemoryTraits | None = None,
) -> MemoryEstimate:
    """Of every layout under a software stack. ``traits``: other facts than its kind's. ``frozen``: only small
    adapters are trained."""
    traits = traits or memory_traits(stack)
    places = places_of(Sizes.of(workload), layouts)
    state = state_of(workload, stack, traits, layouts, places, frozen=frozen)
    activations, working, moved = _activations(workload, stack, traits, layouts, places, frozen)
    logits = _logits(workload, stack, traits, layouts, places)
    communication = _buffers(workload, traits, layouts, state)
    none = np.zeros_like(activations)
    moments = _moments(traits, layouts, places, state, (activations, logits, working))
    moment = np.stack([sum(each.values(), none) for each in moments]).argmax(axis=0)
    alive = {name: _chosen([each[name] for each in moments], moment) for name in moments[0]}
    fixed = {"parameters": state.parameters, "optimizer": state.optimizer, "communication": communication}
    tensors = sum({**fixed, **alive}.values(), none)
    stages = {**fixed, **alive, "allocator": traits.fragmentation * tensors + traits.fixed_bytes}
    place = sum(stages.values(), none).argmax(axis=0)
    parts = {
        name: _chosen(list(np.broadcast_arrays(value, none)[0]), place) for name, value in stages.items()
    }
    parts["framework"] = _framework(cluster, traits, layouts)
    gone = _chosen(list(moved), place)
    away = {
        tier: _chosen(list(value), place) + np.where(layouts.is_kind("activation_offload", tier), gone, 0.0)
        for tier, value in state.away.items()
    }
    return _estimate(cluster, layouts, parts, _chosen(list(places.rank), place), away)


def _moments(
    traits: MemoryTraits,
    layouts: Layouts,
    places: Places,
    state: State,
    alive: tuple[Column, Column, Column],
) -> tuple[dict[str, Column], ...]:
    """What differs between the loss, the first and the last layer's backward, and the optimizer's step.
    ``alive``: activations, logits, and what a layer's backward works with."""
    activations, logits, working = alive
    none = np.zeros_like(activations)
    # Gradients that backward makes anew are not there yet when a single micro-batch is at its loss.
    anew = (not traits.keeps_gradients) & (layouts["microbatches"] == 1)
    early = np.where(anew, 0.0, state.summed)
    # One piece as long as the shard: the small pieces that activations left behind cannot hold it, so it
    # comes on top.
    beside = state.temporary if traits.flat_step else none
    last = activations / np.maximum(places.layers, 1)
    names = ("gradients", "activations", "logits", "gathers", "temporary")
    return tuple(
        dict(zip(names, values, strict=True))
        for values in (
            (early, activations, logits, state.head_gathers, beside),
            (early, activations, none, state.gathers, working + beside),
            (state.ending, last, none, state.gathers, working + beside),
            (state.gradients, none, none, none, state.temporary),
        )
    )


def _chosen(values: list[Column], index: npt.NDArray[np.int64]) -> Column:
    """``values[index]``, element by element."""
    return np.asarray(np.choose(index, values))


def _estimate(
    cluster: Cluster, layouts: Layouts, parts: dict[str, Column], stage: Column, away: dict[str, Column]
) -> MemoryEstimate:
    peak = sum(parts.values(), np.zeros(len(layouts)))
    ranks = np.minimum(cluster.devices_per_node, layouts.devices)
    host, disk, remote = (ranks * away[tier] for tier in ("cpu", "nvme", "remote"))
    capacity = cluster.device.memory_bytes * USABLE
    # All nodes do alike: what each puts into others' memory, others put into its.
    hosts_hold = host + remote <= (cluster.host_memory_bytes or np.inf)
    return MemoryEstimate(
        parts={name: parts[name] for name in CATEGORIES},
        peak_bytes=peak,
        stage=stage.astype(np.int64),
        host_bytes=host,
        disk_bytes=disk,
        remote_bytes=remote,
        capacity_bytes=capacity,
        hosts_hold=hosts_hold,
        fits=hosts_hold & (peak <= capacity),
    )


def _activations(
    workload: Workload,
    stack: Stack,
    traits: MemoryTraits,
    layouts: Layouts,
    places: Places,
    frozen: bool,
) -> tuple[Column, Column, Column]:
    """Kept by each place over the schedule; alive at the peak of a layer's backward beyond it; and moved away."""
    # All that a micro-batch keeps is counted until its weights' gradient: the orders that tell the two apart
    # are made to fill a limit of so many whole micro-batches (Qi et al. 2023, section 3).
    held = np.stack(
        [
            in_flight(
                layouts["schedule"], layouts["pipeline"], layouts["chunks"], layouts["microbatches"], rank
            )
            for rank in places.rank
        ]
    )
    one, working = _of_micro_batch(workload, stack, traits, layouts, places, frozen)
    edges = tokens_of(workload, layouts) * workload.hidden
    split = np.where(layouts["sequence"] > 0, layouts["tensor"], 1)
    if workload.dropout:
        one = one + places.first * edges / split
    kept = held * one
    if traits.keeps_outputs:
        # A stage's output for each in flight, and the message that comes next.
        kept = kept + np.where(layouts["pipeline"] > 1, (held + 1) * 2 * edges / split, 0.0)
    stays = np.minimum(one / np.maximum(places.layers, 1) * _ON_THE_WAY, kept)
    moved = np.where(layouts["activation_offload"] > 0, kept - stays, 0.0)
    return kept - moved, working, moved


def _of_micro_batch(
    workload: Workload, stack: Stack, traits: MemoryTraits, layouts: Layouts, places: Places, frozen: bool
) -> tuple[Column, Column]:
    """What all layers of each place keep of one micro-batch; what is alive beyond it at the peak of a layer's backward."""
    one: Column = np.zeros_like(places.layers)
    working: Column = np.zeros_like(places.layers)
    budget = layouts.is_kind("recompute", "budget")
    for mixture, layers in ((False, places.dense), (True, places.mixture)):
        if mixture and not workload.is_mixture:
            continue
        each = layer_bytes(workload, stack, traits, layouts, mixture=mixture, frozen=frozen)
        share = layers / np.maximum(places.layers, 1)
        again = np.minimum(layouts["recomputed_layers"] * share, layers)
        some = again * each.input + (layers - again) * each.whole
        one = one + np.where(budget, some, layers * each.kept)
        working = np.maximum(working, np.where(layers > 0, each.working, 0.0))
    return one, working


def _logits(
    workload: Workload, stack: Stack, traits: MemoryTraits, layouts: Layouts, places: Places
) -> Column:
    """Of the rank with the head: one micro-batch at its peak, and further ones where all forwards come first."""
    peak, waiting = logit_bytes(workload, stack, traits, layouts)
    first = layouts.is_kind("schedule", "gpipe", "looped-bfs") & (layouts["pipeline"] > 1)
    further = np.where(first, layouts["microbatches"] - 1, 0)
    return np.asarray(places.last * (peak + further * waiting))


def _buffers(workload: Workload, traits: MemoryTraits, layouts: Layouts, state: State) -> Column:
    """Of gradient reduction between data ranks: fixed buckets, and DDP's, which repeat the gradients."""
    several = layouts["data"] * layouts["context"] > 1
    bucket = np.where(layouts["bucket_bytes"] > 0, 2.0 * layouts["bucket_bytes"], traits.bucket_bytes)
    bucket = np.minimum(bucket, 4.0 * state.elements)
    # FSDP2, by which software with masters in replicas alone averages elsewhere, has none.
    copied = (layouts["zero_stage"] < 2) & (in_replicas(layouts) | (not traits.replica_masters))
    copies = np.where(copied, traits.gradient_copies, 0.0) * state.gradients
    return np.where(several, np.where(copies > 0, copies, bucket), 0.0)


def _framework(cluster: Cluster, traits: MemoryTraits, layouts: Layouts) -> Column:
    """The device's context, and NCCL's buffers: a communicator for each kind of group of several ranks, and
    one of all."""
    if cluster.device.family in _NO_CONTEXT:
        return np.zeros(len(layouts))
    node = cluster.devices_per_node
    reach = layouts["tensor"].astype(np.float64)
    total = np.full(len(layouts), traits.context_bytes)
    each = _CONNECTION_BYTES * _CONNECTIONS
    for name in ("tensor", "context", "data", "pipeline"):
        size = layouts[name]
        span = size if name == "tensor" else reach * size
        reach = reach if name == "tensor" else reach * size
        channels = np.where(span <= node, _CHANNELS_INSIDE, _CHANNELS_BETWEEN)
        total = total + np.where(size > 1, each * channels, 0.0)
    return total + np.where(layouts["expert"] > 1, each * _CHANNELS_INSIDE, 0.0)
