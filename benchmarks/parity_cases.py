"""The cases of ``benchmarks/parity.py``, which are the core of the runtime's tests too.

A case's tolerance is relative, on the loss of every step (``by_last``: on the mean of the last five, for what is only
right on average). 1e-10 in float64 is for what is exact by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """One configuration, where it runs, and how near to the plain run it must stay."""

    name: str
    changes: Mapping[str, Any]
    ranks: int = 1
    dtype: str = "float64"
    tolerance: float = 1e-10
    optimizer: str = "adamw"
    by_last: bool = False
    #: Changes of the sample's GPTConfig (dropout, attention, …).
    model: Mapping[str, Any] = field(default_factory=dict)
    #: Environment of the ranks, such as TRINE_RANKS_PER_NODE.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Too long for the tests that people run by default.
    slow: bool = False


_PRECISION = (
    Case("bf16 autocast", {"precision.dtype": "bf16"}, dtype="float32", tolerance=2e-3),
    Case("bf16 autocast on 2", {"precision.dtype": "bf16"}, ranks=2, dtype="float32", tolerance=2e-3),
    Case("fp16 autocast", {"precision.dtype": "fp16"}, dtype="float32", tolerance=6e-4),
    Case("fp16 autocast on 2", {"precision.dtype": "fp16"}, ranks=2, dtype="float32", tolerance=6e-4),
    Case(
        "fp16 at a fixed scale",
        {"precision.dtype": "fp16", "precision.loss_scale": 1024.0},
        dtype="float32",
        tolerance=6e-4,
    ),
    Case(
        "fp16 + accumulation 2 on 2",
        {"precision.dtype": "fp16", "accumulation.steps": 2},
        ranks=2,
        dtype="float32",
        tolerance=6e-4,
    ),
    Case("fp32 said aloud", {"precision.dtype": "fp32"}, tolerance=0.0),
)
_FUSED = (
    Case("fused optimizer", {"compute.fuse": ["optimizer"]}),
    Case("sdpa", {"compute.attention": "sdpa"}, dtype="float32", tolerance=1e-5),
)
_SEQUENCES: tuple[Case, ...] = ()
_ACCUMULATION = (
    Case("accumulation 2", {"accumulation.steps": 2}, optimizer="sgd"),
    Case("accumulation 2 on 2", {"accumulation.steps": 2}, ranks=2, optimizer="sgd"),
)
_DATA_PARALLEL = (
    Case("nothing changed on 2", {}, ranks=2, optimizer="sgd"),
    Case("small buckets on 2", {"communication.bucket_mib": 0.05}, ranks=2),
    Case("gradient as view on 2", {"communication.gradient_as_view": True}, ranks=2),
)
_COMPRESSION: tuple[Case, ...] = ()
_NODES_OF_TWO = {"TRINE_RANKS_PER_NODE": "2"}
_TOPOLOGY = (
    Case("ring on 2", {"communication.algorithm": "ring"}, ranks=2, optimizer="sgd"),
    Case("ring on 4", {"communication.algorithm": "ring"}, ranks=4, optimizer="sgd"),
    Case("tree on 4", {"communication.algorithm": "tree"}, ranks=4, optimizer="sgd"),
    Case(
        "two-level on 2 nodes of 2",
        {"communication.algorithm": "two_level"},
        ranks=4,
        optimizer="sgd",
        environment=_NODES_OF_TWO,
    ),
    Case(
        "algorithm auto on 2 nodes of 2",
        {"communication.algorithm": "auto"},
        ranks=4,
        environment=_NODES_OF_TWO,
    ),
    Case("ring on 8", {"communication.algorithm": "ring"}, ranks=8, optimizer="sgd", slow=True),
    Case("tree on 8", {"communication.algorithm": "tree"}, ranks=8, optimizer="sgd", slow=True),
    Case(
        "two-level on 4 nodes of 2",
        {"communication.algorithm": "two_level"},
        ranks=8,
        optimizer="sgd",
        environment=_NODES_OF_TWO,
        slow=True,
    ),
    Case(
        "ring + small buckets + accumulation on 4",
        {
            "communication.algorithm": "ring",
            "communication.bucket_mib": 0.02,
            "communication.gradient_as_view": True,
            "accumulation.steps": 2,
        },
        ranks=4,
        optimizer="sgd",
    ),
)
_STAGE_1, _STAGE_3 = {"zero.stage": 1}, {"zero.stage": 3}
_ZERO = (
    *(Case(f"zero {stage} on 2", {"zero.stage": stage}, ranks=2) for stage in (1, 2, 3)),
    *(Case(f"zero {stage} sgd on 2", {"zero.stage": stage}, ranks=2, optimizer="sgd") for stage in (1, 2, 3)),
    *(
        Case(f"zero {stage} fp32 on 2", {"zero.stage": stage}, ranks=2, dtype="float32", tolerance=1e-5)
        for stage in (1, 2, 3)
    ),
    *(Case(f"zero {stage} on 4", {"zero.stage": stage}, ranks=4) for stage in (1, 2, 3)),
    *(
        Case(f"zero {stage} in groups of 2 on 4", {"zero.stage": stage, "parallel.shard": 2}, ranks=4)
        for stage in (1, 2, 3)
    ),
    Case(
        "zero 3 sharded automatically on 2 nodes of 2",
        {**_STAGE_3, "parallel.shard": "auto"},
        ranks=4,
        environment={"TRINE_RANKS_PER_NODE": "2"},
    ),
    Case("zero 3 by data and shard on 4", {**_STAGE_3, "parallel.data": 2, "parallel.shard": 2}, ranks=4),
    Case("zero 3 resharding to 2 on 4", {**_STAGE_3, "zero.reshard_after_forward": 2}, ranks=4),
    Case("zero 3 never resharding on 2", {**_STAGE_3, "zero.reshard_after_forward": False}, ranks=2),
    Case("zero 3 always resharding on 2", {**_STAGE_3, "zero.reshard_after_forward": True}, ranks=2),
    Case("zero 3 prefetching 2 on 2", {**_STAGE_3, "zero.prefetch": 2}, ranks=2, model={"layers": 4}),
    Case("zero 3 prefetching nothing on 2", {**_STAGE_3, "zero.prefetch": 0}, ranks=2),
    *(
        Case(
            f"zero {stage} + accumulation on 2",
            {"zero.stage": stage, "accumulation.steps": 2},
            ranks=2,
            optimizer="sgd",
        )
        for stage in (1, 2, 3)
    ),
    *(
        Case(f"zero {stage} + fused on 2", {"zero.stage": stage, "compute.fuse": ["optimizer"]}, ranks=2)
        for stage in (1, 3)
    ),
    *(
        Case(
            f"zero {stage} + bf16 on 2",
            {"zero.stage": stage, "precision.dtype": "bf16"},
            ranks=2,
            dtype="float32",
            tolerance=2e-3,
        )
        for stage in (1, 3)
    ),
    Case(
        "zero 1 + small buckets as views on 2",
        {**_STAGE_1, "communication.bucket_mib": 0.05, "communication.gradient_as_view": True},
        ranks=2,
    ),
    Case("zero 1 + static graph on 2", {**_STAGE_1, "communication.static_graph": True}, ranks=2),
    Case(
        "zero 3 + sdpa on 2",
        {**_STAGE_3, "compute.attention": "sdpa"},
        ranks=2,
        dtype="float32",
        tolerance=1e-5,
    ),
    *(
        Case(
            f"zero {stage} + compiled blocks on 2",
            {"zero.stage": stage, "compute.compile": "blocks"},
            ranks=2,
            dtype="float32",
            tolerance=1e-5,
            slow=True,
        )
        for stage in (1, 3)
    ),
)
_CHECKPOINTING: tuple[Case, ...] = ()
_ACTIVATIONS: tuple[Case, ...] = ()
_COMBINATIONS: tuple[Case, ...] = ()

CASES: tuple[Case, ...] = (
    *_PRECISION,
    *_FUSED,
    *_SEQUENCES,
    *_ACCUMULATION,
    *_DATA_PARALLEL,
    *_COMPRESSION,
    *_TOPOLOGY,
    *_ZERO,
    *_CHECKPOINTING,
    *_ACTIVATIONS,
    *_COMBINATIONS,
)
