"""The cases of ``benchmarks/parity.py``, which are the core of the runtime's tests too.

A case's tolerance is relative, on the loss of every step (``by_last``: on the mean of the last five, for what is only
right on average). 1e-10 in float64 is for what is exact by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from tempfile import gettempdir
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
    #: "windows" of text, all of one length; or "documents" of different ones, padded.
    data: str = "windows"
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
        "bf16 master weights",
        {"precision.dtype": "bf16", "precision.master_weights": True},
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "bf16 master weights on 2",
        {"precision.dtype": "bf16", "precision.master_weights": True},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "fp16 master weights",
        {"precision.dtype": "fp16", "precision.master_weights": True},
        dtype="float32",
        tolerance=6e-4,
    ),
    Case(
        "bf16 master weights + accumulation 4",
        {"precision.dtype": "bf16", "precision.master_weights": True, "accumulation.steps": 4},
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "bf16 master weights + accumulation 4 on 2",
        {"precision.dtype": "bf16", "precision.master_weights": True, "accumulation.steps": 4},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    *(
        Case(
            f"bf16 master weights + zero {stage} on 2",
            {"precision.dtype": "bf16", "precision.master_weights": True, "zero.stage": stage},
            ranks=2,
            dtype="float32",
            tolerance=2e-3,
        )
        for stage in (1, 3)
    ),
    *(
        Case(
            f"fp16 + zero {stage} on 2",
            {"precision.dtype": "fp16", "zero.stage": stage},
            ranks=2,
            dtype="float32",
            tolerance=6e-4,
        )
        for stage in (1, 3)
    ),
    *(
        Case(
            f"bf16 master weights + {name}",
            {"precision.dtype": "bf16", "precision.master_weights": True, **changes},
            ranks=2,
            dtype="float32",
            tolerance=tolerance,
            slow=slow,
        )
        for name, changes, tolerance, slow in (
            (
                "fused and sdpa on 2",
                {"compute.fuse": ["optimizer"], "compute.attention": "sdpa"},
                2e-3,
                False,
            ),
            (
                "views and small buckets on 2",
                {"communication.gradient_as_view": True, "communication.bucket_mib": 0.05},
                2e-3,
                True,
            ),
            (
                "views and accumulation 2 on 2",
                {"communication.gradient_as_view": True, "accumulation.steps": 2},
                2e-3,
                True,
            ),
            ("compression to int8 on 2", {"communication.compression": "int8"}, 4e-3, False),
            ("zero 1 and accumulation 2 on 2", {"zero.stage": 1, "accumulation.steps": 2}, 2e-3, True),
            ("compiled blocks on 2", {"compute.compile": "blocks"}, 2e-3, True),
        )
    ),
    *(
        Case(
            f"fp16 + {name}",
            {"precision.dtype": "fp16", **changes},
            ranks=2,
            dtype="float32",
            tolerance=tolerance,
            slow=slow,
        )
        for name, changes, tolerance, slow in (
            ("compression to fp16 on 2", {"communication.compression": "fp16"}, 6e-4, False),
            ("compression to int8 on 2", {"communication.compression": "int8"}, 2e-3, True),
            (
                "full checkpointing and sdpa on 2",
                {"checkpointing.mode": "full", "compute.attention": "sdpa"},
                6e-4,
                True,
            ),
            (
                "zero 1, fused and accumulation 2 on 2",
                {"zero.stage": 1, "compute.fuse": ["optimizer"], "accumulation.steps": 2},
                6e-4,
                True,
            ),
            (
                "master weights and zero 3 on 2",
                {"precision.master_weights": True, "zero.stage": 3},
                6e-4,
                True,
            ),
            ("compiled blocks on 2", {"compute.compile": "blocks"}, 6e-4, True),
        )
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
#: The sample's parts as Llama has them, all of which can be fused.
_LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}
_REGIONS = ["norm", "mlp", "rotary", "bias_dropout_residual", "cross_entropy"]
_FUSED = (
    Case("fused optimizer", {"compute.fuse": ["optimizer"]}),
    Case("fused cross-entropy", {"compute.fuse": ["cross_entropy"]}),
    Case("fused cross-entropy on 2", {"compute.fuse": ["cross_entropy"]}, ranks=2, optimizer="sgd"),
    Case("fused dropout and residual", {"compute.fuse": ["bias_dropout_residual"]}, model={"dropout": 0.2}),
    *(
        Case(f"fused {name}", {"compute.fuse": [name]}, model=_LLAMA, slow=True)
        for name in ("norm", "mlp", "rotary")
    ),
    Case(
        "fused regions in fp32",
        {"compute.fuse": _REGIONS},
        dtype="float32",
        tolerance=1e-5,
        model=_LLAMA,
        slow=True,
    ),
    *(
        Case(
            f"fused regions + {name}", {"compute.fuse": _REGIONS, **changes}, ranks=2, model=_LLAMA, slow=True
        )
        for name, changes in (
            ("small buckets on 2", {"communication.bucket_mib": 2.0, "communication.first_bucket_mib": 1.0}),
            ("accumulation 2 on 2", {"accumulation.steps": 2}),
            ("full checkpointing on 2", {"checkpointing.mode": "full"}),
            ("zero 3 on 2", {"zero.stage": 3}),
        )
    ),
    Case(
        "fused regions + packing",
        {"compute.fuse": _REGIONS, "data.packing": True},
        data="documents",
        model=_LLAMA,
        slow=True,
    ),
    Case("compiled blocks", {"compute.compile": "blocks"}, slow=True),
    Case("compiled blocks with dropout", {"compute.compile": "blocks"}, model={"dropout": 0.2}, slow=True),
    Case("compiled model in fp32", {"compute.compile": "model"}, dtype="float32", tolerance=1e-5, slow=True),
    Case(
        "compiled blocks + bf16",
        {"compute.compile": "blocks", "precision.dtype": "bf16"},
        dtype="float32",
        tolerance=2e-3,
        slow=True,
    ),
    *(
        Case(f"compiled {what} + {name} on 2", {"compute.compile": what, **changes}, ranks=2, slow=True)
        for what, name, changes in (
            ("blocks", "fused regions", {"compute.fuse": ["norm", "mlp", "cross_entropy", "optimizer"]}),
            ("blocks", "full checkpointing", {"checkpointing.mode": "full"}),
            ("blocks", "zero 3", {"zero.stage": 3}),
            ("model", "data parallel", {}),
        )
    ),
    Case("sdpa", {"compute.attention": "sdpa"}, dtype="float32", tolerance=1e-5),
)
_SEQUENCES = (
    Case("documents, padded", {}, data="documents", optimizer="sgd"),
    Case("documents, padded on 2", {}, ranks=2, data="documents", optimizer="sgd"),
    Case("packing", {"data.packing": True}, data="documents"),
    Case("packing in fp32", {"data.packing": True}, data="documents", dtype="float32", tolerance=1e-5),
    Case("packing, rows of 64", {"data.packing": True, "data.packed_length": 64}, data="documents"),
    Case("packing on 2", {"data.packing": True}, ranks=2, data="documents", optimizer="sgd"),
    Case("packing on 4", {"data.packing": True}, ranks=4, data="documents", optimizer="sgd", slow=True),
    Case("packing + sdpa", {"data.packing": True, "compute.attention": "sdpa"}, data="documents"),
    Case(
        "packing + flash on 2",
        {"data.packing": True, "compute.attention": "flash"},
        ranks=2,
        data="documents",
        optimizer="sgd",
    ),
    Case(
        "packing + accumulation 2 on 2",
        {"data.packing": True, "accumulation.steps": 2},
        ranks=2,
        data="documents",
        optimizer="sgd",
    ),
    Case(
        "packing + accumulation 3",  # cuts documents, since there are fewer rows
        {"data.packing": True, "data.packed_length": 128, "accumulation.steps": 3},
        data="documents",
    ),
    Case(
        "packing + bf16 autocast + sdpa",
        {"data.packing": True, "precision.dtype": "bf16", "compute.attention": "sdpa"},
        data="documents",
        dtype="float32",
        tolerance=2e-3,
    ),
    *(
        Case(
            f"packing + zero {stage} on 2",
            {"data.packing": True, "zero.stage": stage},
            ranks=2,
            data="documents",
            optimizer="adamw" if stage == 1 else "sgd",
        )
        for stage in (1, 2, 3)
    ),
    Case("packing + checkpointing", {"data.packing": True, "checkpointing.mode": "full"}, data="documents"),
    Case(
        "packing + global batch 8 in 2 on 2",
        {"data.packing": True, "accumulation.global_batch": 8, "accumulation.steps": 2},
        ranks=2,
        data="documents",
        optimizer="sgd",
    ),
    Case(
        "packing + fp16 + sdpa",
        {"data.packing": True, "precision.dtype": "fp16", "compute.attention": "sdpa"},
        data="documents",
        dtype="float32",
        tolerance=6e-4,
    ),
    Case(
        "packing, rotary positions",
        {"data.packing": True},
        data="documents",
        model={"positions": "rotary", "norm": "rms", "mlp": "swiglu"},
    ),
    Case(
        "packing + fused regions",
        {
            "data.packing": True,
            "compute.fuse": ["bias_dropout_residual", "mlp", "norm", "rotary", "cross_entropy", "optimizer"],
        },
        data="documents",
        dtype="float32",
        tolerance=1e-5,
        model={"positions": "rotary", "norm": "rms", "mlp": "swiglu"},
        slow=True,
    ),
    *(
        Case(
            f"packing + compiled {what}",
            {"data.packing": True, "data.packed_length": 64, "compute.compile": what},
            data="documents",
            dtype="float32",
            tolerance=1e-5,
            slow=True,
        )
        for what in ("blocks", "model")
    ),
    Case("shape buckets", {"data.shape_buckets": [16, 32]}, data="documents"),
    Case("shape buckets on 2", {"data.shape_buckets": [8, 32]}, ranks=2, data="documents", optimizer="sgd"),
)
_ACCUMULATION = (
    Case("accumulation 2", {"accumulation.steps": 2}, optimizer="sgd"),
    Case("accumulation 2 on 2", {"accumulation.steps": 2}, ranks=2, optimizer="sgd"),
    Case("micro-batch 3 of 8", {"accumulation.micro_batch": 3}, optimizer="sgd"),
    Case("micro-batch 3 of 4 on 2", {"accumulation.micro_batch": 3}, ranks=2, optimizer="sgd"),
    Case(
        "global batch in micro-batches on 2",
        {"accumulation.global_batch": 8, "accumulation.micro_batch": 2},
        ranks=2,
        optimizer="sgd",
    ),
    Case("automatic micro-batch", {"accumulation.steps": "auto"}, optimizer="sgd"),
    Case(
        "automatic micro-batch in little memory",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 3_000_000},
        optimizer="sgd",
    ),
    Case(
        "automatic micro-batch in little memory on 2",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 2_200_000},
        ranks=2,
    ),
    Case(
        "accumulation 2 + bf16 + fused optimizer",
        {"accumulation.steps": 2, "precision.dtype": "bf16", "compute.fuse": ["optimizer"]},
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "micro-batch 1 + small buckets + gradient as view on 2",
        {
            "accumulation.micro_batch": 1,
            "communication.bucket_mib": 0.05,
            "communication.gradient_as_view": True,
        },
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "accumulation 2 + ZeRO 1 on 2",
        {"accumulation.steps": 2, "zero.stage": 1},
        ranks=2,
    ),
    Case(
        "micro-batch 2 + ZeRO 2 on 2",
        {"accumulation.micro_batch": 2, "zero.stage": 2},
        ranks=2,
    ),
    Case(
        "automatic micro-batch + ZeRO 3 on 2",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 2_200_000, "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "micro-batch 1 + full checkpointing on 2",
        {"accumulation.micro_batch": 1, "checkpointing.mode": "full"},
        ranks=2,
    ),
)
_DATA_PARALLEL = (
    Case("nothing changed on 2", {}, ranks=2, optimizer="sgd"),
    Case("small buckets on 2", {"communication.bucket_mib": 0.05}, ranks=2),
    Case("gradient as view on 2", {"communication.gradient_as_view": True}, ranks=2),
    Case("static graph on 2", {"communication.static_graph": True}, ranks=2, optimizer="sgd"),
    Case("first bucket on 2", {"communication.first_bucket_mib": 0.005}, ranks=2, optimizer="sgd"),
    Case("bucket auto on 2", {"communication.bucket_mib": "auto"}, ranks=2, optimizer="sgd"),
    Case(
        "bucket auto + gradient as view on 4",
        {"communication.bucket_mib": "auto", "communication.gradient_as_view": True},
        ranks=4,
    ),
    Case(
        "bucket auto + accumulation on 2",
        {"communication.bucket_mib": "auto", "accumulation.steps": 2},
        ranks=2,
        optimizer="sgd",
    ),
    Case("no overlap on 2", {"communication.overlap": False}, ranks=2, optimizer="sgd"),
)
_COMPRESSED = {"communication.compression": "int8"}
_COMPRESSION = (
    Case("bf16 gradients", {"communication.compression": "bf16"}, 2, "float32", 2e-3),
    Case("bf16 gradients on 4", {"communication.compression": "bf16"}, 4, "float32", 2e-3),
    Case("fp16 gradients", {"communication.compression": "fp16"}, 2, "float32", 6e-4),
    Case("int8 gradients", _COMPRESSED, 2, "float32", 5e-3, by_last=True),
    Case("int8 gradients on 4", _COMPRESSED, 4, "float32", 5e-3, by_last=True),
    Case("int8 gradients, sgd", _COMPRESSED, 2, "float32", 2e-3, "sgd", by_last=True),
    Case("qsgd gradients", {"communication.compression": "qsgd"}, 2, "float32", 5e-3, by_last=True),
    Case(
        "powersgd gradients",
        {"communication.compression": "powersgd", "communication.compression_warmup_steps": 4},
        2,
        "float32",
        0.1,
        by_last=True,
    ),
    Case(
        "onebit gradients",
        {"communication.compression": "onebit", "communication.compression_warmup_steps": 4},
        2,
        "float32",
        0.2,
        by_last=True,
    ),
    Case("terngrad gradients", {"communication.compression": "terngrad"}, 2, "float32", 0.2, by_last=True),
    Case("int8 gradients + zero 3", {**_COMPRESSED, "zero.stage": 3}, 2, "float32", 5e-3, by_last=True),
    Case(
        "bf16 gradients + zero 2", {"communication.compression": "bf16", "zero.stage": 2}, 2, "float32", 2e-3
    ),
    Case(
        "onebit gradients + zero 3",
        {"communication.compression": "onebit", "zero.stage": 3},
        2,
        "float32",
        0.2,
        by_last=True,
    ),
    Case(
        "int8 weights + zero 3",
        {"zero.quantized_weights": True, "zero.stage": 3},
        2,
        "float32",
        1e-2,
        by_last=True,
    ),
    Case("int8 gradients + zero 1", {**_COMPRESSED, "zero.stage": 1}, 2, "float32", 5e-3, by_last=True),
    Case(
        "int8 gradients + accumulation",
        {**_COMPRESSED, "accumulation.steps": 2},
        2,
        "float32",
        5e-3,
        by_last=True,
    ),
    Case(
        "int8 gradients + bf16", {**_COMPRESSED, "precision.dtype": "bf16"}, 2, "float32", 7e-3, by_last=True
    ),
    Case(
        "int8 gradients + fp16", {**_COMPRESSED, "precision.dtype": "fp16"}, 2, "float32", 6e-3, by_last=True
    ),
    Case(
        "int8 gradients + small buckets + views",
        {**_COMPRESSED, "communication.bucket_mib": 0.05, "communication.gradient_as_view": True},
        2,
        "float32",
        5e-3,
        by_last=True,
    ),
)
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
        "ring + bucket auto on 4",
        {"communication.algorithm": "ring", "communication.bucket_mib": "auto"},
        ranks=4,
        optimizer="sgd",
    ),
    Case(
        "ring + zero 1 on 2",
        {"communication.algorithm": "ring", "zero.stage": 1},
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "tree + fp16 autocast on 2",
        {"communication.algorithm": "tree", "precision.dtype": "fp16"},
        ranks=2,
        dtype="float32",
        tolerance=6e-4,
    ),
    Case(
        "ring + bucket auto + master weights on 2",
        {
            "communication.algorithm": "ring",
            "communication.bucket_mib": "auto",
            "precision.dtype": "bf16",
            "precision.master_weights": True,
        },
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "bucket auto + compiled blocks on 2",
        {"communication.bucket_mib": "auto", "compute.compile": "blocks"},
        ranks=2,
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "tree + bf16 compression on 4",
        {"communication.algorithm": "tree", "communication.compression": "bf16"},
        ranks=4,
        dtype="float32",
        tolerance=2e-3,
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
        "zero 3 + fp16 masters on 2",
        {**_STAGE_3, "precision.dtype": "fp16", "precision.master_weights": True},
        ranks=2,
        dtype="float32",
        tolerance=6e-4,
    ),
    Case(
        "zero 3 + bf16 masters + accumulation in groups of 2 on 4",
        {
            **_STAGE_3,
            "parallel.shard": 2,
            "precision.dtype": "bf16",
            "precision.master_weights": True,
            "accumulation.steps": 2,
        },
        ranks=4,
        dtype="float32",
        tolerance=2e-3,
    ),
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
#: One rank repeats the plain run's dropout; two ranks draw their own, so they go without.
_DROPOUT = {"dropout": 0.1, "layers": 4}
_CHECKPOINTING = (
    Case("checkpointing full", {"checkpointing.mode": "full"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "checkpointing every second block",
        {"checkpointing.mode": "full", "checkpointing.every": 2},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing of modules",
        {"checkpointing.mode": "full", "checkpointing.modules": ["blocks.*.attention"]},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("checkpointing selective", {"checkpointing.mode": "selective"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "checkpointing to a budget",
        {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 2_400_000},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("checkpointing auto", {"checkpointing.mode": "auto"}, tolerance=0.0, model=_DROPOUT),
    Case("checkpointing full on 2", {"checkpointing.mode": "full"}, ranks=2, optimizer="sgd"),
    Case("checkpointing selective on 2", {"checkpointing.mode": "selective"}, ranks=2, optimizer="sgd"),
)
_ACTIVATIONS = (
    Case("activations bf16", {"activations.dtype": "bf16"}, dtype="float32", tolerance=2e-3),
    Case("activations fp16", {"activations.dtype": "fp16"}, dtype="float32", tolerance=1e-3),
    Case("activations fp8", {"activations.dtype": "fp8"}, dtype="float32", tolerance=1e-2),
    Case("activations bf16 on 2", {"activations.dtype": "bf16"}, ranks=2, dtype="float32", tolerance=2e-3),
    Case("activations on the cpu", {"offload.activations": "cpu"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "activations on disk",
        {"offload.activations": "nvme", "offload.path": gettempdir()},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("activations on the cpu on 2", {"offload.activations": "cpu"}, ranks=2, optimizer="sgd"),
)
_MEMORY_TOGETHER = (
    Case(
        "checkpointing full + activations on disk",
        {"checkpointing.mode": "full", "offload.activations": "nvme", "offload.path": gettempdir()},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing every second block + activations bf16 on the cpu",
        {
            "checkpointing.mode": "full",
            "checkpointing.every": 2,
            "activations.dtype": "bf16",
            "offload.activations": "cpu",
        },
        dtype="float32",
        tolerance=2e-3,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing full + accumulation 2 on 2",
        {"checkpointing.mode": "full", "accumulation.steps": 2},
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "checkpointing full + static graph on 2",
        {"checkpointing.mode": "full", "communication.static_graph": True},
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "checkpointing full + activations on the cpu + zero 3 on 2",
        {"checkpointing.mode": "full", "offload.activations": "cpu", "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "checkpointing selective + zero 3 on 2",
        {"checkpointing.mode": "selective", "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "activations bf16 + zero 3 on 2",
        {"activations.dtype": "bf16", "zero.stage": 3},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "bf16 autocast + checkpointing full",
        {"precision.dtype": "bf16", "checkpointing.mode": "full"},
        dtype="float32",
        tolerance=2e-3,
        model=_DROPOUT,
    ),
    Case(
        "fused regions + checkpointing selective",
        {"compute.fuse": ["bias_dropout_residual", "mlp", "norm"], "checkpointing.mode": "selective"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "fused regions + activations on the cpu",
        {"compute.fuse": ["bias_dropout_residual", "mlp", "norm"], "offload.activations": "cpu"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "compile blocks + checkpointing full",
        {"compute.compile": "blocks", "checkpointing.mode": "full"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "compile blocks + checkpointing selective",
        {"compute.compile": "blocks", "checkpointing.mode": "selective"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "compile blocks + checkpointing to a budget",
        {
            "compute.compile": "blocks",
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 1_500_000,
        },
        dtype="float32",
        tolerance=1e-5,
        model={"layers": 4},
        slow=True,
    ),
    Case(
        "compile blocks + activations on the cpu",
        {"compute.compile": "blocks", "offload.activations": "cpu"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
)
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
    *_MEMORY_TOGETHER,
    *_COMBINATIONS,
)
