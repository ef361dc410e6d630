"""What the planner's formulas take, in columns of numpy: the sizes of a workload, and the conditions it runs under.

One prediction has one workload and one cluster, and many layouts; a fit has hundreds of runs, each with its own. Both are
the same formulas over columns, of length one or of as many rows as there are, so a fit costs no more than a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trine.optim.plan.cluster import Cluster, Link
from trine.optim.plan.collectives import Network
from trine.optim.plan.constants import (
    DEVICE_CONSTANTS,
    OPERATORS,
    DeviceConstants,
    NetworkConstants,
    Stack,
    device_constants,
    network_constants,
)
from trine.optim.plan.layouts import PRECISIONS
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.units import Bandwidth
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = ["Column", "Conditions", "Sizes", "joined"]

Column = npt.NDArray[np.float64]

_Constants = TypeVar("_Constants", DeviceConstants, NetworkConstants)

#: Families on which attention kernels of two generations differ.
_NEWER = ("hopper", "blackwell")
#: Host link and a device's share of a node's drives where nobody said (PCIe 4.0 x16; two NVMe drives for four devices).
_USUAL_HOST_PER_S, _USUAL_NVME_PER_S = 24e9, 3e9
#: Bandwidth of a link that a cluster does not have: no formula that uses it applies.
_NO_LINK = Bandwidth(1e15)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a workload: counts of elements, each a column. Names are :class:`Workload`'s."""

    layers: Column
    mixture_layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    head_size: Column
    score_size: Column
    ffn: Column
    matrices: Column
    vocab: Column
    sequence: Column
    attended: Column
    causal: Column
    dropout: Column
    bias: Column
    tied: Column
    experts: Column
    experts_per_token: Column
    shared_experts: Column
    expert_ffn: Column
    shared_ffn: Column
    load_imbalance: Column
    attention_parameters: Column
    dense_layer_parameters: Column
    expert_parameters: Column
    mixture_rest_parameters: Column
    embedding_parameters: Column
    norm_parameters: Column
    final_norm_parameters: Column
    other_parameters: Column
    rotary: Column
    frozen: Column

    @classmethod
    def of(cls, workload: Workload, *, frozen: bool = False) -> Sizes:
        """Columns of length one. ``frozen``: weights are not trained, only small adapters beside them."""
        mixture = workload.is_mixture
        rest = (
            workload.layer_parameters(mixture=True) - workload.experts * workload.expert_parameters
            if mixture
            else 0
        )
        values = {
            **{name: getattr(workload, name) for name in _OF_WORKLOAD},
            "matrices": 3 if workload.gated else 2,
            "tied": workload.tied_embeddings,
            "experts": max(workload.experts, 1),
            "dense_layer_parameters": workload.layer_parameters(mixture=False),
            "mixture_rest_parameters": rest,
            "rotary": workload.position_kind in ("", "rotary"),
            "frozen": frozen,
        }
        return cls(**{name: np.asarray([value], dtype=np.float64) for name, value in values.items()})


#: Sizes that a workload says itself, by the same names.
_OF_WORKLOAD = (
    "layers",
    "mixture_layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_size",
    "score_size",
    "ffn",
    "vocab",
    "sequence",
    "attended",
    "causal",
    "dropout",
    "bias",
    "experts_per_token",
    "shared_experts",
    "expert_ffn",
    "shared_ffn",
    "load_imbalance",
    "attention_parameters",
    "expert_parameters",
    "embedding_parameters",
    "norm_parameters",
    "final_norm_parameters",
    "other_parameters",
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """A device, its links, and what it and the software reach: facts and fitted constants, each a column.

    ``peaks`` and ``rates``: by precision, a column of the planner's precisions wide; what a device lacks is not a number.
    Rates are the best that a matmul was seen to reach. Bandwidths in bytes a second, of a device, in one direction.
    """

    peaks: Column
    rates: Column
    networks: tuple[Network, ...]
    network: Column
    memory_per_s: Column
    host_per_s: Column
    nvme_per_s: Column
    remote_per_s: Column
    node: Column
    units: Column
    matmul: Column
    depth: Column
    attention: Column
    memory: Column
    launch_s: Column
    call_s: Column
    skew_s: Column
    fp8: Column
    inside_bandwidth: Column
    inside_overlap: Column
    between_bandwidth: Column
    between_overlap: Column
    compute: Column
    microbatch_s: Column
    step_s: Column
    exposed: Column
    fused_attention: Column
    fused: Column
    padded: Column
    softmax_heads: Column
    captured: Column
    attention_gain: Column
    fp8_gain: Column
    tensor_overlap: Column
    expert_overlap: Column
    expert_once: Column
    expert_tensor: Column
    hidden_input_gradients: Column
    message_overlap: Column
    gradient_bytes: Column
    whole_sums: Column
    replica_masters: Column
    operators: Column

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        stack: Stack,
        device: DeviceConstants | None = None,
        inside: NetworkConstants | None = None,
        between: NetworkConstants | None = None,
    ) -> Conditions:
        """Columns of length one; constants are those of the device's family and the links' kinds unless given."""
        if device is None:
            device = device_constants(cluster.device.family)
            device = replace(device, units=cluster.device.multiprocessors or device.units)
            device = _measured(device, cluster.device.constants)
        inside_link = cluster.inside or Link(_NO_LINK)
        between_link = cluster.between or Link(_NO_LINK, kind="infiniband")
        inside = inside or _measured(network_constants(inside_link.kind), inside_link.constants)
        between = between or _measured(network_constants(between_link.kind), between_link.constants)
        values: dict[str, object] = {
            "memory_per_s": cluster.device.memory_bandwidth.bytes_per_s,
            **_tiers(cluster),
            "network": 0,
            "operators": OPERATORS.index(stack.operators),
            "whole_sums": memory_traits(stack).sums_whole_gradients,
            "replica_masters": memory_traits(stack).replica_masters,
            "attention_gain": stack.attention_gain if cluster.device.family in _NEWER else 1.0,
            "node": cluster.devices_per_node,
            **{name: getattr(device, name) for name in _OF_DEVICE},
            **{f"inside_{name}": getattr(inside, name) for name in ("bandwidth", "overlap")},
            **{f"between_{name}": getattr(between, name) for name in ("bandwidth", "overlap")},
            **{name: getattr(stack, name) for name in _OF_STACK},
        }
        peaks, rates = _peaks_and_rates(cluster, device)
        return cls(
            peaks=peaks,
            rates=rates,
            networks=(Network.of(cluster.with_changes(inside=inside_link, between=between_link)),),
            **{name: np.asarray([value], dtype=np.float64) for name, value in values.items()},
        )


