"""What ranks tell each other in a step, and how much of it a rank waits for.

Volumes are those of the literature: two all-reduces of a layer's output forward and two backward under tensor parallelism
(Shoeybi 2019; Korthikanti 2022), keys and values round a ring under context parallelism (Liu 2023), two all-to-alls of routed
tokens forward and two backward under expert parallelism (Lepikhin 2020), gradients once a step or, under ZeRO 3, parameters
twice and gradients once a micro-batch (Rajbhandari 2020). What runs beside computing still slows it: by ``overlap`` of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.layouts import COMPRESSIONS, Layouts
from trine.optim.plan.operators import LayerTimes

__all__ = ["Traffic", "traffic_of"]

#: Bytes of an element on the wire, by compression; None: the stack's own.
_WIRE_BYTES = {
    "none": None,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1.0,
    "qsgd": 1.0,
    "powersgd": 0.1,
    "onebit": 0.125,
    "terngrad": 0.25,
}
#: Bytes that an element's compression and decompression move in memory.
_ENCODING_BYTES = 16.0
#: Reads and writes of an element by Adam with 32-bit state: gradient, two moments and master read, three written, copy written.
_OPTIMIZER_BYTES = 34.0
#: Bytes a second and device that an optimizer on the host gets from its memory, and its passes over an element.
_HOST_OPTIMIZER_PER_S, _HOST_OPTIMIZER_BYTES = 12e9, 28.0
#: Host link and a device's share of a node's drives where a cluster does not say (PCIe 4.0 ×16; two NVMe drives for four devices).
_HOST_PER_S, _NVME_PER_S = 24e9, 3e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds that are waited for. Of an average layer and micro-batch: ``forward_s`` and ``backward_s``, and by reason
    ``tensor_s``, ``context_s``, ``expert_s``, ``gather_s``. ``message_s``: between neighbouring stages.
    ``steady_messages_s``: of a micro-batch once the pipeline is full. The rest is of a step."""

    forward_s: Column
    backward_s: Column
    tensor_s: Column
    context_s: Column
    expert_s: Column
    gather_s: Column
    message_s: Column
    steady_messages_s: Column
    exposed_gradients_s: Column
    first_gather_s: Column
    offload_s: Column
    optimizer_s: Column


@dataclass(frozen=True, slots=True)
class _Wire:
    """Links as groups of ranks use them."""

    conditions: Conditions

    def _bus(self, ranks: Column, per_node: Column) -> tuple[Column, Column]:
        """Bytes a second that pass a rank of a ring, and nodes of the group."""
        on = self.conditions
        here = np.maximum(np.minimum(per_node, ranks), 1)
        nodes = np.ceil(ranks / here)
        inside = on.inside_per_s * on.inside_bandwidth
        # All adapters of a node carry its rings: a group with several ranks a node has as many adapters.
        between = on.between_per_s * on.between_bandwidth * here
        return np.where(nodes > 1, np.minimum(inside, between), inside), nodes

    def one_way_s(self, size: Column, ranks: Column, per_node: Column) -> Column:
        """An all-gather whose result has so many bytes, or a reduce-scatter."""
        on = self.conditions
        bus, nodes = self._bus(ranks, per_node)
        inside_steps = np.minimum(per_node, ranks) - 1
        latency = np.where(
            nodes > 1, on.between_latency_s * np.log2(np.maximum(nodes, 2)), 0.0
        ) + on.inside_latency_s * np.log2(1 + np.maximum(inside_steps, 0))
        return np.where(ranks > 1, (ranks - 1) / ranks * size / bus + latency, 0.0)

    def all_reduce_s(self, size: Column, ranks: Column, per_node: Column) -> Column:
        """Of so many bytes."""
        return 2 * self.one_way_s(size, ranks, per_node)

    def all_to_all_s(self, size: Column, ranks: Column, per_node: Column) -> Column:
        """Of so many bytes a rank; only what leaves the node meets the network."""
        on = self.conditions
        here = np.maximum(np.minimum(per_node, ranks), 1)
        away = (ranks - here) / ranks * size / (on.between_per_s * on.between_bandwidth)
        near = (here - 1) / ranks * size / (on.inside_per_s * on.inside_bandwidth)
        latency = np.where(ranks > here, on.between_latency_s, on.inside_latency_s)
        return np.where(ranks > 1, np.maximum(away, near) + latency, 0.0)

    def message_s(self, size: Column, inside: Column) -> Column:
        """Point to point."""
        on = self.conditions
        return np.where(
            inside,
            size / (on.inside_per_s * on.inside_bandwidth) + on.inside_latency_s,
            size / (on.between_per_s * on.between_bandwidth) + on.between_latency_s,
        )


