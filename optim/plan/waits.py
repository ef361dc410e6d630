"""How long each of a step's collectives takes alone: volumes by the literature, seconds by :mod:`trine.optim.plan.collectives`.

Volumes: two all-reduces of a layer's output forward and two backward under tensor parallelism (Shoeybi 2019; a reduce-scatter
and an all-gather each where the sequence is split, Korthikanti 2022), keys and values round a ring under context parallelism
(Liu 2023), two all-to-alls of routed tokens forward and two backward under expert parallelism (Lepikhin 2020), gradients once
a step or, under ZeRO 3, parameters twice and gradients once a micro-batch (Rajbhandari 2020).

Nothing here depends on what a fit moves, so a fit computes it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.collectives import all_reduce_s, all_to_all_s, point_to_point_s, reduce_scatter_s
from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.layouts import COMPRESSIONS, Layouts
from trine.optim.plan.ranks import (
    crossing_share,
    expert_replicas,
    expert_stride,
    first_elements,
    in_replicas,
    stays_gathered,
    sums_whole,
)

Flags = npt.NDArray[np.bool_]

__all__ = ["WIRE_BYTES", "Wait", "Waits", "waits_of", "wire_bytes"]

#: Bytes of an element on the wire, by compression; None: the stack's own.
WIRE_BYTES = {
    "none": None,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1.0,
    "qsgd": 1.0,
    "powersgd": 0.1,
    "onebit": 0.125,
    "terngrad": 0.25,
}


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds of a collective alone, and whether it leaves the node."""

    alone_s: Column
    away: Flags

    def reached_s(self, conditions: Conditions) -> Column:
        """As training reaches it."""
        return self.alone_s / np.where(self.away, conditions.between_bandwidth, conditions.inside_bandwidth)

    def overlap(self, conditions: Conditions) -> Column:
        """By what share of it computing beside it is slower."""
        return np.where(self.away, conditions.between_overlap, conditions.inside_overlap)


@dataclass(frozen=True, slots=True)
class Waits:
    """Of every layout: one reduction of a layer's output over tensor ranks, and the three of the loss's maxima and sums; a layer's keys and values once round its
    ring; one all-to-all of a layer of experts; a message between stages in a node and between nodes, and the share of
    neighbours between which it leaves the node (``crossing``); a layer's weights gathered, and their gradients reduced (with replicas of a shard group); the look-up table's,
    which nothing hides; a rank's gradients synchronised once, those of experts apart, and reduced with every other micro-batch
    (``each_reduce``, where sharded gradients accumulate); a tied table's.
    ``last_bucket``: the share of gradients that the last bucket is, where buckets are given: nothing hides it."""

    tensor: Wait
    loss: Wait
    context: Wait
    expert: Wait
    message_inside: Wait
    message_between: Wait
    crossing: Column
    gather: Wait
    expert_gather: Wait
    reduce: Wait
    expert_reduce: Wait
    replicas: Wait
    table_gather: Wait
    gradients: Wait
    expert_gradients: Wait
    each_reduce: Wait
    expert_each_reduce: Wait
    table: Wait
    last_bucket: Column


@dataclass(frozen=True, slots=True)
class _Wire:
    """Collectives of every layout over its network."""

    conditions: Conditions
    rows: int

    def _each(self, function: Callable[..., Column], *columns: Column) -> Column:
        networks, which = self.conditions.networks, self.conditions.network
        wide = [np.broadcast_to(column, self.rows) for column in columns]
        if len(networks) == 1:
            return function(networks[0], *wide)
        found = np.zeros(self.rows)
        for position, network in enumerate(networks):
            chosen = np.flatnonzero(which == position)
            found[chosen] = function(network, *(column[chosen] for column in wide))
        return found

    def _group(self, function: Callable[..., Column], size: Column, ranks: Column, per_node: Column) -> Wait:
        """Over groups of ``ranks``, of which a node holds as many as ``per_node`` says."""
        here = np.maximum(np.floor(np.minimum(np.minimum(per_node, self.conditions.node), ranks)), 1.0)
        return Wait(self._each(function, size, ranks, here), np.broadcast_to(ranks > here, self.rows))

    def one_way(self, size: Column, ranks: Column, per_node: Column) -> Wait:
        """An all-gather whose result has so many bytes, or a reduce-scatter."""
        return self._group(reduce_scatter_s, size, ranks, per_node)

    def all_reduce(self, size: Column, ranks: Column, per_node: Column) -> Wait:
        """Of so many bytes."""
        return self._group(all_reduce_s, size, ranks, per_node)

    def two_level(self, size: Column, ranks: Column, per_node: Column) -> Wait:
        """An all-reduce that reduces in nodes first."""
        return self._group(partial(all_reduce_s, algorithm="two_level"), size, ranks, per_node)

    def all_to_all(self, size: Column, ranks: Column, per_node: Column) -> Wait:
        """Of so many bytes a rank."""
        return self._group(all_to_all_s, size, ranks, per_node)

    def message(self, size: Column, inside: Flags, ranks: Column) -> Wait:
        """Point to point, between two of a group's ranks."""
        near = np.broadcast_to(inside & (self.conditions.node > 1), self.rows)
        return Wait(self._each(point_to_point_s, size, near.astype(np.float64), ranks), ~near)