#: Conditions that are a device's constants and a stack's own, by the same names.
_OF_DEVICE = ("units", *DEVICE_CONSTANTS)
_OF_STACK = (
    "compute",
    "microbatch_s",
    "step_s",
    "exposed",
    "fused_attention",
    "fused",
    "padded",
    "softmax_heads",
    "captured",
    "fp8_gain",
    "tensor_overlap",
    "expert_overlap",
    "expert_once",
    "expert_tensor",
    "hidden_input_gradients",
    "message_overlap",
    "gradient_bytes",
)


def _peaks_and_rates(cluster: Cluster, device: DeviceConstants) -> tuple[Column, Column]:
    """FLOP/s by precision, shape (1, precisions) each: what is promised, and the best that a matmul was seen to reach."""
    peaks = [_peak(cluster, precision) for precision in PRECISIONS]
    # The best matmul was measured in bf16, or in what a device without it has.
    known = [peaks[PRECISIONS.index(name)] for name in ("bf16", "fp16", "tf32", "fp32")]
    usual = next((peak for peak in known if np.isfinite(peak)), np.nan)
    best = cluster.device.matmul_flops_per_s or usual * device.achievable
    share = best / usual
    # bf16's is the best above; of fp8 a device's constant says what is reached of the gain that its peaks promise.
    seen = {name: cluster.device.matmul_rates.get(name) for name in ("fp32", "tf32")}
    rates = [seen.get(name) or peak * share for name, peak in zip(PRECISIONS, peaks, strict=True)]
    return np.asarray([peaks], dtype=np.float64), np.asarray([rates], dtype=np.float64)


def _measured(found: _Constants, measured: Mapping[str, float]) -> _Constants:
    """A family's or a kind's constants, and before them those that were measured on this very device or link."""
    names = {each.name for each in fields(found)}
    own: dict[str, Any] = {name: value for name, value in measured.items() if name in names}
    return replace(found, **own, provenance="measured on this machine") if own else found


def _tiers(cluster: Cluster) -> dict[str, float]:
    """Bytes a second of one device to what lies elsewhere; another node's memory is as far as the slower of both links."""
    host = cluster.host_link.bytes_per_s if cluster.host_link is not None else _USUAL_HOST_PER_S
    away = cluster.between.bandwidth.bytes_per_s if cluster.between is not None else host
    drive = cluster.nvme.bytes_per_s if cluster.nvme is not None else _USUAL_NVME_PER_S
    return {"host_per_s": host, "nvme_per_s": min(drive, host), "remote_per_s": min(away, host)}


def _peak(cluster: Cluster, precision: str) -> float:
    try:
        return cluster.device.peak(precision)
    except UsageError:
        return float("nan")


_Rows = TypeVar("_Rows", Sizes, Conditions)


def joined(parts: Sequence[_Rows], rows: Sequence[int]) -> _Rows:
    """Parts of length one, each repeated for so many rows, under one another."""
    kind = type(parts[0])
    columns: dict[str, Any] = {
        field.name: np.repeat(
            np.concatenate([getattr(part, field.name) for part in parts]), list(rows), axis=0
        )
        for field in fields(kind)
        if field.name != "networks"
    }
    given: Sequence[Any] = parts
    networks = [part.networks[0] for part in given if isinstance(part, Conditions)]
    if networks:
        columns["networks"] = tuple(dict.fromkeys(networks))
        place = {network: float(position) for position, network in enumerate(columns["networks"])}
        columns["network"] = np.repeat(np.asarray([place[network] for network in networks]), list(rows))
    return kind(**columns)
