"""What lies off the device, and what a step waits for it: the host's memory, its drives, another node's memory.

Optimizer state is updated where it lies (Ren et al. 2021, ZeRO-Offload), or comes and goes where it lies on no processor of
the node's own; parameters come before each use (Rajbhandari et al. 2021, ZeRO-Infinity); activations leave while forward
computes and return while backward does, so only what takes longer than computing is waited for.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.operators import LayerTimes, repeated_share
from trine.optim.plan.ranks import busiest_elements, expert_replicas

__all__ = ["activation_bytes", "offload_s", "optimizer_s"]

#: Reads and writes of an element by Adam with 32-bit state: gradient, two moments and master read, three written, copy written:
#: 4 + 12 + 12 + 2.
_OPTIMIZER_BYTES = 30.0
#: Bytes a second and device that an optimizer on the host gets from its memory, and its passes over an element.
_HOST_OPTIMIZER_PER_S, _HOST_OPTIMIZER_BYTES = 12e9, 28.0
#: Of an element in 16 bits: 32-bit master and two moments come and go; in 32 bits the weight is its own master.
_STATE_BYTES, _STATE_BYTES_WIDE = 24.0, 16.0
#: Part of a transfer that computing beside it is slowed by: both use the device's memory.
_SLOW_DOWN = 0.05


def optimizer_s(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Column:
    """The update by what memory gives, of the device or of the host; each rank its share where state is sharded."""
    own = _own_parameters(sizes, conditions, layouts)
    device_s = own * _OPTIMIZER_BYTES / (conditions.memory_per_s * conditions.memory)
    host_s = own * _HOST_OPTIMIZER_BYTES / _HOST_OPTIMIZER_PER_S
    on_host = layouts.is_kind("optimizer_offload", "cpu", "nvme")
    # A device that is itself a processor has its own memory's rate, and gains nothing from calling it a host's.
    return np.where(on_host, np.maximum(host_s, device_s), device_s) * (1 - sizes.frozen)


def offload_s(sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes) -> Column:
    """Seconds of a step that are waited for on the way to and from what lies elsewhere."""
    own, element = _own_parameters(sizes, conditions, layouts), _element_bytes(layouts)
    # A gradient leaves and its new weight returns; weights that lie elsewhere come twice a micro-batch.
    exchanged = np.where(layouts.is_kind("optimizer_offload", "cpu", "nvme"), own * 2 * element, 0.0)
    # State that no host's processor updates in its own memory travels whole.
    travels = layouts.is_kind("optimizer_offload", "nvme", "remote")
    state = own * np.where(element < 4, _STATE_BYTES, _STATE_BYTES_WIDE)
    state_s = np.where(travels, state / _rate(conditions, layouts, "optimizer_offload"), 0.0)
    optimizer = exchanged / conditions.host_per_s + state_s
    weights = np.where(layouts["parameter_offload"] > 0, own * 2 * element * layouts["microbatches"], 0.0)
    parameters = weights / _rate(conditions, layouts, "parameter_offload")
    return np.asarray(optimizer + parameters + _activations_s(sizes, conditions, layouts, times))


def _own_parameters(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Column:
    """Of a rank: its share where state is sharded, experts over the ranks that hold the same ones."""
    shared, experts = busiest_elements(sizes, conditions, layouts)
    ranks = layouts.shard_ranks.astype(np.float64)
    of_experts = expert_replicas(ranks, conditions.expert_tensor, layouts)
    sharded = layouts["zero_stage"] > 0
    return np.asarray(shared / np.where(sharded, ranks, 1.0) + experts / np.where(sharded, of_experts, 1.0))


def _element_bytes(layouts: Layouts) -> Column:
    """Of a weight or an activation, and of the gradient that goes to the host."""
    return np.where(layouts.is_kind("precision", "fp32", "tf32"), 4.0, 2.0)


def _rate(conditions: Conditions, layouts: Layouts, column: str) -> Column:
    """Bytes a second of one device to where a column says that something lies."""
    rates: dict[str, Column] = {
        "cpu": conditions.host_per_s,
        "nvme": conditions.nvme_per_s,
        "remote": conditions.remote_per_s,
    }
    found = np.full(len(layouts), np.inf)
    for tier, rate in rates.items():
        found = np.where(layouts.is_kind(column, tier), rate, found)
    return found


def activation_bytes(sizes: Sizes, conditions: Conditions, layouts: Layouts) -> Column:
    """What an average layer keeps of one micro-batch on a rank: inputs of norms and matmuls, of the gate, copies sent to experts.

    By columns what :mod:`trine.optim.plan.memory_activations` counts of one workload (a test compares them), without attention's
    scores, which fused kernels do not keep. Korthikanti et al. 2022, section 4.
    """
    tokens = layouts["micro_batch"] * sizes.sequence / layouts["context"]
    tensor = layouts["tensor"].astype(np.float64)
    split = np.where(layouts["sequence"] > 0, tensor, 1.0)
    element = _element_bytes(layouts)
    mixed = sizes.mixture_layers / sizes.layers
    copies = sizes.experts_per_token * np.where(layouts["expert"] > 1, sizes.load_imbalance, 1.0)
    routed = copies * sizes.expert_ffn + sizes.shared_experts * sizes.shared_ffn
    width = (1 - mixed) * sizes.ffn + mixed * routed
    # A gate that is no kernel of its own keeps its product, too.
    unjoined = (conditions.fused == 0) & (sizes.matrices == 3)
    inside = sizes.score_size * (sizes.heads + sizes.kv_heads) + (sizes.matrices + unjoined) * width
    sent = 2 * mixed * copies * sizes.hidden / np.where(conditions.expert_tensor > 0, 1.0, tensor)
    whole = element * (4 * sizes.hidden / split + inside / tensor + sent)
    whole = whole + (2 * sizes.dropout + _norm_bytes(sizes, conditions)) * sizes.hidden / split
    inputs = element * sizes.hidden / split
    again = repeated_share(sizes, layouts)
    return np.asarray(tokens * (again * inputs + (1 - again) * whole))


def _norm_bytes(sizes: Sizes, conditions: Conditions) -> Column:
    """Of root-mean-square norms that are chains of 32-bit kernels: input and quotient."""
    chain = (conditions.fused == 0) & (sizes.final_norm_parameters < 2 * sizes.hidden)
    norms = np.rint(sizes.norm_parameters / np.maximum(sizes.final_norm_parameters, 1.0))
    return np.where(chain, 8.0 * norms, 0.0)


def _activations_s(sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes) -> Column:
    moved_s = activation_bytes(sizes, conditions, layouts) / _rate(conditions, layouts, "activation_offload")
    average = partial(times.average, sizes=sizes)
    waited = np.zeros(len(layouts))
    for work_s in (average("forward_s"), average("input_s") + average("weight_s") + average("recompute_s")):
        waited = waited + np.maximum(moved_s - work_s, 0.0) + _SLOW_DOWN * np.minimum(moved_s, work_s)
    return waited * sizes.layers / layouts["pipeline"] * layouts["microbatches"]
