"""How much of a step's collectives a rank waits for, and what else is between computing: the optimizer and offload.

What runs beside computing is waited for where it is longer, and slows computing by ``overlap`` of its time where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.layouts import COMPRESSIONS, Layouts
from trine.optim.plan.operators import LayerTimes, repeated_share
from trine.optim.plan.ranks import first_elements, stays_gathered, sums_whole
from trine.optim.plan.tiers import offload_s, optimizer_s
from trine.optim.plan.waits import Waits, wire_bytes

__all__ = ["CODE_BYTES", "Traffic", "layer_calls", "traffic_of"]

#: Bytes that an element's compression, averaging and decompression read and write in memory, by code, over eight ranks
#: (``benchmarks/codec_traffic.py`` counts the operators of our own codes, which no kernel joins).
CODE_BYTES = {
    "none": 0.0,
    "bf16": 24.0,
    "fp16": 24.0,
    "int8": 215.0,
    "qsgd": 159.0,
    "powersgd": 126.0,
    "onebit": 244.0,
    "terngrad": 188.0,
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds that are waited for. Of an average layer and micro-batch: ``forward_s`` and ``backward_s``, and by reason
    ``tensor_s``, ``context_s``, ``expert_s``, ``gather_s``. ``embedding_s`` in forward and ``head_s`` in backward: what ranks that
    share the vocabulary reduce at both ends. ``message_s``: between neighbouring stages, on average.
    ``steady_messages_s``: of a micro-batch once the pipeline is full. The rest is of a step."""

    forward_s: Column
    backward_s: Column
    tensor_s: Column
    embedding_s: Column
    head_s: Column
    context_s: Column
    expert_s: Column
    gather_s: Column
    message_s: Column
    steady_messages_s: Column
    exposed_gradients_s: Column
    first_gather_s: Column
    offload_s: Column
    optimizer_s: Column


def _beside(wait_s: Column, work_s: Column, slow_down: Column) -> Column:
    """What of a collective a rank waits for that computes beside it: what is longer, and the slow-down of what is not."""
    return np.asarray(np.maximum(wait_s - work_s, 0.0) + slow_down * np.minimum(wait_s, work_s))


