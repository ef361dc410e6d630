"""``engine = "deepspeed"``, which keeps parameters in float32: nearer than 1e-5 is not to be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]


def _case(
    name: str, changes: Mapping[str, Any], tolerance: float = 1e-5, slow: bool = True, **more: Any
) -> Case:
    ranks = more.pop("ranks", 2)
    return Case(
        f"deepspeed {name} on {ranks}",
        {"engine": "deepspeed", **changes},
        ranks=ranks,
        dtype="float32",
        tolerance=tolerance,
        slow=slow,
        **more,
    )


_MASTERS = {"precision.master_weights": True}
CASES = (
    _case("replicas", {}, slow=False),
    _case("alone", {}, ranks=1),
    _case("zero 1", {"zero.stage": 1}),
    _case("zero 2", {"zero.stage": 2}, slow=False),
    _case("zero 3", {"zero.stage": 3}, slow=False),
    _case("zero 3 alone", {"zero.stage": 3}, ranks=1),
    *(_case(f"zero {stage} sgd", {"zero.stage": stage}, optimizer="sgd") for stage in (0, 1, 2, 3)),
    *(
        _case(f"zero {stage} + accumulation", {"zero.stage": stage, "accumulation.steps": 2}, optimizer="sgd")
        for stage in (0, 1, 2, 3)
    ),
    *(
        _case(
            f"zero {stage} + accumulation of documents",
            {"zero.stage": stage, "accumulation.steps": 2},
            optimizer="sgd",
            data="documents",
        )
        for stage in (0, 1, 2, 3)
    ),
    _case("zero 2 + documents", {"zero.stage": 2}, data="documents"),
    _case(
        "zero 2 + global batch",
        {"zero.stage": 2, "accumulation.global_batch": 8, "accumulation.micro_batch": 2},
    ),
    _case("zero 2 + offloaded optimizer", {"zero.stage": 2, "offload.optimizer": "cpu"}),
    _case(
        "zero 2 + offloaded optimizer + accumulation of documents",
        {"zero.stage": 2, "offload.optimizer": "cpu", "accumulation.steps": 2},
        optimizer="sgd",
        data="documents",
    ),
    _case(
        "zero 3 + offloaded both", {"zero.stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}
    ),
    _case("zero 2 + small buckets", {"zero.stage": 2, "communication.bucket_mib": 0.01}),
    _case("zero 2 + no overlap", {"zero.stage": 2, "communication.overlap": False}),
    _case("zero 2 + overlap", {"zero.stage": 2, "communication.overlap": True}),
    _case("zero 3 + second partition of 2", {"zero.stage": 3, "zero.reshard_after_forward": 2}, ranks=4),
    _case("zero 2 + bf16 sent", {"zero.stage": 2, "communication.compression": "bf16"}, 2e-3),
    *(
        _case(f"zero {stage} + bf16", {"zero.stage": stage, "precision.dtype": "bf16"}, 2e-3)
        for stage in (0, 2, 3)
    ),
    *(
        _case(
            f"zero {stage} + bf16 masters", {"zero.stage": stage, "precision.dtype": "bf16", **_MASTERS}, 4e-3
        )
        for stage in (1, 2, 3)
    ),
    *(
        _case(
            f"zero {stage} + fp16 masters",
            {"zero.stage": stage, "precision.dtype": "fp16", **_MASTERS},
            1.2e-3,
        )
        for stage in (1, 2, 3)
    ),
    _case("zero 2 + checkpointing", {"zero.stage": 2, "checkpointing.mode": "full"}),
    _case("zero 3 + checkpointing", {"zero.stage": 3, "checkpointing.mode": "full"}),
    *(
        _case(
            f"zero {stage} + selective checkpointing",
            {"zero.stage": stage, "checkpointing.mode": "selective"},
        )
        for stage in (2, 3)
    ),
    _case("zero 2 + sdpa", {"zero.stage": 2, "compute.attention": "sdpa"}),
)
