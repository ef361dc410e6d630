"""Documents of many lengths: packing and shape buckets."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

CASES = (
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