def _where(chosen: Flags, wait: Wait, other: Wait | None = None) -> Wait:
    """Elsewhere another, or nothing."""
    if other is None:
        return Wait(np.where(chosen, wait.alone_s, 0.0), wait.away)
    return Wait(np.where(chosen, wait.alone_s, other.alone_s), np.where(chosen, wait.away, other.away))


def waits_of(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Waits:
    """Of every layout."""
    wire = _Wire(conditions, len(layouts))
    tokens = layouts["micro_batch"] * sizes.sequence / layouts["context"]
    element = np.where(layouts.is_kind("precision", "fp32", "tf32"), 4.0, 2.0)
    tensor = layouts["tensor"].astype(np.float64)
    context = layouts["context"].astype(np.float64)
    output = tokens * sizes.hidden * element
    split = wire.one_way(2 * output, tensor, conditions.node)
    keys = np.maximum(sizes.kv_heads / tensor, 1) * sizes.score_size
    block = wire.message(tokens * element * keys, tensor * context <= conditions.node, context)
    routed = (
        output / tensor * sizes.experts_per_token * sizes.load_imbalance * _copies(sizes, conditions, layouts)
    )
    sums = wire.all_reduce(4.0 * tokens * np.ones(len(layouts)), tensor, conditions.node)
    return Waits(
        loss=_where(tensor > 1, _times(sums, np.full(len(layouts), 3.0))),
        tensor=_where(layouts["sequence"] > 0, split, wire.all_reduce(output, tensor, conditions.node)),
        context=Wait(np.where(context > 1, (context - 1) * block.alone_s, 0.0), block.away),
        expert=_where(
            sizes.mixture_layers > 0,
            wire.all_to_all(
                routed,
                layouts["expert"].astype(np.float64),
                conditions.node / expert_stride(conditions, layouts),
            ),
        ),
        **_of_messages(conditions, layouts, wire, output / tensor),
        **_of_layers(sizes, conditions, layouts, wire, element),
        **_of_gradients(sizes, conditions, layouts, wire, element),
    )


def _of_messages(conditions: Conditions, layouts: Layouts, wire: _Wire, size: Column) -> dict[str, Any]:
    """Where there is a pipeline."""
    piped = layouts["pipeline"] > 1
    inside = np.ones(len(layouts), dtype=np.bool_)
    # Software that overlaps messages sends each by itself, for which PyTorch keeps a communicator of both ranks.
    ranks = np.where(conditions.message_overlap > 0, 2.0, layouts["pipeline"])
    return {
        "message_inside": _where(piped, wire.message(size, inside, ranks)),
        "message_between": _where(piped, wire.message(size, ~inside, ranks)),
        "crossing": crossing_share(layouts, conditions.node),
    }


def _copies(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Column:
    """Of the copies of a token that leave its node, how many need to: one a node, for k experts drawn from n nodes."""
    nodes = np.maximum(layouts["expert"] * expert_stride(conditions, layouts) / conditions.node, 1.0)
    chosen = np.maximum(sizes.experts_per_token, 1.0)
    distinct = (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)
    share = np.where(nodes > 1, distinct / np.maximum(chosen * (nodes - 1) / nodes, 1e-9), 1.0)
    return np.where(conditions.expert_once > 0, np.minimum(share, 1.0), 1.0)


def _near(conditions: Conditions, layouts: Layouts) -> Column:
    """How many ranks with different data a node has."""
    return np.maximum(conditions.node / layouts["tensor"], 1.0)


def wire_bytes(conditions: Conditions, layouts: Layouts) -> Column:
    """Of an element of the gradients: as the software sums it, or less where it is compressed."""
    # Sums in fp16 are scaled and stay fp16; bf16's lose too much and are made wider where the software cares.
    found = np.broadcast_to(conditions.gradient_bytes, layouts["data"].shape).astype(np.float64)
    short = layouts.is_kind("precision", "fp16") | (in_replicas(layouts) & (conditions.replica_masters > 0))
    found = np.where(short, np.minimum(found, 2.0), found)
    found = np.where(layouts.is_kind("precision", "fp32", "tf32"), 4.0, found)
    for code, name in enumerate(COMPRESSIONS):
        if (size := WIRE_BYTES[name]) is not None:
            found = np.where(layouts["compression"] == code, np.minimum(size, found), found)
    return found


def _near_experts(conditions: Conditions, layouts: Layouts) -> Column:
    """How many ranks with the same experts a node has: they lie a whole expert group apart."""
    apart = layouts["expert"] * expert_stride(conditions, layouts)
    return np.asarray(np.maximum(conditions.node / apart, 1.0))


def _of_layers(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, wire: _Wire, element: Column
) -> dict[str, Any]:
    """Of an average layer under ZeRO 3."""
    mixed = sizes.mixture_layers / sizes.layers
    shared = (1 - mixed) * sizes.dense_layer_parameters + mixed * sizes.mixture_rest_parameters
    shared = shared / layouts["tensor"]
    experts = mixed * sizes.experts * sizes.expert_parameters
    ways = np.minimum(layouts["expert"].astype(np.float64), sizes.experts)
    experts = experts / (ways * expert_stride(conditions, layouts))
    table = sizes.embedding_parameters / layouts["tensor"]
    ranks = layouts.shard_ranks.astype(np.float64)
    near, near_experts = _near(conditions, layouts), _near_experts(conditions, layouts)
    wide = wire_bytes(conditions, layouts)
    own = expert_replicas(ranks, conditions.expert_tensor, layouts)
    on = layouts["zero_stage"] == 3
    replicas = np.maximum(layouts["data"] * layouts["context"] / ranks, 1.0)
    # The table's gradients, too, are reduced once a step where whole ones are summed.
    once = sums_whole(layouts, conditions.whole_sums) & ~stays_gathered(layouts)
    often = (1 - sizes.frozen) / np.where(once, layouts["microbatches"], 1)
    return {
        "gather": _where(on, wire.one_way(shared * element, ranks, near)),
        "expert_gather": _where(on & (experts > 0), wire.one_way(experts * element, own, near_experts)),
        "reduce": _where(on, wire.one_way(shared * wide, ranks, near)),
        "expert_reduce": _where(on & (experts > 0), wire.one_way(experts * wide, own, near_experts)),
        "replicas": _where(
            on,
            wire.all_reduce(
                (shared / ranks + experts / own) * wide, replicas, _near_replicas(conditions, layouts)
            ),
        ),
        "table_gather": _where(on, wire.one_way(table * (element + often * wide), ranks, near)),
    }


def _near_replicas(conditions: Conditions, layouts: Layouts) -> Column:
    """How many ranks with the same shard of ZeRO's state a node has: they lie a whole shard group apart."""
    apart = layouts["tensor"] * layouts.shard_ranks
    return np.asarray(np.maximum(conditions.node / apart, 1.0))


def _times(wait: Wait, count: Column) -> Wait:
    """So many of them, one after the other."""
    return Wait(wait.alone_s * count, wait.away)


def _buckets(size: Column, layouts: Layouts) -> Column:
    """In how many pieces gradients of so many bytes go; 1 where software chooses, whose constants were fitted so."""
    bucket = layouts["bucket_bytes"]
    return np.where(bucket > 0, np.maximum(np.ceil(size / np.maximum(bucket, 1)), 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class _Synchronisation:
    """Of a step's gradients without ZeRO 3: an all-reduce, or a reduce-scatter and the gather of new parameters.

    ``size`` and ``element``: bytes of a gradient and of a parameter on the wire. ``once``: sharded gradients, too, are reduced once
    a step.
    """

    wire: _Wire
    layouts: Layouts
    size: Column
    element: Column
    replicas: Column
    near_replicas: Column
    once: Flags

    def of(self, weights: Column, group: Column, shard: Column, near: Column) -> Wait:
        """In as many buckets as the layout has. ``group`` holds the same weights, ``shard`` of it their state."""
        count = _buckets(weights * self.size, self.layouts)
        found = _times(self._one_bucket(weights / count, group, shard, near), count)
        return _where((self.layouts["zero_stage"] < 3) & (weights > 0), found)

    def each(self, weights: Column, shard: Column, near: Column) -> Wait:
        """With each micro-batch but the last, whose is the step's: gradients that are sharded while they accumulate are reduced
        with every one (Rajbhandari 2020, section 7.1)."""
        count = _buckets(weights * self.size, self.layouts)
        is_each = (self.layouts["zero_stage"] == 2) & ~self.once & (self.layouts["microbatches"] > 1)
        return _where(is_each & (weights > 0), _times(self._reduced(weights / count, shard, near), count))

    def _one_bucket(self, weights: Column, group: Column, shard: Column, near: Column) -> Wait:
        sent = weights * self.size
        whole = _where(
            self.layouts["two_level"] > 0,
            self.wire.two_level(sent, group, near),
            self.wire.all_reduce(sent, group, near),
        )
        return _where(self.layouts["zero_stage"] > 0, self._halves(weights, shard, near), whole)

    def _halves(self, weights: Column, shard: Column, near: Column) -> Wait:
        reduced = self._reduced(weights, shard, near)
        spread_out = self.wire.one_way(weights * self.element, shard, near)
        return Wait(reduced.alone_s + spread_out.alone_s, reduced.away)

    def _reduced(self, weights: Column, shard: Column, near: Column) -> Wait:
        sent = weights * self.size
        reduced = self.wire.one_way(sent, shard, near)
        # Groups that share state are replicas of each other, whose shards are summed.
        summed = self.wire.all_reduce(sent / shard, self.replicas, self.near_replicas)
        several = self.replicas > 1
        return Wait(
            reduced.alone_s + np.where(several, summed.alone_s, 0.0),
            reduced.away | (several & summed.away),
        )


def _of_gradients(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, wire: _Wire, element: Column
) -> dict[str, Any]:
    """Of a step: a rank's own, those of experts apart, and a tied table's."""
    shared, experts = first_elements(sizes, conditions, layouts)
    ranks = (layouts["data"] * layouts["context"]).astype(np.float64)
    sharing = layouts.shard_ranks.astype(np.float64)
    size = wire_bytes(conditions, layouts)
    replicas = np.maximum(ranks / sharing, 1.0)
    synchronised = _Synchronisation(
        wire,
        layouts,
        size,
        element,
        replicas,
        _near_replicas(conditions, layouts),
        sums_whole(layouts, conditions.whole_sums),
    )
    own_replicas = partial(expert_replicas, expert_tensor=conditions.expert_tensor, layouts=layouts)
    near_experts = _near_experts(conditions, layouts)
    # Stages at both ends reduce a tied table between them.
    table = sizes.embedding_parameters / layouts["tensor"] * size
    pair = 2.0 * np.ones(len(layouts))
    buckets = _buckets((shared + experts) * size, layouts)
    near = _near(conditions, layouts)
    return {
        "gradients": synchronised.of(shared, ranks, sharing, near),
        "expert_gradients": synchronised.of(
            experts, own_replicas(ranks), own_replicas(sharing), near_experts
        ),
        "each_reduce": synchronised.each(shared, sharing, near),
        "expert_each_reduce": synchronised.each(experts, own_replicas(sharing), near_experts),
        "last_bucket": np.where(layouts["bucket_bytes"] > 0, 1 / buckets, 0.0),
        "table": _where(
            (layouts["pipeline"] > 1) & (sizes.tied > 0),
            wire.all_reduce(table, pair, np.where(layouts.devices <= conditions.node, 2.0, 1.0)),
        ),
    }
