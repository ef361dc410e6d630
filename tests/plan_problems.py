"""Small problems whose whole space can be weighed one by one."""

from __future__ import annotations

from typing import Any

from trine.optim.plan.cluster import Cluster, Device, Link
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.problem import Problem, parse_pins
from trine.optim.plan.units import Bandwidth
from trine.optim.plan.workload import Workload

DENSE = Workload(
    name="small", layers=4, hidden=2048, heads=8, kv_heads=4, ffn=8192, gated=True, vocab=8000, sequence=4096
)
MIXTURE = Workload(
    name="small experts",
    layers=4,
    hidden=1024,
    heads=8,
    ffn=2048,
    vocab=8000,
    sequence=4096,
    experts=8,
    experts_per_token=2,
)


def device(memory_gib: float) -> Device:
    """One with so much memory, and the rest as an A100's."""
    return Device(
        name="test device",
        family="ampere",
        flops_per_s={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "tf32": 156e12},
        memory_bytes=int(memory_gib * 2**30),
        memory_bandwidth=Bandwidth.gigabytes_per_s(2000),
    )


def cluster(memory_gib: float = 80.0, *, nodes: int = 2, per_node: int = 2, **changes: Any) -> Cluster:
    """NVLink inside, InfiniBand between."""
    return Cluster(
        device=device(memory_gib),
        devices_per_node=per_node,
        nodes=nodes,
        inside=Link(Bandwidth.gigabytes_per_s(300), kind="nvlink"),
        between=Link(Bandwidth.gigabits_per_s(200), kind="infiniband"),
        name="test cluster",
        **changes,
    )


def problem(
    memory_gib: float = 80.0,
    *pins: str,
    workload: Workload = DENSE,
    stack: str | Stack = "torchtitan",
    batch: int = 8,
    headroom: float = 0.0,
    **changes: Any,
) -> Problem:
    """As asked, with the pins as people write them."""
    return Problem.of(
        workload,
        cluster(memory_gib, **changes),
        stack if isinstance(stack, Stack) else stack_named(stack),
        global_batch=batch,
        headroom=headroom,
        pins=parse_pins(pins),
    )
