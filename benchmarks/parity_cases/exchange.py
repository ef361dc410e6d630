"""How gradients travel: buckets, codes, algorithms."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

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

CASES = (*_DATA_PARALLEL, *_COMPRESSION, *_TOPOLOGY)
