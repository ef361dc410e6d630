"""Tensor, sequence and loss parallelism, alone and beside sharding, replicas, recomputation and precision."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TENSOR: dict[str, Any] = {"parallel.tensor": 2}
_SEQUENCE = {**_TENSOR, "parallel.sequence": True}
_ALL = {**_SEQUENCE, "parallel.loss": True}
_LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}
_FOUR = {"heads": 4}


def _beside(name: str, changes: dict[str, Any], **rest: Any) -> tuple[Case, Case]:
    """Beside tensor parallelism alone, and beside all of it."""
    return (
        Case(f"tensor + {name}", {**_TENSOR, **changes}, **{"ranks": 2, **rest}),
        Case(f"tensor + sequence + loss + {name}", {**_ALL, **changes}, **{"ranks": 2, **rest}),
    )


CASES = (
    Case("tensor on 2", _TENSOR, ranks=2),
    Case("tensor sequence on 2", _SEQUENCE, ranks=2),
    Case("tensor loss on 2", {**_TENSOR, "parallel.loss": True}, ranks=2),
    Case("tensor + sequence + loss sgd on 2", _ALL, ranks=2, optimizer="sgd"),
    Case("tensor + sequence + loss fp32 on 2", _ALL, ranks=2, dtype="float32", tolerance=1e-5),
    Case("tensor of 4 on 4", {"parallel.tensor": 4}, ranks=4, model=_FOUR, slow=True),
    Case("tensor of 4 + sequence + loss on 4", {**_ALL, "parallel.tensor": 4}, ranks=4, model=_FOUR),
    *_beside("gated, rms and rotary on 2", {}, model=_LLAMA),
    *_beside(
        "fused qkv by plan on 2",
        {"parallel.plan": {"blocks.*.attention.out": "row", "blocks.*.attention.qkv": "qkv"}},
    ),
    *_beside("zero 2 on 4", {"zero.stage": 2}, ranks=4, optimizer="sgd"),
    *_beside("zero 3 on 4", {"zero.stage": 3}, ranks=4),
    *_beside("zero 3 fp32 on 4", {"zero.stage": 3}, ranks=4, dtype="float32", tolerance=1e-5),
    *_beside("zero 3 in groups of 2 on 8", {"zero.stage": 3, "parallel.shard": 2}, ranks=8),
    *_beside("replicas on 4", {}, ranks=4),
    *_beside("replicas sgd on 4", {}, ranks=4, optimizer="sgd"),
    *_beside("checkpointing on 2", {"checkpointing.mode": "full"}),
    *_beside("selective checkpointing on 2", {"checkpointing.mode": "selective"}),
    *_beside("zero 3 + checkpointing on 4", {"zero.stage": 3, "checkpointing.mode": "full"}, ranks=4),
    *_beside("accumulation on 2", {"accumulation.steps": 2}, optimizer="sgd"),
    *_beside(
        "zero 3 + accumulation on 4", {"zero.stage": 3, "accumulation.steps": 2}, ranks=4, optimizer="sgd"
    ),
    *_beside("sdpa on 2", {"compute.attention": "sdpa"}, dtype="float32", tolerance=1e-5),
    *_beside("bf16 on 2", {"precision.dtype": "bf16"}, dtype="float32", tolerance=2e-3),
    *_beside("fp16 on 2", {"precision.dtype": "fp16"}, dtype="float32", tolerance=6e-4),
    *_beside(
        "zero 3 + masters on 4",
        {"zero.stage": 3, "precision.dtype": "bf16", "precision.master_weights": True},
        ranks=4,
        dtype="float32",
        tolerance=2e-3,
    ),
    *_beside("fused optimizer on 2", {"compute.fuse": ["optimizer"]}),
    *_beside(
        "fused regions on 2",
        {"compute.fuse": ["norm", "mlp", "rotary", "bias_dropout_residual"]},
        dtype="float32",
        tolerance=1e-5,
        model=_LLAMA,
    ),
    *_beside(
        "compiled blocks on 2", {"compute.compile": "blocks"}, dtype="float32", tolerance=1e-5, slow=True
    ),
    Case("tensor + documents on 4", _TENSOR, ranks=4, data="documents"),
    Case(
        "tensor + sequence + loss + documents in shape buckets on 4",
        {**_ALL, "data.shape_buckets": [8, 16, 32]},
        ranks=4,
        data="documents",
    ),
    Case("tensor + sequence + loss + clipped on 2", _ALL, ranks=2, optimizer="sgd", clip_norm=0.2),
    Case(
        "tensor + sequence + loss + zero 3 + clipped on 4",
        {**_ALL, "zero.stage": 3},
        ranks=4,
        optimizer="sgd",
        clip_norm=0.2,
    ),
    *_beside(
        "pipeline 2 on 4", {"parallel.pipeline": 2, "parallel.microbatches": 4}, ranks=4, model={"layers": 4}
    ),
    *_beside(
        "context 2 on 4", {"parallel.context": 2}, ranks=4, model={"attention": "sdpa"}, optimizer="sgd"
    ),
    *_beside("mixture on 2", {}, model={"experts": 4, "mlp": "swiglu"}),
    *_beside("expert 2 on 4", {"parallel.expert": 2}, ranks=4, model={"experts": 4}, optimizer="sgd"),
    *_beside("optimizer on the cpu on 2", {"offload.optimizer": "cpu"}),
    *_beside("parameters on the cpu + zero 3 on 4", {"offload.parameters": "cpu", "zero.stage": 3}, ranks=4),
    *_beside("offloaded activations on 2", {"offload.activations": "cpu"}),
    *_beside(
        "low-precision activations on 2", {"activations.dtype": "bf16"}, dtype="float32", tolerance=2e-3
    ),
)