def traffic_of(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> Traffic:
    """Of every layout."""
    tensor = _tensor(sizes, conditions, layouts, times, waits)
    context = _context(sizes, conditions, layouts, times, waits)
    expert = _expert(sizes, conditions, layouts, times, waits)
    gather = _gather(sizes, conditions, layouts, times, waits)
    inside_s, between_s = (
        each.reached_s(conditions) for each in (waits.message_inside, waits.message_between)
    )
    # Nothing hides the look-up table's gather and reduction, nor the first layer's gather: what of that is not in the layer's.
    first = (
        waits.gather.reached_s(conditions) + waits.expert_gather.reached_s(conditions)
    ) * conditions.exposed
    uses = np.where(stays_gathered(layouts), 1, layouts["microbatches"])
    first = np.maximum(first - gather[0] * layouts["microbatches"] / uses, 0.0)
    first = first + waits.table_gather.reached_s(conditions) * conditions.exposed
    return Traffic(
        forward_s=tensor[0] + context[0] + expert[0] + gather[0],
        backward_s=tensor[1] + context[1] + expert[1] + gather[1],
        tensor_s=tensor[0] + tensor[1],
        embedding_s=_look_up(conditions, layouts, waits),
        head_s=_look_up(conditions, layouts, waits) + waits.loss.reached_s(conditions),
        context_s=context[0] + context[1],
        expert_s=expert[0] + expert[1],
        gather_s=gather[0] + gather[1],
        # To fill the pipeline takes all of its messages; once it is full, the slowest pair of neighbours sets the pace.
        message_s=inside_s * (1 - waits.crossing) + between_s * waits.crossing,
        steady_messages_s=2
        * np.where(waits.crossing > 0, between_s, inside_s)
        * layouts["chunks"]
        * (1 - conditions.message_overlap),
        exposed_gradients_s=_gradients(sizes, conditions, layouts, times, waits),
        first_gather_s=first * uses,
        offload_s=offload_s(sizes, conditions, layouts, times),
        optimizer_s=optimizer_s(sizes, conditions, layouts),
    )


def reductions(sizes: Sizes) -> Column:
    """Of an average layer's forward over its tensor group: after attention and after the feed-forward, which experts do without."""
    return np.asarray(2 - sizes.mixture_layers / sizes.layers)


def layer_calls(sizes: Sizes, layouts: Layouts) -> tuple[Column, Column]:
    """Collectives and messages that an average layer's forward and backward make, each of which the host starts.

    A reduction over the tensor group is one, or a gather and a scatter where the sequence is split, whose backward gathers
    once more (Korthikanti 2022); a ring passes on keys and values once less than it has ranks, and their gradients with them;
    experts' tokens go out and come back; under ZeRO 3 a layer is gathered for either and its gradients are scattered.
    """
    reduced = np.where(layouts["tensor"] > 1, reductions(sizes), 0.0)
    is_split = layouts["sequence"] > 0
    ring = (layouts["context"] - 1).astype(np.float64)
    routed = 2 * np.where(layouts["expert"] > 1, sizes.mixture_layers / sizes.layers, 0.0)
    gathered = (layouts["zero_stage"] == 3).astype(np.float64)
    return (
        np.asarray(reduced * np.where(is_split, 2, 1) + ring + routed + gathered),
        np.asarray(reduced * np.where(is_split, 3, 1) + ring + routed + 2 * gathered),
    )


def _tensor(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> tuple[Column, Column]:
    """Forward and backward of a layer."""
    together = np.where(layouts["tensor"] > 1, conditions.skew_s, 0.0)
    plain = reductions(sizes) * (waits.tensor.reached_s(conditions) + together)
    slow = waits.tensor.overlap(conditions)
    forward_work = np.where(conditions.tensor_overlap > 0, times.average("forward_s", sizes), 0.0)
    forward = _beside(plain, forward_work, slow)
    by_weight, by_input = times.average("weight_s", sizes), times.average("input_s", sizes)
    hides = np.where(conditions.hidden_input_gradients > 0, by_weight, 0.0)
    hides = np.where(conditions.tensor_overlap > 0, by_weight + by_input, hides)
    backward = _beside(plain, hides, slow)
    # Experts split over the tensor group gather and scatter every copy of a token; nothing hides that.
    copies = conditions.expert_tensor * sizes.experts_per_token * sizes.mixture_layers / sizes.layers
    routed = copies * waits.tensor.reached_s(conditions)
    return _repeated(sizes, layouts, forward + routed, backward + routed)


def _look_up(conditions: Conditions, layouts: Layouts, waits: Waits) -> Column:
    """One reduction of what tensor ranks make of their parts of the vocabulary: of the embedding's output, and backward of the
    head's input (Shoeybi et al. 2019, section 3). Nothing hides it."""
    together = np.where(layouts["tensor"] > 1, conditions.skew_s, 0.0)
    return np.asarray(waits.tensor.reached_s(conditions) + together)


def _repeated(sizes: Sizes, layouts: Layouts, forward: Column, backward: Column) -> tuple[Column, Column]:
    """A forward that backward repeats repeats its collectives, too."""
    return forward, backward + repeated_share(sizes, layouts) * forward


def _context(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> tuple[Column, Column]:
    """A block's keys and values travel while the block before is attended to; backward carries twice as much."""
    each, slow = waits.context.reached_s(conditions), waits.context.overlap(conditions)
    forward = _beside(each, times.dense.scores_s, slow)
    backward = _beside(2 * each, 2.5 * times.dense.scores_s, slow)
    return _repeated(sizes, layouts, forward, backward)


def _expert(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> tuple[Column, Column]:
    """Two all-to-alls forward and two backward of a layer of experts, alone or behind another micro-batch's computing."""
    mixed = sizes.mixture_layers / sizes.layers
    both, slow = 2 * waits.expert.reached_s(conditions), waits.expert.overlap(conditions)
    hidden = conditions.expert_overlap > 0
    forward = np.where(hidden, _beside(both, times.mixture.forward_s, slow), both)
    behind = times.mixture.input_s + times.mixture.weight_s
    backward = np.where(hidden, _beside(both, behind, slow), both)
    return _repeated(sizes, layouts, forward * mixed, backward * mixed)


def _gradients(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> Column:
    """Exposed synchronisation of a step."""
    found = waits.gradients.reached_s(conditions) + waits.expert_gradients.reached_s(conditions)
    shared, experts = first_elements(sizes, conditions, layouts)
    code_bytes = np.asarray([CODE_BYTES[name] for name in COMPRESSIONS])[layouts["compression"]]
    # Gradients that are no wider anyway are sent as they are.
    plain = wire_bytes(conditions, layouts.with_changes(compression=0))
    code_bytes = np.where(wire_bytes(conditions, layouts) < plain, code_bytes, 0.0)
    encoding = (shared + experts) * code_bytes / conditions.memory_per_s / conditions.memory
    exposed = np.maximum(np.minimum(conditions.exposed, 1.0), waits.last_bucket)
    found = exposed * found + encoding + waits.table.reached_s(conditions)
    found = found + exposed * _each_reduce(sizes, conditions, layouts, times, waits)
    return np.asarray(found * (1 - sizes.frozen))


def _each_reduce(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> Column:
    """What a step waits for gradients that are reduced with each of its micro-batches but the last, behind their own backward."""
    each = waits.each_reduce.reached_s(conditions) + waits.expert_each_reduce.reached_s(conditions)
    layers = sizes.layers / layouts["pipeline"]
    behind = layers * sum(
        (times.average(name, sizes) for name in ("weight_s", "recompute_s")), times.average("input_s", sizes)
    )
    return np.asarray(
        (layouts["microbatches"] - 1) * _beside(each, behind, waits.each_reduce.overlap(conditions))
    )


def _gather(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, waits: Waits
) -> tuple[Column, Column]:
    """What of a layer's gathers and reductions forward and backward of a micro-batch wait for; the next layer's run beside this
    one."""
    once = stays_gathered(layouts)
    share = np.where(once, 1 / layouts["microbatches"], 1.0)
    gathered = waits.gather.reached_s(conditions) + waits.expert_gather.reached_s(conditions)
    gathered = gathered * conditions.exposed
    reduced = waits.reduce.reached_s(conditions) + waits.expert_reduce.reached_s(conditions)
    reduced = (reduced + waits.replicas.reached_s(conditions)) * (1 - sizes.frozen) * conditions.exposed
    slow = waits.gather.overlap(conditions)
    work_behind = sum(
        (times.average(name, sizes) for name in ("weight_s", "recompute_s")), times.average("input_s", sizes)
    )
    again = np.where(once, 0.0, gathered)
    unreduced = _beside(again, work_behind, slow)
    # A pipeline's whole share is of one micro-batch; elsewhere each gathers, and the last alone reduces.
    last = np.where(sums_whole(layouts, conditions.whole_sums) & ~once, 1 / layouts["microbatches"], 1.0)
    behind = unreduced + last * (_beside(again + reduced, work_behind, slow) - unreduced)
    return share * _beside(gathered, times.average("forward_s", sizes), slow), share * behind
