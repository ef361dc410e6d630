"""Low precision: autocast, loss scaling, master weights."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

CASES = (
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
