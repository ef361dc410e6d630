"""Fused regions, optimizers and compiled code."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

#: The sample's parts as Llama has them, all of which can be fused.
_LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}
_REGIONS = ["norm", "mlp", "rotary", "bias_dropout_residual", "cross_entropy"]
CASES = (
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
