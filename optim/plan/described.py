"""What a plan knows of the ranks that are drawn of it, beside their times: as a record of a real run would describe them.

described(workload, cluster, stack, layouts, row)       for write_record(simulation, folder, …)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.columns import Conditions
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.ranks import expert_stride
from trine.optim.plan.refine import refined_parts
from trine.optim.plan.simulated_record import Described
from trine.optim.plan.workload import Workload
from trine.record.model import Group

__all__ = ["described"]

_CONVENTIONS = ("palm", "megatron", "narayanan", "6n")
#: How state is shared among data ranks, by ZeRO's stage, as records name it.
_SHARED_BY = ("ddp", "zero", "zero", "fsdp2")
#: PyTorch's word for the devices of a family; the others are ``cuda``, AMD's among them.
_DEVICE_TYPES = {"cpu": "cpu", "tpu": "xla", "gaudi": "hpu"}
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp32": "float32",
    "tf32": "float32",
}


def described(workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, row: int) -> Described:
    """Of the ranks that :func:`trine.optim.plan.drawn.simulated_step` draws of a layout: one of each place in the pipeline."""
    one = layouts.take([row])
    places, devices = int(one["pipeline"][0]), int(one.devices[0])
    # Megatron's order: the pipeline is outermost.
    numbers = tuple(place * (devices // places) for place in range(places))
    tokens = int(one.global_batch[0]) * workload.sequence
    layout = one.row(0)
    model = _model(workload)
    facts = {
        "device": _device(cluster),
        "precision": _precision(str(layout["precision"])),
        "flops": _flops(workload, tokens / devices),
        "data_parallel": _data_parallel(one),
        "configuration": _configuration(layout),
    }
    fullest, samples, held = _memory(workload, cluster, stack, one)
    facts_of = tuple(facts | {"model": model | (held if place == fullest else {})} for place in range(places))
    return Described(
        numbers=numbers,
        hosts=tuple(f"node {number // cluster.devices_per_node}" for number in numbers),
        world_size=devices,
        groups=_groups(Conditions.of(cluster, stack), one, numbers),
        run={"planned": _in_words(workload, cluster, stack, places, devices), "layout": layout},
        facts=facts_of,
        samples={fullest: samples},
        # Analyses add up ranks: of those that are drawn all tokens.
        tokens=round(tokens / places),
        note=_about_bubble(workload, cluster, stack, one),
    )


def _in_words(workload: Workload, cluster: Cluster, stack: Stack, places: int, devices: int) -> str:
    where = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    found = f"{workload.name} on {where} under {stack.name}, as trine plan predicts it"
    if devices == 1:
        return found
    each = "one" if places == 1 else f"{places}, one of each stage,"
    return (
        f"{found}; of {devices} ranks {each} {'is' if places == 1 else 'are'} drawn, whose collectives last as long as no "
        "computing hides them"
    )


def _about_bubble(workload: Workload, cluster: Cluster, stack: Stack, one: Layouts) -> str | None:
    """Why the analysis shows another bubble than the plan; None without a pipeline."""
    if int(one["pipeline"][0]) == 1:
        return None
    parts = refined_parts(workload, cluster, stack, one)
    share = f"{100 * parts['pipeline_bubble'] / sum(parts.values()):.1f} %"
    return (
        f"the plan's pipeline bubble, {share} of the step, is of its busiest rank and leaves messages out; the analysis takes "
        "the mean of all ranks, which the others raise, with their messages"
    )


def _device(cluster: Cluster) -> dict[str, Any]:
    """With its peaks: a device of a file of one's own is in no table."""
    device = cluster.device
    return {
        "type": _DEVICE_TYPES.get(device.family, "cuda"),
        "name": device.name,
        "memory_bytes": int(device.memory_bytes),
        "peak_flops_per_s": dict(device.flops_per_s),
        "memory_bytes_per_s": device.memory_bandwidth.bytes_per_s,
        "source": device.source or "declared",
    }


def _model(workload: Workload) -> dict[str, Any]:
    names = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "sequence")
    return {
        "class": workload.name,
        "parameters": int(workload.parameters),
        "parameters_without_embedding": int(workload.parameters - workload.embedding_parameters),
        "trainable_parameters": int(workload.parameters),
        "shape": {name: getattr(workload, name) for name in names},
    }


def _precision(name: str) -> dict[str, Any]:
    # Shares of fp8 runs are of the 16-bit peak, as a plan gives them.
    return {
        "parameter_dtype": "float32" if name in ("fp32", "tf32") else "bfloat16",
        "autocast_dtype": _DTYPES["bf16" if name == "fp8" else name],
        "float32_matmul": "high" if name == "tf32" else "highest",
    }


def _flops(workload: Workload, tokens: float) -> dict[str, Any]:
    """A device's share: the drawn ranks' mean is that of all."""
    found: dict[str, Any] = {name: workload.model_flops(name) * tokens for name in _CONVENTIONS}  # type: ignore[arg-type]
    return {**found, "convention": "megatron"}


def _data_parallel(one: Layouts) -> dict[str, Any] | None:
    ranks = int(one["data"][0] * one["context"][0])
    return {"kind": _SHARED_BY[int(one["zero_stage"][0])], "ranks": ranks} if ranks > 1 else None


def _configuration(layout: Mapping[str, int | str]) -> dict[str, Any]:
    """The layout by the names of Trine's configuration."""
    names = ("data", "tensor", "context", "expert", "pipeline")
    return {
        "parallel": {name: layout[name] for name in names},
        "zero": {"stage": layout["zero_stage"]},
        "checkpointing": {"mode": layout["recompute"]},
    }


def _memory(
    workload: Workload, cluster: Cluster, stack: Stack, one: Layouts
) -> tuple[int, dict[str, float], dict[str, int]]:
    """The place that needs most, its readings, and what of it lies between steps. Of the others a plan does not tell."""
    found = memory_of(workload, cluster, stack, one)
    names = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
    held = {key: int(found.parts[name][0]) for name, key in names.items()}
    peak, tensors = float(found.peak_bytes[0]), float(found.allocated_bytes[0])
    if cluster.device.is_processor:
        readings = {"memory/resident_bytes": peak, "memory/peak_resident_bytes": peak}
    else:
        # What the process takes of its device beside its allocator (the context, NCCL's buffers) has no metric of its own, and
        # the plan counts it.
        readings = {
            "memory/allocated_bytes": tensors,
            "memory/peak_bytes": tensors,
            "memory/reserved_bytes": peak,
        }
    return int(found.stage[0]), readings, held


def _groups(conditions: Conditions, one: Layouts, numbers: tuple[int, ...]) -> tuple[Group, ...]:
    """Of every place, in Megatron's order (tensor innermost, then context and data), by the names that meetings have."""
    tensor, context, data, expert = (int(one[name][0]) for name in ("tensor", "context", "data", "expert"))
    stride = int(np.broadcast_to(expert_stride(conditions, one), 1)[0])
    found = [
        Group("all", "all", "world", tuple(range(int(one.devices[0])))),
        Group("pipeline 0", "pipeline 0", "pipeline", numbers),
    ]
    for place, first in enumerate(numbers):
        members = {
            "tensor": range(first, first + tensor),
            "context": range(first, first + tensor * context, tensor),
            "data": range(first, first + tensor * context * data, tensor),
            "expert": range(first, first + expert * stride, stride),
        }
        found += [
            Group(f"{kind} {place}", f"{kind} {place}", kind, tuple(ranks)) for kind, ranks in members.items()
        ]
    return tuple(found)