def _beside(wait_s: Column, work_s: Column, slow_down: Column) -> Column:
    """What of a collective a rank waits for that computes beside it: what is longer, and the slow-down of what is not."""
    return np.asarray(np.maximum(wait_s - work_s, 0.0) + slow_down * np.minimum(wait_s, work_s))


def traffic_of(sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes) -> Traffic:
    """Of every layout."""
    wire = _Wire(conditions)
    mixed = sizes.mixture_layers / sizes.layers
    tokens = layouts["micro_batch"] * sizes.sequence / layouts["context"]
    element = np.where(layouts.is_kind("precision", "fp32", "tf32"), 4.0, 2.0)
    tensor = _tensor(sizes, conditions, layouts, times, wire, tokens * sizes.hidden * element)
    context = _context(sizes, conditions, layouts, times, wire, tokens * element)
    expert = _expert(sizes, layouts, wire, tokens * element) * mixed
    gather = _gather(sizes, conditions, layouts, times, wire, element)
    first_gather = np.where(
        layouts["zero_stage"] == 3, _gather_s(sizes, layouts, wire, element) * layouts["microbatches"], 0.0
    )
    size = tokens * sizes.hidden * element / layouts["tensor"]
    # A stage's next is in the same node where the node holds more than one stage's ranks of this replica: it does not in
    # Megatron's order unless the whole job is in one node, since pipeline ranks are outermost.
    message_s = np.where(
        layouts["pipeline"] > 1, wire.message_s(size, layouts.devices <= conditions.node), 0.0
    )
    steady = np.where(layouts["pipeline"] > 1, 2 * message_s * layouts["chunks"], 0.0)
    return Traffic(
        forward_s=tensor[0] + context[0] + 2 * expert + gather[0],
        backward_s=tensor[1] + context[1] + 2 * expert + gather[1],
        tensor_s=tensor[0] + tensor[1],
        context_s=context[0] + context[1],
        expert_s=4 * expert,
        gather_s=gather[0] + gather[1],
        message_s=message_s,
        steady_messages_s=steady * (1 - conditions.message_overlap),
        exposed_gradients_s=_gradients(sizes, conditions, layouts, wire),
        first_gather_s=first_gather,
        offload_s=_offload(sizes, layouts),
        optimizer_s=_optimizer(sizes, conditions, layouts),
    )


def _tensor(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, wire: _Wire, size: Column
) -> tuple[Column, Column]:
    """Forward and backward of a layer. A layer of experts reduces after attention alone."""
    tensor = layouts["tensor"].astype(np.float64)
    each = wire.all_reduce_s(size, tensor, conditions.node)
    reductions = 2 - sizes.mixture_layers / sizes.layers
    plain = reductions * each
    forward_work = np.where(conditions.tensor_overlap > 0, times.dense.forward_s, 0.0)
    forward = _beside(plain, forward_work, conditions.inside_overlap)
    hides = np.where(conditions.hidden_input_gradients > 0, times.dense.weight_s, 0.0)
    hides = np.where(conditions.tensor_overlap > 0, times.dense.weight_s + times.dense.input_s, hides)
    backward = _beside(plain, hides, conditions.inside_overlap)
    # A repeated forward repeats its collectives; nothing hides them.
    again = np.where(layouts.is_kind("recompute", "full"), forward, 0.0)
    return forward, backward + again


