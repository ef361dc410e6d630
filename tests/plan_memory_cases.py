"""Clusters, models and sums for the tests of planned memory."""

from __future__ import annotations

from trine.optim.plan import Bandwidth, Cluster, Device, Link, Workload
from trine.optim.plan.constants import stack_named
from trine.optim.plan.memory import CATEGORIES, MemoryEstimate

__all__ = [
    "DEEPSPEED",
    "GIB",
    "MEGATRON",
    "TENSORS",
    "TORCHTITAN",
    "cluster",
    "gpt",
    "llama",
    "mixture",
    "of",
    "state",
]

GIB = 2**30
MEGATRON = stack_named("megatron-lm-2022")
DEEPSPEED = stack_named("deepspeed")
TORCHTITAN = stack_named("torchtitan")
#: Kinds whose figures are of tensors alone, without what was fitted.
TENSORS = [name for name in CATEGORIES if name not in ("allocator", "framework")]


def cluster(gib: int = 80, *, host_gib: int = 0, family: str = "ampere") -> Cluster:
    device = Device(
        "a device",
        family,
        {"bf16": 3e14, "fp32": 2e13},
        gib * GIB,
        Bandwidth.gigabytes_per_s(2000),
        Bandwidth(3e11),
    )
    return Cluster(
        device,
        devices_per_node=8,
        nodes=1024,
        between=Link(Bandwidth(2.5e10), kind="infiniband"),
        host_memory_bytes=host_gib * GIB,
    )


def gpt(**changes: object) -> Workload:
    """22 billion parameters, of Korthikanti et al. 2022; its layers alone."""
    given = {
        "layers": 48,
        "hidden": 6144,
        "heads": 64,
        "ffn": 24576,
        "vocab": 1,
        "sequence": 2048,
        "dropout": True,
    }
    return Workload(name="gpt", **{**given, **changes})  # type: ignore[arg-type]


def llama(**changes: object) -> Workload:
    """8 billion parameters."""
    given = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "sequence": 8192,
        "gated": True, "bias": False, "tied_embeddings": False,
    }  # fmt: skip
    return Workload(name="llama", **{**given, **changes})  # type: ignore[arg-type]


def mixture() -> Workload:
    return llama(experts=8, experts_per_token=2, expert_ffn=14336, vocab=32000)


def of(estimate: MemoryEstimate, *names: str) -> float:
    return sum(float(estimate.parts[name][0]) for name in names)


def state(estimate: MemoryEstimate) -> float:
    return of(estimate, "parameters", "gradients", "optimizer")
