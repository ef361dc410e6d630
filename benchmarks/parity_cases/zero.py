"""ZeRO and hybrid sharding."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

_STAGE_1, _STAGE_3 = {"zero.stage": 1}, {"zero.stage": 3}
CASES = (
    *(Case(f"zero {stage} on 2", {"zero.stage": stage}, ranks=2) for stage in (1, 2, 3)),
    *(Case(f"zero {stage} sgd on 2", {"zero.stage": stage}, ranks=2, optimizer="sgd") for stage in (1, 2, 3)),
    *(
        Case(f"zero {stage} fp32 on 2", {"zero.stage": stage}, ranks=2, dtype="float32", tolerance=1e-5)
        for stage in (1, 2, 3)
    ),
    *(Case(f"zero {stage} on 4", {"zero.stage": stage}, ranks=4) for stage in (1, 2, 3)),
    *(
        Case(
            f"zero {stage} clipped + groups of 2 on 4",
            {"zero.stage": stage, "parallel.shard": 2},
            ranks=4,
            optimizer="sgd",
            clip_norm=0.2,
        )
        for stage in (1, 3)
    ),
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