def _context(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, wire: _Wire, tokens: Column
) -> tuple[Column, Column]:
    ranks = layouts["context"].astype(np.float64)
    inside = layouts["tensor"] * layouts["context"] <= conditions.node
    keys = np.maximum(sizes.kv_heads / layouts["tensor"], 1) * sizes.score_size
    each = np.where(ranks > 1, (ranks - 1) * wire.message_s(tokens * keys, inside), 0.0)
    slow = np.where(inside, conditions.inside_overlap, conditions.between_overlap)
    forward = _beside(each, times.dense.scores_s, slow)
    backward = _beside(2 * each, 2.5 * times.dense.scores_s, slow)
    again = np.where(layouts.is_kind("recompute", "full"), forward, 0.0)
    return forward, backward + again


def _expert(sizes: Sizes, layouts: Layouts, wire: _Wire, tokens: Column) -> Column:
    """One all-to-all of a layer of experts."""
    size = tokens / layouts["tensor"] * sizes.experts_per_token * sizes.hidden * sizes.load_imbalance
    return wire.all_to_all_s(size, layouts["expert"].astype(np.float64), wire.conditions.node)


def _rank_parameters(sizes: Sizes, layouts: Layouts) -> tuple[Column, Column]:
    """Of the busiest stage's rank: weights that all data ranks share, and weights of experts."""
    stage = sizes.layers / layouts["pipeline"]
    mixture = sizes.mixture_layers / layouts["pipeline"]
    dense = (stage - mixture) * sizes.dense_layer_parameters + mixture * sizes.mixture_rest_parameters
    dense = (dense + sizes.embedding_parameters) / layouts["tensor"]
    experts = mixture * sizes.experts * sizes.expert_parameters
    return dense, experts / np.minimum(layouts["expert"] * 1.0, sizes.experts)


def _group(layouts: Layouts, conditions: Conditions) -> tuple[Column, Column]:
    """Ranks that reduce gradients with each other, and how many of them a node has."""
    ranks = (layouts["data"] * layouts["context"]).astype(np.float64)
    return ranks, np.maximum(conditions.node / layouts["tensor"], 1.0)


def _wire_bytes(conditions: Conditions, layouts: Layouts) -> Column:
    found = np.broadcast_to(conditions.gradient_bytes, layouts["data"].shape).astype(np.float64)
    for code, name in enumerate(COMPRESSIONS):
        if (size := _WIRE_BYTES[name]) is not None:
            found = np.where(layouts["compression"] == code, np.minimum(size, found), found)
    return found


def _gradients(sizes: Sizes, conditions: Conditions, layouts: Layouts, wire: _Wire) -> Column:
    """Exposed synchronisation of a step: an all-reduce, or a reduce-scatter and the gather of new parameters."""
    shared, experts = _rank_parameters(sizes, layouts)
    ranks, here = _group(layouts, conditions)
    of_experts = np.maximum(ranks * layouts["tensor"] / layouts["expert"], 1.0)
    size = _wire_bytes(conditions, layouts)
    sharded = layouts["zero_stage"] > 0
    found = np.zeros(len(layouts))
    for weights, group in ((shared, ranks), (experts, of_experts)):
        reduced = wire.one_way_s(weights * size, group, here)
        spread_out = wire.one_way_s(weights * np.where(sharded, 2.0, size), group, here)
        found = found + np.where(weights > 0, reduced + spread_out, 0.0)
    encoding = np.where(
        layouts["compression"] > 0,
        (shared + experts) * _ENCODING_BYTES / conditions.memory_per_s / conditions.memory,
        0.0,
    )
    # Stages at both ends reduce a tied table between them.
    table = np.where(
        (layouts["pipeline"] > 1) & (sizes.tied > 0),
        wire.all_reduce_s(
            sizes.embedding_parameters / layouts["tensor"] * size, 2.0 * np.ones(len(layouts)), np.ones(1)
        ),
        0.0,
    )
    found = conditions.exposed * found + encoding + table
    return np.where(layouts["zero_stage"] == 3, 0.0, found) * (1 - sizes.frozen)


def _gather_s(sizes: Sizes, layouts: Layouts, wire: _Wire, element: Column) -> Column:
    """All-gather of an average layer's weights under ZeRO 3."""
    shared, experts = _layer_weights(sizes, layouts)
    ranks = layouts.shard_ranks.astype(np.float64)
    here = np.maximum(wire.conditions.node / layouts["tensor"], 1.0)
    of_experts = np.maximum(ranks * layouts["tensor"] / layouts["expert"], 1.0)
    found = wire.one_way_s(shared * element, ranks, here)
    return found + np.where(experts > 0, wire.one_way_s(experts * element, of_experts, here), 0.0)


def _layer_weights(sizes: Sizes, layouts: Layouts) -> tuple[Column, Column]:
    mixed = sizes.mixture_layers / sizes.layers
    shared = (1 - mixed) * sizes.dense_layer_parameters + mixed * sizes.mixture_rest_parameters
    experts = mixed * sizes.experts * sizes.expert_parameters
    return shared / layouts["tensor"], experts / np.minimum(layouts["expert"] * 1.0, sizes.experts)


def _gather(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, wire: _Wire, element: Column
) -> tuple[Column, Column]:
    """What of a layer's gathers and reductions forward and backward wait for; the next layer's run beside this one."""
    gathered = _gather_s(sizes, layouts, wire, element)
    wide = _wire_bytes(conditions, layouts)
    reduced = gathered * wide / element * (1 - sizes.frozen)
    replicas = layouts["data"] * layouts["context"] / layouts.shard_ranks
    shared, _ = _layer_weights(sizes, layouts)
    # Replicas of a shard group (hybrid sharding) reduce their shards between them.
    between = wire.all_reduce_s(shared * wide / layouts.shard_ranks, replicas, np.ones(1))
    across = _group(layouts, conditions)[0] > _group(layouts, conditions)[1]
    slow = np.where(across, conditions.between_overlap, conditions.inside_overlap)
    work_ahead = times.dense.forward_s
    work_behind = times.dense.input_s + times.dense.weight_s + times.dense.recompute_s
    forward = _beside(gathered, work_ahead, slow)
    backward = _beside(gathered + reduced + between, work_behind, slow)
    on = layouts["zero_stage"] == 3
    return np.where(on, forward, 0.0), np.where(on, backward, 0.0)


def _optimizer(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Column:
    """The update by what memory gives; each rank its share where state is sharded."""
    shared, experts = _rank_parameters(sizes, layouts)
    ranks = layouts.shard_ranks.astype(np.float64)
    of_experts = np.maximum(ranks * layouts["tensor"] / layouts["expert"], 1.0)
    sharded = layouts["zero_stage"] > 0
    own = shared / np.where(sharded, ranks, 1.0) + experts / np.where(sharded, of_experts, 1.0)
    device_s = own * _OPTIMIZER_BYTES / (conditions.memory_per_s * conditions.memory)
    host_s = own * _HOST_OPTIMIZER_BYTES / _HOST_OPTIMIZER_PER_S
    return np.where(layouts["optimizer_offload"] > 0, host_s, device_s) * (1 - sizes.frozen)


def _offload(sizes: Sizes, layouts: Layouts) -> Column:
    """Gradients down and new parameters up; state and back from a drive; what is not hidden behind computing is not known
    here, so all of it counts."""
    shared, experts = _rank_parameters(sizes, layouts)
    ranks = layouts.shard_ranks.astype(np.float64)
    own = (shared + experts) / np.where(layouts["zero_stage"] > 0, ranks, 1.0)
    link = np.where(layouts.is_kind("optimizer_offload", "nvme"), _NVME_PER_S, _HOST_PER_S)
    state_bytes = np.where(layouts.is_kind("optimizer_offload", "nvme"), 24.0, 0.0)
    optimizer = np.where(
        layouts["optimizer_offload"] > 0, own * 4.0 / _HOST_PER_S + own * state_bytes / link, 0.0
    )
    tokens = layouts["micro_batch"] * sizes.sequence / layouts["context"]
    kept = tokens * sizes.hidden * 4.0 * sizes.layers / layouts["pipeline"] * layouts["microbatches"]
    activations = np.where(layouts["activation_offload"] > 0, 0.2 * kept / _HOST_PER_S, 0.0)
    drive = np.where(layouts.is_kind("parameter_offload", "nvme"), _NVME_PER_S, _HOST_PER_S)
    parameters = np.where(layouts["parameter_offload"] > 0, own * 4.0 * layouts["microbatches"] / drive, 0.0)
    return optimizer + activations + parameters
